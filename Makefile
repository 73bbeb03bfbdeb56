# Two commands on a fresh machine: `make run` generates from the embedded model, `make test` passes the tests.

PYTHON ?= python3
# The build of torch to install. On Linux without a GPU choose the CPU build of your package index; any torch >= 2.9 serves.
TORCH ?= torch==2.13.0
PROMPT ?= What is a KV cache?
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint native setup clean
.DELETE_ON_ERROR:

run: setup
	$(BIN)/quire run --chat --stats "$(PROMPT)"

test: setup
	./tools/system_packages.sh chromium chromium "the tests of the console, which are skipped without it"
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_todos.py

setup: $(VENV)/installed native

$(VENV)/installed: pyproject.toml Makefile
	./tools/system_packages.sh c++ g++ "the native kernels, without which the slower reference ops serve"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" cmake ninja "scikit-build-core>=0.10"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--config-settings=wheel.cmake=false --editable ".[test]"
	touch $@

# In a checkout the kernels live in build/native; `pip install .` builds them into the package instead.
native: $(VENV)/installed
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja > build/cmake.log 2>&1 \
		|| { cat build/cmake.log; exit 1; }
	@test ! -f build/native/build.ninja || $(BIN)/cmake --build build/native

clean:
	rm -rf build $(VENV)
