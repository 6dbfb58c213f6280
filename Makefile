# make demo and make test set up what they need in .venv (tools/setup.sh) and run. The rest is for contributors.
SHELL := /bin/bash
PYTHON_IN_VENV := .venv/bin/python
# More arguments for pytest: make test PYTEST="-k tee -x"; a debugger needs one process: PYTEST="-n 0 -k tee --pdb"
PYTEST :=
# Benchmarks to run, all unless given, and options: make bench BENCH="start tee --record"
BENCH :=
# Compiled files are part of what users get; a shell that forbids them would make every start slower.
unexport PYTHONDONTWRITEBYTECODE
# More than half of the tests' time is waiting, so six files at a time keep two processors busy, eight of those that
# start servers, and six of those that take long; the longest files come first.
TESTING := $(PYTHON_IN_VENV) -m pytest --dist loadfile --no-loadscope-reorder
TESTING_CLIENTS := .venv-clients/bin/python -m pytest -p no:anyio -n 3 --dist worksteal tests/clients
# `make cover` runs them, and test-all leaves them out.
UNIT_TESTS_OF_CORE = $$(grep -l elastic_run.core tests/unit/*.py)
# Another life among faults: make chaos CHAOS="--seed 17 --faults 40"
CHAOS :=
# Packages to change, all unless given, and options: make mutate MUTATE="report store --sample 30 --seed 2"
MUTATE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-test demo test test-system test-long test-all test-tools soak test-clients test-gpu chaos mutate cover lint format types docs bench figures picture history-picture build clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | sort | column -t -s $$'\t' 2>/dev/null || true

setup: ## make or refresh .venv; does nothing when it is up to date
	@tools/setup.sh

setup-demo setup-test:
	@tools/setup.sh $(@:setup-%=%)

demo: setup-demo ## train on 2 workers, kill one, restart, resume, end with a lower loss
	@$(PYTHON_IN_VENV) examples/resume/demo.py

test: setup-test ## the tests that need git, make and Python only, and don't take long; 4 minutes on two processors
	$(TESTING) -n 6 -m "not long and not system and not soak" $(PYTEST)

test-long: setup ## the tests that take long: many imports of torch, kills in a row, times beside torchrun's
	$(TESTING) -n 6 -m "long and not system and not soak" $(PYTEST)

soak: setup test-tools ## all of the families of tests of which CI runs a sample: kinds of failures, kills, lives among faults; an hour, as root
	@tools/setup-clients.sh
	$(TESTING) -n 4 -m soak $(PYTEST)
	$(TESTING_CLIENTS) -m soak $(PYTEST)

test-tools: # beside `setup`, with more than one job
	@tools/test-tools.sh

test-system: setup test-tools ## the tests that need root, a compiler or a server (etcd, Slurm, nftables), which it installs
	$(TESTING) -n 8 -m "system and not soak" $(PYTEST)

test-all: setup test-tools ## test, test-long and test-system in one run, as CI does, without the tests that `make cover` runs
	$(TESTING) -n 8 -m "not soak" --ignore=tests/scenarios $$(printf -- '--ignore=%s ' $(UNIT_TESTS_OF_CORE)) $(PYTEST)

test-clients: setup ## accelerate, lightning, torchft, torchx, transformers and notebooks on elastic-run; installs them into .venv-clients
	@tools/setup-clients.sh
	$(TESTING_CLIENTS) -m "not soak" $(PYTEST)

test-gpu: ## NCCL, CUDA and the driver on this machine's NVIDIA GPU; needs a torch with CUDA: make test-gpu PYTHON=python3
	$${PYTHON:-$(PYTHON_IN_VENV)} -m pytest -p no:benchmark -n 6 --timeout=90 tests/gpu $(PYTEST)

chaos: setup test-tools ## train on three virtual hosts through 30 random faults; needs root, takes minutes
	$(PYTHON_IN_VENV) -m tests.chaos $(CHAOS)

mutate: setup test-tools ## change random places of the code, in a copy, and list the changes that no test notices; minutes for each package
	$(PYTHON_IN_VENV) -m tests.mutate $(MUTATE)

cover: setup ## the unit tests of the pure core; every branch of it must be taken
	$(PYTHON_IN_VENV) -m pytest -q -n 2 --cov=elastic_run/core --cov-branch --cov-fail-under=100 \
	  $(UNIT_TESTS_OF_CORE) tests/scenarios

lint: setup ## ruff, all rules, and the format
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .

format: setup ## mend what ruff can mend
	$(PYTHON_IN_VENV) -m ruff check --fix-only .
	$(PYTHON_IN_VENV) -m ruff format .

types: setup ## mypy, strict; the public API as its users see it, under pyright as well
	$(PYTHON_IN_VENV) -m mypy
	.venv/bin/basedpyright -p tests/typing --pythonpath $(PYTHON_IN_VENV)

docs: setup ## build the pages into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet

bench: setup test-tools ## figures beside torchrun, ft_launcher and a bare loop, into docs/ and README.md; a quiet machine helps
	@tools/setup-peers.sh
	$(PYTHON_IN_VENV) -m benchmarks $(BENCH)

figures: setup ## write docs/benchmarks.md, its plots and the README's figures of what docs/benchmarks.json records
	$(PYTHON_IN_VENV) -m benchmarks --figures

picture: setup ## run jobs that fail and hang, and draw the reports for the README
	$(PYTHON_IN_VENV) -m benchmarks.pictures reports

history-picture: setup ## run a job with failures, and draw the page of its history for the docs; needs root and Chromium
	$(PYTHON_IN_VENV) -m benchmarks.pictures history

build: setup ## wheel and source archive into dist/
	$(PYTHON_IN_VENV) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove what was built; .venv and .venv-clients stay
	rm -rf site dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
