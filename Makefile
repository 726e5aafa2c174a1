# make quickstart   train a small MoE on this machine's CPU, from nothing (Linux)
# make test         every check and test of the project
# make test-fast    the same without the suites that train, start services or take long
# make bench        the benchmarks
# make agree        N=10000 random recipes (SEED=1) before our rules and the real Megatron, some ten minutes; goes on where it ended
# make faults       every fault of docs/faults.md on a real Slurm here (root), about an hour; ONLY=slurmd: those of that word
# make lock         new requirements/*.txt from pyproject.toml (needs uv)
# PYTHON=... chooses the interpreter; NAME=... the quickstart's run.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
RUN := $(VENV)/bin
NAME := quickstart
N := 10000
ONLY :=
SEED := 1
FITS := import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))

# The command line's own packages are compiled now; the trainer's, much larger, when they are first used.
install-moekit = $(RUN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . \
    && $(RUN)/python -m compileall -q moekit $(VENV)/lib/python3*/site-packages/{typer,yaml}

.PHONY: on-linux help quickstart test test-fast lint bench agree faults lock clean

help:
	@sed -n 's/^# \(make\)/\1/p' Makefile

quickstart: $(VENV)/quickstart.stamp
	@$(RUN)/moekit launch recipes/quickstart.yaml --name $(NAME)

test: lint
	@$(RUN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test-fast: lint
	@$(RUN)/python -m pytest -m "not train and not slurm and not long"

lint: $(VENV)/dev.stamp
	@$(RUN)/ruff format --check . && $(RUN)/ruff check . && $(RUN)/mypy

bench: $(VENV)/dev.stamp
	@$(RUN)/python tests/benchmarks/dry_run.py
	@$(RUN)/python tests/benchmarks/rules.py
	@$(RUN)/python tests/benchmarks/rehearse.py dense fp8 upcycle
	@$(RUN)/python tests/benchmarks/runs.py
	@$(RUN)/python tests/benchmarks/tokenize.py
	@$(RUN)/python tests/benchmarks/check_shards.py
	@$(RUN)/python tests/benchmarks/metrics.py
	@$(RUN)/python tests/benchmarks/watch.py --steps 1000000
	@$(RUN)/python tests/benchmarks/counts.py
	@$(RUN)/python tests/benchmarks/trace.py --gb 0.5
	@$(RUN)/python tests/benchmarks/doctor.py
	@$(RUN)/python tests/benchmarks/traces_of_kernels.py --mb 300
	@$(RUN)/python tests/benchmarks/plan.py

agree: $(VENV)/dev.stamp
	@$(RUN)/python tests/differential/agree.py -n $(N) --seed $(SEED) --steps 200 --answers $(VENV)/agree.answers --shrink

faults: $(VENV)/dev.stamp
	@$(RUN)/python tests/faults/make_faults.py $(VENV)/faults "$(ONLY)"

lock: $(VENV)/dev.stamp
	@PATH="$(abspath $(RUN)):$$PATH" requirements/lock.sh

clean:
	rm -rf $(VENV)

on-linux:
	@if [[ "$$(uname -s)" != Linux ]]; then \
	    echo "The quickstart trains with Megatron-Core, which is for Linux: run it on a Linux machine or in a Linux" \
	         "container. Recipes can be written and checked here: pip install . && moekit check first_moe" >&2; exit 1; fi
	@if [[ "$$PWD" == *[[:space:]]* ]]; then \
	    echo "The quickstart keeps its data below this folder, and Megatron reads no path with a space in it: move" \
	         "the folder '$$PWD'" >&2; exit 1; fi

# The virtual environment, by what it can do. dev is quickstart and more, of the same versions.
$(VENV)/dev.stamp: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@$(RUN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	@$(install-moekit)
	@touch $(VENV)/quickstart.stamp $@

$(VENV)/quickstart.stamp: requirements/quickstart.txt pyproject.toml | on-linux $(VENV)/bin/python
	@echo "First run: about 3 GB to download (PyTorch and Megatron-Core), 6 GB on disk in $(VENV)/"
	@$(RUN)/python -m pip install --progress-bar off --no-compile --require-hashes -r requirements/quickstart.txt \
	    | sed -nu 's|^ *Downloading \(.*/\)\{0,1\}\([A-Za-z0-9_.]*\)-[0-9].* (\([0-9]\{3\}[0-9.]* MB\))$$|  downloading \2, \3|p'
	@$(install-moekit)
	@touch $@

# The first interpreter that really runs, is 3.12 or 3.13, and can make a virtual environment.
$(VENV)/bin/python:
	@for python in $(PYTHON) python3.12 python3.13 python3 $$(ls -d "$$HOME"/.pyenv/versions/3.1[23].*/bin/python3 2>/dev/null); do \
	    if "$$python" -c "$(FITS)" 2>/dev/null; then \
	        echo "Python: $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	        exec "$$python" -m venv $(VENV); fi; done; \
	echo "No Python 3.12 or 3.13 with venv was found. Install one (Debian 13: apt-get install python3-venv; else for example" \
	     "uv python install 3.12 or pyenv install 3.12) and say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1
