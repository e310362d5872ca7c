# Every target sets up .venv by itself, once: again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint bench clean

help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 13) else "Python 3.10, 3.11 or 3.12 is needed and $(PYTHON) is %d.%d: type make PYTHON=python3.11" % v)'
	@echo "Installing into $(VENV) (torch, Ray, verl, diffusers: two minutes or more the first time) ..."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip
	@$(PY) -m pip install --quiet torch==2.13.0
	@PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP) ## Set up .venv only

quickstart: $(STAMP) ## Train a small text-to-image model to write numbers, and write a report
	@$(PY) -m verl_omni.quickstart

# Two at a time: most of a whole run's time goes into starting processes. In the order of tests/conftest.py.
test: $(STAMP) ## Run the tests
	@$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP) ## Check the style, and that imports go down only
	@$(PY) -m ruff check .
	@$(VENV)/bin/lint-imports --no-logo

bench: $(STAMP) ## Measure speed at a small size
	@$(PY) -m benchmarks.run --small

clean: ## Remove what tools and runs leave behind, except .venv and outputs/
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
