# `make demo` and `make test` do everything on a fresh Debian-like machine, as root. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
# The system's interpreter is the one that the test hosts have, and faster than most that people build themselves.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
PY := .venv/bin/python
.DEFAULT_GOAL := help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: .venv/.complete  ## the controller's environment, from the lock file

.venv/.complete: requirements.txt
	@tests/hosts/install
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@touch $@

envs: setup      ## the SGLang environments (CPU) that the test hosts serve from
	$(PY) tests/hosts/sglang_env.py 0.5.9 0.5.11 0.5.15.post1 0.5.19 0.5.23

demo: setup      ## a local fleet of two hosts: deploy, gates, and what a refused patch looks like
	@$(PY) -m tests.hosts.demo

demo-down:       ## take the demo's hosts away
	@tests/hosts/testhost down --all

lint: setup      ## ruff, mypy, yamllint, ansible-lint (production)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/yamllint --strict .
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/ansible-lint --offline

# Three workers, each with hosts of its own: most tests wait for hosts and servers. What failed because all wanted the
# cores at once gets one more run, alone, and must pass.
test: setup      ## everything that needs no GPU
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint envs
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder || $(PY) -m pytest --last-failed --last-failed-no-failures none

lock:            ## write requirements.txt from requirements.in (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --quiet requirements.in -o requirements.txt

clean: demo-down ## remove what the targets above made here
	rm -rf .venv .cache

.PHONY: help setup envs demo demo-down lint test lock clean
