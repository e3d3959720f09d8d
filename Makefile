# Every target sets itself up: it makes .venv once and reuses it while the pins stay the same.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Real inference servers live in environments of their own: their pins are not Headway's.
VLLM := .venv-vllm
SGLANG := .venv-sglang

# The first of runs/NAME-1, runs/NAME-2, ... that is free.
next_run = $$(n=1; while [ -e runs/$(1)-$$n ]; do n=$$((n + 1)); done; echo runs/$(1)-$$n)

.PHONY: help demo demo-sync test test-kill test-faults test-vllm test-sglang lint types bench docs plots clean
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

test-kill: $(STAMP) ## a real run, killed fifty times and resumed
	HEADWAY_KILLS=50 $(BIN)/python -m pytest --timeout=3600 tests/test_kill.py

SEEDS ?= 2000
test-faults: $(STAMP) ## SEEDS=2000 simulated runs that are broken on purpose, over all cores
	$(BIN)/headway simulate --faults 0-$$(($(SEEDS) - 1))

test-vllm: $(STAMP) $(VLLM)/.installed ## two real vLLM servers on the CPU, and runs on them
	HEADWAY_REAL_KIND=vllm HEADWAY_REAL_PYTHON=$(VLLM)/bin/python \
	  $(BIN)/python -m pytest --capture=no --timeout=900 tests/real

test-sglang: $(STAMP) $(SGLANG)/.installed ## the same with SGLang
	HEADWAY_REAL_KIND=sglang HEADWAY_REAL_PYTHON=$(SGLANG)/bin/python \
	  $(BIN)/python -m pytest --capture=no --timeout=900 tests/real

$(VLLM)/.installed: tests/real/requirements-vllm.txt
$(SGLANG)/.installed: tests/sglang_cpu/requirements.txt
$(VLLM)/.installed $(SGLANG)/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

lint: $(STAMP) ## ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

bench: $(STAMP) ## CPU time per rollout and per request: loop, simulation, engine client
	$(BIN)/python -m benchmarks.control_loop
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.engine_client
	$(BIN)/python -m benchmarks.durability

docs: $(STAMP) ## write docs/configuration.md from the models
	$(BIN)/python -m headway.config.reference > docs/.configuration.md
	mv docs/.configuration.md docs/configuration.md

plots: $(STAMP) ## draw docs/plots again, from simulated runs
	$(BIN)/python -m benchmarks.plots

clean: ## remove the virtual environment and caches; runs stay
	rm -rf $(VENV) $(VLLM) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
