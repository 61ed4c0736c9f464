# Everything runs inside .venv, which the first target that needs it sets up.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Tests start many processes; where this is set, each of them would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
# Neighbouring tests share what they prepare, so a worker keeps a row of them and gives some away
# only when another one has nothing left to do. Slow tests wait for processes and connections, so
# `make test` has one worker more than cores.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/python -m pytest --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-fast test-ray check bench bench-size attacks fuzz chaos golden data tools clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

docs: setup  ## Build the documentation site in build/site; it needs no network to read
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs/site . build/site
	@echo "open build/site/index.html"

data: setup  ## Fetch MNIST for the tests that use real data; they are skipped without it
	-$(BIN)/peerage data get mnist

# Network namespaces need `ip`, and the tests of the dashboard a browser. Where they are missing and
# cannot be installed, their tests are skipped.
INSTALL = test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
  { timeout 120 apt-get -qq update; \
  timeout 600 apt-get -qq install --yes --no-install-recommends $(1); } >/dev/null 2>&1
tools:
	@command -v ip >/dev/null || { $(call INSTALL,iproute2); } || \
	  echo "ip is missing (package iproute2): tests that pull network cables are skipped"
	@command -v chromedriver >/dev/null || { $(call INSTALL,chromium chromium-driver); } || \
	  echo "chromium or chromedriver is missing: tests of the dashboard in a browser are skipped"

test: check data tools  ## Set up, check style and types, fetch MNIST and run all tests
	$(PYTEST) -n $$(($(CORES) + 1))

test-fast: setup  ## Tests without processes, network and fetched data (under 90 seconds)
	$(PYTEST) -n $(CORES) -m "not slow"

# The tests of the engines, with a Ray cluster per worker of pytest.
ENGINE_TESTS := tests/engine tests/contract tests/algorithms tests/runs tests/test_hub.py \
  tests/test_engine_option.py
test-ray: setup  ## The tests of engines, algorithms and runs, all with the engine ray: [ARGS=...]
	$(PYTEST) -n 1 --engine ray $(ENGINE_TESTS) $(ARGS)

check: setup  ## Style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup  ## Measure the speed and memory claims; prints and stores JSON
	$(BIN)/python benchmarks/run.py

bench-size: setup  ## 64 real peers on a ring: messages missing, memory and time (minutes)
	$(BIN)/python benchmarks/size.py --write docs/results/net/size.json

attacks: setup  ## Measure the rate of rounds of real peers under attack (about 5 minutes)
	$(BIN)/python benchmarks/attacks.py

fuzz: setup  ## A million hostile messages against live peers, two hours at most: [PEERAGE_FUZZ=N]
	PYTHONPATH=tests $(BIN)/python benchmarks/fuzz.py

chaos: setup tools  ## Disturb a network of real peers for 20 minutes and store the result: [SEED=1]
	PYTHONPATH=tests $(BIN)/python benchmarks/chaos.py --seed $(or $(SEED),0)

golden: setup  ## Compare results with those of a commit, bit by bit: BASE=commit [ONLY=pattern]
	$(BIN)/python tools/golden.py --only '$(ONLY)' -- '$(BASE)'

clean:  ## Remove the environment and caches, but no runs
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
