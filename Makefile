# `make test` and `make demo` each set up .venv by themselves on a machine with Python 3.10+ and a network.
# torch is pinned: 2.13.0 is the release that was tried; set TORCH= to use what a platform offers.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: setup test lint demo bench processors faults transformers clean
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

# Neighbouring tests share bundles and traces, so workers get them in runs (--dist worksteal).
test: lint
	$(BIN)/pytest -n 2 --dist worksteal

# Ends with a chat page: the server runs until Ctrl-C where there is somebody to open its address.
demo: setup
	$(BIN)/python -m eagle_tools.demo
	@if [ -t 1 ]; then $(BIN)/eagle-serve .demo/eagle1; \
	else echo "for a chat page: $(BIN)/eagle-serve .demo/eagle1, and open http://127.0.0.1:8000/"; fi

# Hours, and 16 GB of disk in .bench; what is finished is kept, so it can be stopped. BENCH="--pairs demo" takes minutes.
bench: setup
	$(BIN)/python -m eagle_tools.results $(BENCH)

# Half an hour; needs Debian's qemu-user. Keeps an ARM64 Python in ~/.cache/eagle-edge-arm64, or in EAGLE_ARM64.
processors: setup
	$(BIN)/pytest -n 2 -m "emulated or not emulated" tests/processors

# Some ten minutes: damaged bundles and caches, killed exports, threads (docs/reliability.md). EAGLE_FAULTS=10 for ten times as many.
faults: setup
	$(BIN)/pytest -n 2 -m slow tests/faults

# Families with the oldest and the newest release of the tested range (docs/families.md says which rows the oldest fails).
OLDEST = 5.0.0
NEWEST = 5.24.0
ROWS = $(OLDEST):logits and not Granite and not Phi-4-mini and not Gemma-2|$(NEWEST):logits

transformers: setup
	for release in $(OLDEST) $(NEWEST); do \
	  rows=$$(echo "$(ROWS)" | tr '|' '\n' | sed -n "s/^$$release://p"); \
	  $(BIN)/python -m pip install -q --upgrade --target .transformers/$$release transformers==$$release && \
	  PYTHONPATH=.transformers/$$release $(BIN)/pytest -n 2 tests/export/test_families.py -k "$$rows" || exit 1; \
	done

clean:
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
