# Two commands on a fresh machine: `make run` generates from the embedded model, `make test` passes the tests.

PYTHON ?= python3
# The build of torch to install. On Linux without a GPU choose the CPU build of your package index; any torch >= 2.9 serves.
TORCH ?= torch==2.13.0
PROMPT ?= What is a KV cache?
# Tests that run at once. Some wait, for processes or a moment, so this is more than two cores; engines have threads of
# their own, so it is less than the number of cores on larger machines.
TEST_JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
EDITABLE := --no-build-isolation --config-settings=wheel.cmake=false --editable

.PHONY: run test browser test-arm test-gpu lint docs native native-tests setup clean
.DELETE_ON_ERROR:

run: $(VENV)/installed native
	$(BIN)/quire run --stats "$(PROMPT)"

test: setup browser
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist worksteal

browser:
	./tools/system_packages.sh chromium chromium "the tests of the console, which are skipped without it"

# The kernels for ARM, built by a cross compiler; their tests, run by an emulator, each instruction set on a processor
# that has no more. Skipped where the tools cannot be had.
ARM := aarch64-linux-gnu
ARM_BUILD := build/arm
test-arm: $(VENV)/installed
	@./tools/system_packages.sh $(ARM)-g++ g++-$(ARM) "the tests of the ARM kernels, which are skipped without it"
	@./tools/system_packages.sh qemu-aarch64 qemu-user "the tests of the ARM kernels, which are skipped without it"
	@if command -v $(ARM)-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then \
		mkdir -p $(ARM_BUILD) \
		&& { $(BIN)/cmake -S . -B $(ARM_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
			-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM)-g++ \
			"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/$(ARM)" > $(ARM_BUILD)/cmake.log 2>&1 \
			|| { cat $(ARM_BUILD)/cmake.log; exit 1; }; } \
		&& $(BIN)/cmake --build $(ARM_BUILD) --target all quire_cpu_tests \
		&& $(BIN)/ctest --test-dir $(ARM_BUILD) --output-on-failure --parallel $(TEST_JOBS); \
	else echo "skipped: the ARM kernels need $(ARM)-g++ and qemu-aarch64 to be tested here"; fi

# The Triton kernels, and whole models on them, on the GPU that is here; `make test` has them interpreted.
test-gpu: setup
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/ops/triton tests/models/test_triton.py tests/models/test_captured_steps.py

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_todos.py

# The documentation site, in build/site.
docs: $(VENV)/installed
	$(PIP) "mkdocs-material>=9.5" "mkdocstrings[python]>=0.27"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Everything that tests need; `make run` needs less.
setup: $(VENV)/test-installed native-tests

# What builds the kernels, which takes longest: with `make --jobs 2` the other packages are installed meanwhile.
$(VENV)/build-tools: Makefile
	./tools/system_packages.sh c++ g++ "the native kernels, without which the slower reference ops serve"
	$(PYTHON) -m venv $(VENV)
	$(PIP) cmake ninja "scikit-build-core>=1.1" "vcs-versioning>=2.3"
	touch $@

$(VENV)/installed: $(VENV)/build-tools pyproject.toml
	$(PIP) "$(TORCH)"
	$(PIP) $(EDITABLE) .
	touch $@

$(VENV)/test-installed: $(VENV)/installed
	$(PIP) $(EDITABLE) ".[test]"
	touch $@

# In a checkout the kernels live in build/native; `pip install .` builds them into the package instead.
native: $(VENV)/build-tools
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja > build/cmake.log 2>&1 \
		|| { cat build/cmake.log; exit 1; }
	@test ! -f build/native/build.ninja || $(BIN)/cmake --build build/native

native-tests: native
	@test ! -f build/native/build.ninja || $(BIN)/cmake --build build/native --target quire_cpu_tests

clean:
	rm -rf build $(VENV)
