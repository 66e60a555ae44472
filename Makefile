# Commands of the project. `make demo` and `make check` install all they need into .venv and ask for nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# setuptools warns at length that an editable install is one.
# Python compiles what it imports, and keeps it: to compile all 21,000 files of the tests' packages takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# Material for MkDocs announces its successor at length at every start.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
# One more than cores, as tests wait for servers and processes; at most 4.
PROCESSES := $(shell $(PYTHON) -c "import os; print(min(4, (os.cpu_count() or 1) + 1))")
BUILT_FROM := pyproject.toml setup.py constraints.txt $(wildcard native/*)

.DEFAULT_GOAL := help
.PHONY: help demo fast check lint depth docs test arm test-ceph test-oldest test-versions test-install mixed-versions \
	first-hour mutants mutants-worlds wheels arm-wheel bench bench-quick bench-publish bench-peers bench-sweep soak soak-worlds confirm-worlds clean

help:                           ## what each target does; also what `make` alone prints
	@awk -F ':.*## *' '/^[a-z-]+:.*## / { printf "%-16s%s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo             ## text to a trained step, over a real S3 server on this machine
	$(BIN)/binidx demo

fast: $(VENV)/.test $(VENV)/.npm             ## the inner loop: lint of changed files and the tests nearest to them, at most a minute
	$(BIN)/python tests/fast.py

check: lint depth test          ## everything that must hold before a change lands; the C under sanitizers too

lint: $(VENV)/.test             ## style, types, layers of imports, and the site without warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf build/package && mkdir -p build/package && cp -rL src/binidx build/package/
	touch build/package/binidx/_native.py
	PYTHONPATH=build/package $(BIN)/lint-imports
	$(BIN)/python tests/structure.py
	$(SITE) build  # with --quiet no warning would fail it
	$(BIN)/python tests/site_search.py build/site

depth: $(VENV)/.test            ## modules that a read and a build over S3 run through, and their limits; --list prints them
	$(BIN)/python tests/call_depth.py

docs: $(VENV)/.test             ## build the documentation site, and serve it on http://127.0.0.1:8000
	$(SITE) serve

test: $(VENV)/.compiled $(VENV)/.npm             ## the tests without lint; those that take minutes are in `make soak`
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0  # of a crash: xdist may wait for ever for the test that a new process was to run

arm:                            ## the C core on arm64 under qemu against this machine; native/check_arm.sh says what to install
	native/check_arm.sh

soak: $(VENV)/.test $(VENV)/.npm             ## the tests that take minutes; MEGATRON_TREE=DIR adds Megatron-LM's own training
	$(BIN)/python -m pytest -m slow -rs

soak-worlds: $(VENV)/.test               ## new simulated worlds of each kind for SIM_SECONDS on all cores; prints failing seeds
	PYTHONPATH=src:tests $(BIN)/python -m simulation.soak $(SEED)

confirm-worlds: $(VENV)/.test            ## six scenarios by real processes in namespaces beside their simulation; root, 25 minutes
	PYTHONPATH=src:tests $(BIN)/python -m simulation.real $(SCENARIO) $(RUNS)

mutants: $(VENV)/.test $(VENV)/.npm          ## COUNT lines changed by SEED, one at a time, and the near tests that fail of it
	$(BIN)/python tests/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),25) \
		$(if $(MODULES),--modules $(MODULES)) $(if $(TESTS),--tests $(TESTS)) $(if $(SECONDS),--seconds $(SECONDS))

mutants-worlds: $(VENV)/.test            ## COUNT mutants of the machines by SEED, and the simulated worlds that kill them; an hour
	PYTHONPATH=src:tests $(BIN)/python -m simulation.mutants $(or $(SEED),1) $(or $(COUNT),120)

test-ceph: $(VENV)/.test $(VENV)/.npm        ## storage against Ceph's radosgw; apt install radosgw ceph-mon ceph-osd ceph-common
	$(BIN)/python -m pytest -m "not slow" --s3 ceph tests/storage tests/format tests/dataset

test-oldest: $(VENV)-oldest/.done  ## storage, formats and text with the oldest dependencies that pyproject.toml allows
	$(VENV)-oldest/bin/python -m pytest -m "not slow" --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder tests/storage tests/format tests/prepare/text

test-versions: test-oldest      ## the core of the suite with the oldest dependencies, and on each supported Python that is found
	tests/versions.sh 3.11 3.12 3.13

test-install: build/wheel/.done  ## the wheel with core dependencies alone, then each extra: a table of all commands; minutes, 6 GB
	$(BIN)/python tests/install_matrix.py build/wheel/*.whl

mixed-versions: $(VENV)/.test   ## earlier commits and this tree on one node and bucket, in every order: a table by kind of file
	$(BIN)/python tests/mixed_versions.py

first-hour: build/wheel/.done   ## a newcomer's first hour from the wheel alone, each step with its output; minutes, 2 GB
	$(BIN)/python tests/first_hour.py build/wheel/*.whl

build/wheel/.done: $(VENV)/.test $(shell find src tools -name '*.py') README.md
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . > /dev/null
	@touch $@

wheels: $(VENV)/.wheels         ## sdist and wheels of Linux and macOS, x86_64 and arm64, into dist/, checked
	$(BIN)/python native/wheels.py

arm-wheel:                      ## the aarch64 wheel of `make wheels` in a Python of arm64 under qemu
	PATH=$(abspath $(BIN)):$$PATH native/check_arm_wheel.sh

bench: $(VENV)/.test            ## every figure with its conditions, into bench-results/, an hour on two cores
	$(BIN)/python -W ignore -m tests.bench

bench-quick: $(VENV)/.test      ## ratios of the short benches beside the committed ones, 3 minutes
	$(BIN)/python -W ignore -m tests.bench.quick

bench-publish: $(VENV)/.test    ## bench-results/ into the committed results, the page of figures and its charts
	$(BIN)/python -W ignore -m tests.bench.publish bench-results/*.json

bench-peers: $(VENV)/.test $(VENV)-peers/.done   ## MosaicML Streaming, LitData, OLMo-core, Lance and LanceDB from the same S3
	$(BIN)/python -W ignore -m tests.bench peers peers_long

bench-sweep: $(VENV)/.test      ## latency by concurrency, a table and bench-results/sweep.png, minutes
	$(BIN)/python -m tests.bench sweep

clean:                          ## remove the virtual environments and all that was built
	rm -rf $(VENV) $(VENV)-* build dist src/binidx/_native.* src/*.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "binidx needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.demo: $(BIN)/python $(BUILT_FROM)
	$(PIP) --editable '.[demo]'
	@touch $@

# A server of Azure's blob protocol, for tests. 3.36 and later need Node.js 21.
AZURITE := npm install --global --prefix $(VENV) --silent --no-audit --no-fund azurite@3.35.0

# Accessibility rules, for the pages of `binidx explore` in Chromium (apt-get install chromium): `make soak`.
AXE := npm install --global --prefix $(VENV) --silent --no-audit --no-fund axe-core@4.10.3

# A later release beside the installed one. From 0.17 on they ask for Python 3.12, of which they have no syntax.
ORACLE := --no-deps --ignore-requires-python --upgrade --target $(VENV)/oracles/0.19.2 megatron-core==0.19.2

# Megatron Core is the oracle of the tests: without its dependencies, which are CUDA's. torchtitan is for its example:
# without those that want an older `datasets`.
$(VENV)/.test: $(BIN)/python $(BUILT_FROM)
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps megatron-core==0.16.1 torchtitan==0.3.0
	$(PIP) $(ORACLE) || echo 'Megatron Core 0.19.2 is not installed: comparisons with it are skipped'
	$(BIN)/python -W ignore -c 'import oss2'  # compiled here: Python warns of its escapes, and warnings end a test
	@touch $@ $(VENV)/.demo

# Once what each process of the tests would compile.
$(VENV)/.compiled: $(VENV)/.test
	@$(BIN)/python -m pytest --collect-only > /dev/null 2>&1 || true
	@touch $@

# Beside the packages of Python, with `make --jobs=2`.
$(VENV)/.npm: $(BIN)/python
	$(AZURITE) || echo 'Azurite is not installed: tests of abfs:// are skipped'
	$(AXE) || echo 'axe-core is not installed: the pages are not checked for accessibility'
	@touch $@

# Compilers of all platforms, and the check of what is built.
$(VENV)/.wheels: $(VENV)/.test
	$(PIP) build ziglang auditwheel wheel
	@touch $@

# Over the packages of $(VENV), with their .pth files: torch and the oracles are too large to be installed twice.
$(VENV)-oldest/.done: tests/oldest.txt $(VENV)/.test $(VENV)/.npm
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > below.pth
	mv below.pth $(VENV)-oldest/lib/python3*/site-packages/
	ln -sf $(abspath $(BIN))/weed $(abspath $(BIN))/azurite-blob $(VENV)-oldest/bin/
	@touch $@

# torch first: what comes after it takes the build that is there.
$(VENV)-peers/.done: tests/bench/peers.txt
	$(PYTHON) -m venv $(VENV)-peers
	PYTHONWARNINGS=ignore $(VENV)-peers/bin/python -m pip install --quiet $$(grep ^torch== $<)
	PYTHONWARNINGS=ignore $(VENV)-peers/bin/python -m pip install --quiet --requirement $<
	@touch $@
