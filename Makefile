# `make test` and `make demo` each set up .venv by themselves on a machine with Python 3.10+ and a network.
# torch is pinned: 2.13.0 is the release that was tried; set TORCH= to use what a platform offers.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: setup test lint demo bench clean
.DEFAULT_GOAL := test

setup: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2

demo: setup
	$(BIN)/python -m eagle_tools.demo

# Hours, and 16 GB of disk in .bench; what is finished is kept, so it can be stopped. BENCH="--pairs demo" takes minutes.
bench: setup
	$(BIN)/python -m eagle_tools.results $(BENCH)

clean:
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
