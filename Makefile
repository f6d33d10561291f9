# The two commands of a newcomer are `make demo` and `make test`; each sets up what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
# One thread a process: several processes that each take all cores slow one another down.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Every program imports torch or web3: without stored byte code it compiles them at each start.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=

.PHONY: help setup demo demo-stop test test-all soak coverage check format contracts bench gpu clean

help: ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## Virtual environment, packages, local chain (10 minutes the first time at most)
	@scripts/setup.sh

demo: setup ## The whole network on this machine, then its six findings (≤ 12 minutes)
	@$(PY) -m devnet up $(ARGS)

demo-stop: ## Ends a demo left running
	@if [ -x $(PY) ]; then $(PY) -m devnet stop; else echo "nothing was left running"; fi

test: setup ## The tests (≤ 12 minutes); what lacks its engine is skipped by name
	@$(PY) -m pytest -rfEs -n 2 --dist loadfile -m "not slow and not soak and not gpu" $(ARGS)

test-all: setup ## Every test but those of `make gpu` and `make soak` (≤ 60 minutes); whole networks first
	@export PRIME_TESTS_SKIP_NOTHING=1; failed=0; \
	$(PY) -m pytest -rfEs --durations=40 -n 2 --dist loadfile --no-loadscope-reorder -m "not soak and not gpu" tests/e2e $(ARGS) || failed=$$?; \
	while [ -n "$$PRIME_TESTS_WAIT_FOR" ] && [ ! -e "$$PRIME_TESTS_WAIT_FOR" ]; do sleep 1; done; \
	$(PY) -m pytest -rfEs --durations=60 -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/e2e -m "not soak and not gpu" $(ARGS) || failed=$$?; exit $$failed

soak: setup ## Long runs by name: make soak ARGS="demo-runs"; without ARGS it lists them
	@$(PY) -m devnet soak $(ARGS)

coverage: setup ## Lines and branches that the tests reach, children too, no networks (an hour) → bench/results/coverage.json
	@$(PY) scripts/coverage_python.py $(ARGS)

check: setup ## Lint, types, floors, formats
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/lint-imports
	@$(PY) -m mypy
	@scripts/forge fmt --check

format: setup ## Rewrites files in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@scripts/forge fmt

contracts: setup ## Compiles the contracts and writes protocol/prime_chain/abi
	@$(PY) scripts/build_contracts.py

bench: setup ## One bench: make bench ARGS="NAME --json"
	@$(PY) -m bench $(ARGS)

gpu: ## What one CUDA card does with this code (≤ 8 minutes; needs torch, Triton, transformers, no setup); ARGS='--half 2': the rest
	@python3 scripts/gpu_kit.py run $(ARGS)

clean: demo-stop ## Removes what was made, but for .venv and node_modules
	@rm -rf var contracts/out contracts/cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
