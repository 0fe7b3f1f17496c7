#!/usr/bin/env bash
# Everything that only a GPU can show, in one command under 9 minutes: the kernels first, their benchmark and their tests
# compiled, then what the runner does with streams, graphs and memory, then whole models. The table of goals at the end;
# logs, goals.json, and results as JSON lines, in the folder that $OUT names (default: gpu_check).
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

step() { # step NAME SECONDS COMMAND...: run under a time limit, keep the output, note how it ended and how long it took
    local name=$1 limit=$2 start=$SECONDS ending=ok code=0
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        ending="FAILED ($code)"
        tail -n 30 "$OUT/$name.log"
    fi
    echo "$name $ending, $((SECONDS - start)) s" >>"$OUT/steps.txt"
}

run_tests() { # run_tests NAME SECONDS PYTEST_ARGUMENT...: in the background, since most of their time is compiling
    local name=$1 limit=$2
    shift 2
    step "${name}_tests" "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider --tb=short --maxfail=20 "$@" &
}

kernel_tests() { # kernel_tests SECONDS FILE...: each file by itself, the largest in two parts
    local limit=$1 file name
    shift
    for file in "$@"; do
        name=$(basename "$file" .py)
        case $name in
            test_compile | test_offline | test_bench_kernels) ;; # what compiles for a GPU that is not there, or needs none
            test_attention)
                run_tests "${name}_shapes" "$limit" "$file" -k test_head_shapes
                run_tests "$name" "$limit" "$file" -k "not test_head_shapes"
                ;;
            *) run_tests "$name" "$limit" "$file" ;;
        esac
    done
}

decode() { # decode SHAPE SECONDS ARGUMENT...: a shape of scripts/shapes, with random weights
    local shape=$1 limit=$2
    shift 2
    step "bench_decode_$shape" "$limit" "$PYTHON" scripts/bench_decode.py \
        --model "scripts/shapes/$shape" --load-format dummy --bandwidth "$BANDWIDTH" "$@"
}

goals() { # goals SHAPE SECONDS ARGUMENT...
    local shape=$1 limit=$2
    shift 2
    step "bench_goals_$shape" "$limit" "$PYTHON" scripts/bench_goals.py --model "scripts/shapes/$shape" "$@"
}

# The limits add up to 500 s, tests side by side; what a step found before its limit counts.
rm -f "$OUT"/*.log "$OUT"/steps.txt
if [ "${1:-}" = --dry-run ]; then
    step bench_kernels 60 "$PYTHON" scripts/bench_kernels.py --dry-run
    kernel_tests 120 tests/kernels/test_norm.py tests/kernels/test_offline.py
    run_tests gpu 120 tests/runner/test_device.py tests/runner/test_graphs.py -m "not slow"
    wait
    decode tiny 60 --dry-run --device cpu
    goals tiny 120 --device cpu --parts offline cache_cost peer serving ttft load prefix --uniform --requests 2 \
        --concurrency 1 2 --input-len 8 --output-len 4 --ttft-len 8 40 --samples 2 --load-seconds 0.2 \
        --peer-requests 2 --rounds 1 --max-model-len 2200
    step bench_step 60 "$PYTHON" scripts/bench_step.py --sizes 4 --steps 4
else
    step bench_kernels 50 "$PYTHON" scripts/bench_kernels.py
    kernel_tests 110 tests/kernels/test_*.py
    run_tests gpu 110 -m gpu tests/runner tests/test_parity.py
    wait
    decode llama-3.1-8b 40 --device cuda
    decode qwen3-4b 35 --device cuda
    decode qwen3-0.6b 30 --device cuda
    goals qwen3-8b 100 --device cuda --uniform --parts offline serving ttft load prefix
    goals qwen3-0.6b 80 --device cuda --uniform --parts offline serving cache_cost peer
    goals qwen3-4b 35 --device cuda --uniform --parts offline --concurrency 64
    step bench_step 15 "$PYTHON" scripts/bench_step.py --sizes 256 --steps 300
fi
"$PYTHON" scripts/gpu_report.py "$OUT" "$@"
! grep -q FAILED "$OUT/steps.txt"
