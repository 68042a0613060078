# Every target makes the virtual environment it needs. pip reads its usual variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS, ...), so that it can be pointed at a mirror or at a CPU build of torch.

PYTHON ?= python3
JOBS ?= 2
N ?= 1000

BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz-files lint docs site bench fuzz clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(INSTALLED) ## Show what Partita does, in under a minute
	$(BIN)/partita demo

test: lint ## Check style, types and layers, then run the tests (JOBS=2 at a time)
	$(BIN)/python -m pytest -n $(JOBS)

test-all: lint ## The same with every variant, those that take long too (not the fuzz)
	$(BIN)/python -m pytest -n $(JOBS) -m "not fuzz"

lint: $(INSTALLED) ## Check style, types and layers only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED) ## Run the examples of the documentation
	$(BIN)/python -m pytest tests/test_documentation.py tests/test_docstrings.py

site: $(INSTALLED) ## Build the documents as a site in build/site, warnings as errors
	$(BIN)/python -m sphinx --fail-on-warning --quiet docs build/site

bench: $(INSTALLED) ## Measure beside torch
	$(BIN)/python -m benchmarks

fuzz: $(INSTALLED) ## Check the laws on N=1000 generated graphs (ARGS=--modes: on nests of modes; ARGS='--lower NAME': lowered; ARGS=--recompute: recomputed)
	$(BIN)/python -m partita.testing.fuzz --graphs $(N) $(ARGS)

fuzz-files: $(INSTALLED) ## Load 10,000 spoilt .pt2 files and dry run 100,000 odd calls, in processes with limits
	$(BIN)/python -m pytest -n $(JOBS) -m fuzz tests/program/archives/test_fuzz.py

clean: ## Remove the virtual environment, caches and build outputs
	rm -rf partita-demo.html .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and through the constraints: its pinned version also fits a build with a local suffix such as +cpu,
# and nothing later can ask for another one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -e '.[dev]'
	@touch $@
