# Steps of the gate that do not need one another. Most keep one core busy, or wait for a package index: .ci/run has two
# of them done at a time.
STEPS := arm docs kernels browser wheel
.PHONY: all $(STEPS)
all: $(STEPS)
docs browser:
	$(MAKE) --file Makefile $@
arm kernels wheel:
	.ci/$@
browser: arm # which may install packages, too: apt-get does that for one at a time
