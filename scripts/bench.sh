#!/usr/bin/env bash
# The short form of every benchmark on the demo model: under 3 minutes on 2 cores. One JSON line a result, and the table
# of compare.py last. The long forms are the same scripts without the sizes below.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

bench() { # bench SCRIPT ARGUMENT...: under a time limit, since one that hangs should not hang the rest
    timeout --kill-after=5 100 "$python" "scripts/$@"
}

bench bench_step.py --sizes 1,64,256 --steps 200
bench bench_offline.py
bench bench_offline.py --uniform 100 1024 --scale 0.05 --rounds 1
bench bench_startup.py --rounds 2
bench bench_prefix.py --rounds 2 --cost-rounds 4
bench compare.py --peers aserve --parts batch closed --concurrency 1 32 128 --rounds 2
