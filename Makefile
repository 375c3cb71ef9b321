# `make demo` and `make test` set up everything they need in .venv, from Python 3.11+ and g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
NATIVE := $(wildcard native/*.cpp native/*.h native/third_party/*.h) CMakeLists.txt pyproject.toml

export HF_HUB_OFFLINE := 1

.PHONY: install demo test test-full check fix bench clean stubs

install: $(STAMPS)/native

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefixkv needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# Everything but the project itself, so that a changed C++ file does not resolve it all again.
$(STAMPS)/deps: $(STAMPS)/venv constraints.txt pyproject.toml
	@echo "Installing into $(VENV): about 1.4 GB, a few minutes."
	@$(PIP) scikit-build-core nanobind cmake ninja
	@$(BIN)/python tools/requirements.py dev > $(STAMPS)/requirements.txt
	@$(PIP) -r $(STAMPS)/requirements.txt
	@touch $@

# Editable: Python files are used where they lie, the native core is built into build/ and linked in.
$(STAMPS)/native: $(STAMPS)/deps $(NATIVE)
	@echo "Building the native core."
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

demo: install
	$(BIN)/prefixkv demo

test: install
	$(BIN)/python -m pytest

test-full: install
	$(BIN)/python -m pytest --full

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/stubs.py --check

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: install
	$(BIN)/python tools/stubs.py

bench: install
	$(BIN)/python benchmarks/bench_engine.py

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
