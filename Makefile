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
.PHONY: help demo test check bench figures format clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

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

test: $(DEV)  ## install, then run all tests (T="-k ace" passes arguments to pytest)
	@$(BIN)/python -m pytest $(T)

check: $(DEV)  ## ruff, mypy --strict and the import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

.PHONY: chaos
chaos: $(DEV)  ## kill a federation's server 1,000 times, and its clients, lines and disk: half an hour
	@$(BIN)/python -m tests.net.chaos --kills 1000

bench: $(STAMP)  ## measure the server rules; prints a table and writes bench.json
	@$(BIN)/aflock bench server --out bench.json

figures: $(DEV)  ## draw the figures of README and docs again
	@$(BIN)/python docs/figures.py

format: $(DEV)  ## let ruff format and fix what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:  ## remove the environment, caches and results of earlier runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis bench.json build dist src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
