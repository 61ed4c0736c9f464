# Everything runs inside .venv, which the first target that needs it sets up.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench golden data clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready  ## Set up .venv with pinned dependencies and the package

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	# Tests compare curvature with BackPACK, whose metadata asks for torchvision, which it never loads.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	  backpack-for-pytorch einops unfoldNd
	@touch $@

demo: setup  ## DecHW against plain averaging, 50 peers, with a report (about a minute)
	$(BIN)/peerage compare demo --algorithms decavg,dechw

data: setup  ## Fetch MNIST for the tests that use real data; they are skipped without it
	-$(BIN)/peerage data get mnist

test: setup data  ## Set up, fetch MNIST and run all tests
	$(BIN)/python -m pytest -n auto

check: setup  ## Style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup  ## Measure the speed and memory claims; prints and stores JSON
	$(BIN)/python benchmarks/run.py

golden: setup  ## Compare results with those of a commit, bit by bit: BASE=commit [ONLY=pattern]
	$(BIN)/python tools/golden.py --only '$(ONLY)' -- '$(BASE)'

clean:  ## Remove the environment and caches, but no runs
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
