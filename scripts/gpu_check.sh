#!/usr/bin/env bash
# Everything that only a GPU can show, in one command under 9 minutes: the kernel tests compiled, what the runner does
# with streams and memory, the parity tests on CUDA, then the benchmarks. One table at the end; logs, and results as JSON
# lines, in the folder that $OUT names (default: gpu_check).
#
#   scripts/gpu_check.sh             on a machine with a GPU
#   scripts/gpu_check.sh --dry-run   anywhere: the same steps, on the CPU and tiny shapes, to prove the script
#
# $PYTHON names the interpreter (default: .venv/bin/python where there is one, else python3), $BANDWIDTH the GPU's memory
# bandwidth in bytes per second (default: an H200's 4.8e12), which shares of the roofline are against.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-gpu_check}
BANDWIDTH=${BANDWIDTH:-4.8e12}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

failed=0
step() { # step NAME SECONDS COMMAND...: run under a time limit, keep the output, note how it ended and how long it took
    local name=$1 limit=$2 start=$SECONDS ending=ok code=0
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        ending="FAILED ($code)"
        failed=1
        tail -n 30 "$OUT/$name.log"
    fi
    echo "$name $ending, $((SECONDS - start)) s" >>"$OUT/steps.txt"
}

run_tests() { # run_tests NAME SECONDS PYTEST_ARGUMENT...
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider --tb=short --maxfail=20 "$@"
}

decode() { # decode SHAPE ARGUMENT...: a shape of scripts/shapes, with random weights
    local shape=$1
    shift
    step "bench_decode_$shape" 50 "$PYTHON" scripts/bench_decode.py \
        --model "scripts/shapes/$shape" --load-format dummy --bandwidth "$BANDWIDTH" "$@"
}

offline() { # offline SHAPE ARGUMENT...
    local shape=$1
    shift
    step "bench_offline_$shape" 60 "$PYTHON" scripts/bench_offline.py \
        --model "scripts/shapes/$shape" --load-format dummy --rounds 1 "$@"
}

# The limits add up to 530 s.
rm -f "$OUT"/*.log "$OUT"/steps.txt
if [ "${1:-}" = --dry-run ]; then
    run_tests kernel_tests 120 tests/kernels/test_norm.py
    run_tests gpu_tests 120 tests/runner/test_device.py
    step bench_kernels 60 "$PYTHON" scripts/bench_kernels.py --dry-run
    decode tiny --dry-run --device cpu
    offline tiny --device cpu --requests 4 --input-len 8 --output-len 4
else
    # Left out: what compiles for a GPU that is not there.
    run_tests kernel_tests 120 tests/kernels --ignore=tests/kernels/test_compile.py --ignore=tests/kernels/test_offline.py
    run_tests gpu_tests 90 -m gpu tests/runner tests/test_parity.py
    step bench_kernels 60 "$PYTHON" scripts/bench_kernels.py
    for shape in qwen3-0.6b qwen3-4b qwen3-8b llama-3.1-8b; do
        decode "$shape" --device cuda
    done
    offline qwen3-0.6b --device cuda --requests 256 --uniform 100 1024
fi
"$PYTHON" scripts/gpu_report.py "$OUT"
exit $failed
