# One verb per job, and every verb does its own set-up: a bare machine with make and python3 (3.10 or newer, with venv) is
# enough for `make train` and `make test`. Nothing is installed outside $(VENV).

PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
SITE      = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What `make train` trains: MODEL names configs/$(MODEL)_small.yaml, TEXT is a file or folder of your own, RUN the folder
# of the results, ITERS a shorter (or longer) run. Empty means the default.
MODEL ?= gpt
TEXT  ?=
ITERS ?=
RUN   ?=

.DEFAULT_GOAL := help
.PHONY: help venv train test test-fast lint check docs bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP)  ## create .venv with everything that training and tests need

# The stamp is younger than both lists only after an installation that succeeded.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $(PYTHON) must be Python 3.10 or newer; name another one with PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot create virtual environments (no ensurepip)." >&2; \
	  echo "  fix: apt-get install python3-venv  (Debian, Ubuntu), or another Python with PYTHON=..." >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

train: $(STAMP)  ## text in, trained model out: corpus, tokenizer, training, loss.png, report.html, a sample
	$(BIN)/python -m megatron_lite quickstart --model $(MODEL)$(if $(TEXT), --text "$(TEXT)")$(if $(ITERS), --iters $(ITERS))$(if $(RUN), --run "$(RUN)")

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest

test-fast: $(STAMP)  ## the tests that take no longer than a few seconds each
	$(BIN)/python -m pytest -m "not slow"

lint: $(STAMP)  ## formatting, ruff, mypy and the documentation's links, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SITE) --quiet

check: $(STAMP)  ## format and fix in place, then ruff and mypy: before each commit
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in build/site; a warning is an error
	$(SITE)
	@echo "open build/site/index.html"

bench: $(STAMP)  ## our training step beside Hugging Face's, and beside its own matrix products
	$(BIN)/python benchmarks/step_time.py

clean:  ## remove caches and build products; keeps .venv and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
