# The two commands that matter: `make quickstart` and `make test`. `make help` lists the rest.

# The first Python that is new enough; name another with `make env PYTHON=...`.
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done),python3)
BIN := .venv/bin
PACKAGES := rag_mm retriever pipeline data
CODE := $(PACKAGES) train.py tests scripts $(wildcard benchmarks)
# Two workers and one compute thread each: the fastest on two cores.
WORKERS ?= 2
PYTEST_ARGS ?=

# One compute thread per process is faster than two on a two-core machine (README);
# no test and no example reaches for a hub.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Compiled once and kept: the environment is installed without byte-compiling.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env quickstart test test-all torture lint format types lock faiss-gpu clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
		while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

env: .venv/.installed ## .venv with the pinned versions (some minutes, 6 GB; again only when the pins change)
	@:

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) scripts/make_env.py
	@touch $@

quickstart: env ## data, index, joint training on two pipeline stages, evaluation, result table
	@$(BIN)/python -m rag_mm.quickstart

test: env lint types ## everything that checks the project, but the slow tests
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal --durations 15 $(PYTEST_ARGS)

test-all: env lint types ## the slow tests too
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 30 $(PYTEST_ARGS)

torture: env ## kill training 200 times (at most 20 minutes), look for losses, write the table of docs/reliability.md
	@test -e data/factbook/dataset.json || $(BIN)/python -m data.prepare factbook --out data/factbook
	@$(BIN)/python -m benchmarks.reliability.torture
	@$(BIN)/python -m benchmarks.reliability.table

lint: env ## style and format, nothing changed
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE) || { echo "lint: not formatted; run 'make format'" >&2; exit 1; }

format: env ## format, and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only $(CODE)
	@$(BIN)/ruff format --quiet $(CODE)

types: env ## mypy over all packages
	@$(BIN)/mypy $(PACKAGES) train.py

lock: env ## write what is installed into constraints.txt (after changing pins, before testing them)
	@$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check > .venv/freeze.txt
	@sed '/^$$/q' constraints.txt > .venv/constraints.txt
	@grep -vE '^(nvidia-|cuda-|.* @ )' .venv/freeze.txt >> .venv/constraints.txt
	@mv .venv/constraints.txt constraints.txt
	@touch .venv/.installed

faiss-gpu: env ## replace faiss-cpu by the GPU build (both install the module `faiss`, so order matters)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[gpu]'
	@$(BIN)/python -m pip uninstall --quiet --yes faiss-cpu
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall faiss-gpu-cu12
	@$(BIN)/python -c "import faiss; print('faiss', faiss.__version__, 'sees', faiss.get_num_gpus(), 'GPUs')"

clean: ## remove caches, runs and built data; the environment stays (rm -r .venv removes it)
	rm -rf runs data/factbook* .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
