# The commands of this house. `make demo` and `make check` install all they need into .venv and ask for nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# setuptools warns at length that an editable install is one.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BUILT_FROM := pyproject.toml setup.py constraints.txt $(wildcard native/*)

.PHONY: demo check lint test bench soak clean

demo: $(VENV)/.demo             ## text to a trained step, over a real S3 server on this machine
	$(BIN)/binidx demo

check: lint test                ## everything that must hold before a change lands; the C under sanitizers too

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf build/house && mkdir -p build/house && cp -r src/binidx build/house/ && cp -r tools build/house/binidx/tools
	touch build/house/binidx/_native.py
	PYTHONPATH=build/house $(BIN)/lint-imports

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

soak: $(VENV)/.test             ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.test            ## the figures of the README, minutes
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist src/binidx/_native.* src/*.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "binidx needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.demo: $(BIN)/python $(BUILT_FROM)
	$(PIP) --editable '.[demo]'
	@touch $@

# Megatron Core is the oracle of the tests: without its dependencies, which are CUDA's.
$(VENV)/.test: $(BIN)/python $(BUILT_FROM)
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps megatron-core==0.16.1
	@touch $@ $(VENV)/.demo
