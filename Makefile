# Every target sets itself up: it makes .venv once and reuses it while the pins stay the same.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first of runs/NAME-1, runs/NAME-2, ... that is free.
next_run = $$(n=1; while [ -e runs/$(1)-$$n ]; do n=$$((n + 1)); done; echo runs/$(1)-$$n)

.PHONY: help demo demo-sync test lint types bench docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Headway needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local,train,tasks,dev]'
	touch $(STAMP)

demo: $(STAMP) ## asynchronous RL on the embedded engine and trainer (S = 2)
	$(BIN)/headway run examples/demo.yaml --run.dir $(call next_run,demo)

demo-sync: $(STAMP) ## the same, synchronous (S = 0)
	$(BIN)/headway run examples/demo_sync.yaml --run.dir $(call next_run,demo-sync)

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest

lint: $(STAMP) ## ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

bench: $(STAMP) ## CPU time of the control loop per rollout
	$(BIN)/python -m benchmarks.control_loop

docs: $(STAMP) ## write docs/configuration.md from the models
	$(BIN)/python -m headway.config.reference > docs/.configuration.md
	mv docs/.configuration.md docs/configuration.md

clean: ## remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
