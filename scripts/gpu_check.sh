#!/usr/bin/env bash
# Everything that only a GPU can show, in one command under 9 minutes: the kernel tests compiled, the parity tests on
# CUDA, then the benchmarks; one table at the end, and the JSON lines in the folder that $OUT names (default: gpu_check).
#
#   scripts/gpu_check.sh             on a machine with a GPU
#   scripts/gpu_check.sh --dry-run   anywhere: the same steps, on the CPU and tiny shapes, to prove the script
#
# $PYTHON names the interpreter (default: .venv/bin/python where there is one, else python3).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-gpu_check}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

dry_run=false
[ "${1:-}" = --dry-run ] && dry_run=true
device=cuda models="qwen3-0.6b qwen3-4b qwen3-8b llama-3.1-8b" dry_flag=""
tests="tests/kernels tests/runner tests/test_parity.py"
offline=(--requests 256 --uniform 100 1024 --rounds 1)
if $dry_run; then
    device=cpu models=demo dry_flag=--dry-run
    tests="tests/kernels/test_norm.py"
    offline=(--requests 4 --input-len 8 --output-len 4 --rounds 1)
fi

failed=0
step() { # step NAME SECONDS COMMAND...: run under a time limit, keep the output, note a failure
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; then
        echo "$name ok" >>"$OUT/steps.txt"
    else
        echo "$name FAILED ($?)" >>"$OUT/steps.txt"
        failed=1
        tail -n 15 "$OUT/$name.log"
    fi
}

: >"$OUT/steps.txt"
step kernel_and_parity_tests 200 "$PYTHON" -m pytest -q -x -p no:cacheprovider $tests
step bench_kernels 80 "$PYTHON" scripts/bench_kernels.py $dry_flag
for model in $models; do
    folder=$model load=auto
    [ -d "scripts/shapes/$model" ] && folder=scripts/shapes/$model load=dummy
    step "bench_decode_$model" 45 "$PYTHON" scripts/bench_decode.py --device "$device" --model "$folder" --load-format "$load" $dry_flag
done
step bench_offline 60 "$PYTHON" scripts/bench_offline.py --device "$device" --model "${folder/llama-3.1-8b/qwen3-0.6b}" --load-format "$load" "${offline[@]}"
"$PYTHON" scripts/gpu_report.py "$OUT"
exit $failed
