# Every target prepares the virtual environment it needs; `make train` and `make test` work on a fresh clone.
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
TORCH   ?= torch==2.13.0
DEMO    := data/demo
RUN_DIR ?= runs/tiny
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: all setup train test test-slow lint bench clean

all: test

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]" "$(TORCH)"
	touch $(STAMP)

$(DEMO)/demo.json: $(STAMP)
	$(BIN)/evenspan data demo $(DEMO)

train: $(DEMO)/demo.json
	$(BIN)/evenspan train --config recipes/wan_ar/configs/tiny.yaml --nproc 2 --logdir $(RUN_DIR)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.activations
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.tensor

clean:
	rm -rf $(VENV) runs data .pytest_cache .mypy_cache .ruff_cache
