# `make repro`   the environment, then the experiment
# `make test`    the environment, then lint, types and every test
#
# PROFILE=gpu    CUDA build of vLLM from requirements/gpu.txt; chosen by itself beside nvidia-smi
# PARAMS=FILE    use a complete params file, e.g. PARAMS=profiles/smoke.yaml

PROFILE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PYTHON ?= python3
LOCK := requirements/$(PROFILE).txt
STAMP := .venv/.installed-$(PROFILE)
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
BUILT := arctic-inference
# engines start on one core each, so two processes share the tests as tests/conftest.py deals them
TWO := -n 2 --dist loadscope --no-loadscope-reorder
PROMPTS := data/prompts/large.jsonl
PROMPT_PACKAGES := .cache/prompt_packages

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: help venv doctor preflight repro prompts show test test-long torture unit lint docs lock clean

.DEFAULT_GOAL := help

help: ## this text
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5
	@echo 'Targets:'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 10 | sed 's/^/  /'

venv: $(STAMP) ## .venv with everything in the lock file

# torch's CPU build is asked for alone: plainly first, since pip may know a place for it, then from
# PyTorch's own index. Everything else comes from the lock file, without resolving. $(BUILT) is
# source only: it is built last, with the torch, cmake, ninja and nanobind of the lock file, since for
# an isolated build pip would download a second torch, the CUDA one (2 GB).
$(STAMP): $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo '$(PYTHON) is older than 3.11; name another: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo 'apt-get install python3-venv' >&2; exit 1; }
	@if [ $(PROFILE) = cpu ]; then \
	  command -v g++ >/dev/null || { echo 'vLLM compiles on this CPU: apt-get install g++' >&2; exit 1; }; \
	  test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	    || { echo '$(BUILT) is compiled for this Python: apt-get install python3-dev' >&2; exit 1; }; \
	  $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo 'vLLM links to it: apt-get install libnuma1' >&2; exit 1; }; \
	fi
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	pip install --quiet --upgrade pip
	if grep -q '^torch==.*+cpu' $(LOCK); then \
	  pip install --quiet --no-deps "$$(grep '^torch==' $(LOCK))" 2>/dev/null \
	  || pip install --quiet --no-deps --index-url $(PYTORCH_CPU_INDEX) "$$(grep '^torch==' $(LOCK))"; \
	fi
	grep -v '^$(BUILT)==' $(LOCK) \
	  | pip install --progress-bar off --quiet --no-deps -r /dev/stdin
	if grep -q '^$(BUILT)==' $(LOCK); then \
	  pip install --progress-bar off --quiet --no-deps --no-build-isolation \
	    "$$(grep '^$(BUILT)==' $(LOCK))"; \
	fi
	touch $@

doctor: venv ## would a run work here, and what would it take; PARAMS=profiles/NAME.yaml asks for a profile
	@if grep -q '$(PROMPTS)' $(or $(PARAMS),params.yaml); then $(MAKE) --no-print-directory prompts; fi
	@python -m specmill.doctor $(if $(PARAMS),--params "$(PARAMS)")

repro: venv ## run what changed and print the comparison; PARAMS=profiles/NAME.yaml uses a profile
	@if [ -n "$(PARAMS)" ]; then python -m specmill.profile "$(PARAMS)"; fi
	@if grep -q '$(PROMPTS)' params.yaml; then $(MAKE) --no-print-directory prompts; fi
	dvc repro
	@python -m specmill.epilogue

preflight: venv ## does the pipeline run for a verifier's class: a shrunken twin, minutes; CONFIG=FOLDER_OR_JSON
	python -m specmill.preflight $(if $(PARAMS),--params "$(PARAMS)") $(if $(CONFIG),--config "$(CONFIG)")

prompts: $(PROMPTS) ## write data/prompts/large.jsonl: 21,000 training prompts, see docs/own-dataset.md

# The packages lie in a folder of their own, so that nothing of the lock file changes; what they
# import is taken from .venv first. Three are source only and built with the setuptools there.
$(PROMPT_PACKAGES): requirements/prompts.txt $(STAMP)
	rm -rf $@
	pip install --quiet --target $@ --no-deps --no-build-isolation --require-hashes -r $<
	touch $@

$(PROMPTS): $(PROMPT_PACKAGES) $(wildcard specmill/prompt_*.py data/prompts/grammar/*.yaml)
	python -m specmill.prompt_sets $< $@

# `dvc exp show` alone has a column for every figure, parameter and file; with --only-changed for those
# that differ
show: venv ## experiments side by side in a dozen columns
	dvc exp show \
	  --drop '(?!Experiment|State|(?!none\.)[^/:]*\.(speedup|acceptance_length)$$|spec\.tokens|train\.lr|vocab\.d).*'

test: venv lint ## lint, types and all tests but the long ones, the whole pipeline included
	pytest $(TWO)

test-long: venv ## what `make test` leaves out: every method, more kills (an hour)
	pytest -m long

torture: venv ## strike every stage at random moments (hours): reports/torture.json, docs/reliability.md
	python -m benchmarks.torture --json reports/torture.json
	python -m benchmarks.torture --table

unit: venv ## tests that start no engine and run no DVC: a few minutes
	pytest $(TWO) -m "not e2e and not slow"

lint: venv ## ruff and mypy
	ruff check .
	ruff format --check .
	mypy

docs: venv ## write docs/params.md from specmill/params.py
	python -m specmill.params_file

lock: ## write requirements/PROFILE.txt anew from PROFILE.in
	$(PYTHON) requirements/lock.py $(PROFILE)

clean: ## remove .venv, .cache (interrupted work!) and logs
	rm -rf .venv .cache logs
