# `make demo` and `make test` set up everything they need in .venv, from Python 3.11+ and g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
NATIVE := $(wildcard native/*.cpp native/*.h native/third_party/*.h) CMakeLists.txt pyproject.toml

export HF_HUB_OFFLINE := 1

.PHONY: install demo test test-full wheel-test asan tsan fuzz check fix bench bench-manager bench-systems bench-experiments clean stubs

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

# The library in an environment that has NumPy alone.
wheel-test: install
	$(BIN)/python -m pytest --full tests/test_wheel.py

# What limits memory or time says nothing about a build that keeps freed memory to watch it.
SANITIZED := $(BIN)/python tools/sanitized.py
UNSANITIZED := $(addprefix --deselect tests/, \
	test_memory.py test_reference.py \
	test_hash_misuse.py::test_owners_of_freed_tables_take_no_memory \
	test_radix_tree_random.py::test_an_eviction_costs_at_most_3_times_as_much_in_a_large_tree \
	test_thread_pool.py::test_threads_that_the_system_refuses_are_an_error_and_no_abort)

ASAN_TESTS ?= tests
asan: $(STAMPS)/deps
	$(SANITIZED) address,undefined -m pytest -p no:faulthandler --capture=sys $(ASAN_TESTS) $(UNSANITIZED)

TSAN_TESTS ?= tests/test_threads.py tests/test_thread_pool.py
tsan: $(STAMPS)/deps
	$(SANITIZED) thread -m pytest -p no:faulthandler --capture=sys $(TSAN_TESTS) $(UNSANITIZED)

FUZZ_SECONDS ?= 60
fuzz: $(STAMPS)/deps
	$(BIN)/cmake -S native/fuzz -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja"
	$(BIN)/cmake --build build/fuzz
	build/fuzz/fuzz_seam --seconds $(FUZZ_SECONDS) --artifacts build/fuzz
	build/fuzz/fuzz_tree --seconds $(FUZZ_SECONDS) --artifacts build/fuzz

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

bench-manager: install
	$(BIN)/python benchmarks/bench_manager.py

bench-systems: install
	$(BIN)/python benchmarks/bench_systems.py

# Those of the PagedAttention paper: docs/experiments.md.
bench-experiments: install
	$(BIN)/python benchmarks/bench_sharing.py
	$(BIN)/python benchmarks/bench_fewshot.py
	$(BIN)/python benchmarks/bench_block_size.py

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
