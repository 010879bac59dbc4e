# Every way into the project; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all bench lint type clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(READY)  ## make .venv with the tested versions

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $@

run: setup  ## train the default on the images that ship with the runner; ARGS="precision=bf16" adds overrides
	$(BIN)/python -m runner $(ARGS)

test: setup  ## the everyday suite
	$(BIN)/python -m pytest -m "not slow"

test-all: setup  ## every test, the long ones too
	$(BIN)/python -m pytest

bench: setup  ## the benchmarks: ratios measured in alternation, tables into outputs/bench/
	$(BIN)/python -m tests.benchmarks.overhead

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup  ## mypy
	$(BIN)/mypy

clean:  ## remove .venv, caches and what runs have written
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find outputs -mindepth 1 ! -name .gitkeep -delete
