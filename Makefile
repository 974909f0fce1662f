# Two commands do all the set-up on a machine that has only Python 3.11 and make:
#   make demo    make test

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
INPUTS := pyproject.toml constraints.txt
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# An environment that does not run (a moved clone, an upgraded Python) is made anew.
ifneq ($(shell $(BIN)/aflock --version >/dev/null 2>&1 && echo works),works)
$(shell rm -f $(STAMP) $(DEV))
ifneq ($(shell $(BIN)/python -c '' 2>/dev/null && echo works),works)
$(shell rm -rf $(VENV))
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-avx2 check bench figures format clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "aflock needs Python 3.11 or newer; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python $(INPUTS)
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(DEV): $(BIN)/python $(INPUTS)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(STAMP)

demo: $(STAMP)  ## install, then compare twelve rules on digits with uneven clients: table and figure
	@$(BIN)/aflock demo

# One process per core; files that start servers stay together (tests/conftest.py).
SHARED := -n $(shell nproc 2>/dev/null || echo 2) --dist loadgroup

test: $(DEV)  ## install, then run all tests (T="-k ace" passes arguments to pytest; T="-n 0" runs them in one process)
	@$(BIN)/python -m pytest $(SHARED) $(T)

TORCH_TESTS := $(addprefix tests/,models sim/test_processes.py sim/test_simulation.py net/client/test_narrow_client.py)

test-avx2: $(DEV)  ## run the tests that train torch modules as on a CPU without AVX-512
	@ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest $(SHARED) $(TORCH_TESTS) $(T)

check: $(DEV)  ## ruff, mypy --strict and the import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

.PHONY: chaos
chaos: $(DEV)  ## kill a federation's server 1,000 times, and its clients, lines and disk: half an hour
	@$(BIN)/python -m tests.net.chaos --kills 1000

.PHONY: fuzz
FUZZ ?= 5000000
SEED ?= 1
fuzz: $(DEV)  ## send a server FUZZ=5000000 hostile requests, made from SEED=1: a quarter of an hour
	@AFLOCK_FUZZ=$(FUZZ) AFLOCK_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -q -s --timeout 7200 tests/net/server/http/test_fuzz.py

bench: $(STAMP)  ## measure the server rules; prints a table and writes bench.json
	@$(BIN)/aflock bench server --out bench.json

figures: $(DEV)  ## draw the figures of README and docs again
	@$(BIN)/python docs/figures.py

format: $(DEV)  ## let ruff format and fix what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:  ## remove the environment, caches and results of earlier runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis bench.json build dist src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
