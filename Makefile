# Every target sets up what it needs: .venv from requirements.lock, then the package itself.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test check test-long soak lint types clean

PYTHON ?= python3
MINUTES ?= 20
# tests of one file stay together, because they share engines
TOGETHER := -n 2 --dist loadfile
BIN := .venv/bin
READY := .venv/.ready
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY) ## Create .venv and install everything into it

demo: $(READY) ## One prefill and one decode engine, a question, the transfer record
	$(BIN)/kvpush demo

test: $(READY) ## All tests but the long ones
	$(BIN)/pytest $(TOGETHER) -m "not long"

check: lint types ## Lint, types and the fast tests
	$(BIN)/pytest $(TOGETHER) -m "not engine and not long"

test-long: $(READY) ## The tests that take longer than a CI run may
	$(BIN)/pytest -m long --timeout 3600

soak: $(READY) ## Mixed traffic with kills for MINUTES=20, every text verified
	$(BIN)/kvpush bench soak --minutes $(MINUTES)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

clean: ## Remove .venv and everything that tools have left here
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvpush needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Run: make PYTHON=/path/to/python3.11 ..." >&2; \
	  exit 1; }
	@test -x $(BIN)/pip || { echo "creating .venv"; $(PYTHON) -m venv .venv; } || { \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing $$(grep -vc '^#' requirements.lock) packages (a few minutes the first time)"
	@$(BIN)/pip install --no-deps --no-input --disable-pip-version-check -r requirements.lock 2>&1 \
	  | awk -v total="$$(grep -vc '^#' requirements.lock)" -f .ci/pip-progress.awk
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo "this index's torch needs more packages; installing them"; \
	  $(BIN)/pip install --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"; }
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check --editable .
	@touch $@
