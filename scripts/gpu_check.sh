#!/usr/bin/env bash
# Everything that only a GPU can show, stage by stage (scripts/gpu_check.py): the kernels' and the runner's tests, then the
# benchmarks, the most valuable figures first, other engines last. A stage that fails or takes too long is told of and the
# next one starts. In the folder that $OUT names (default: gpu_check), after every stage: stages.jsonl, results.jsonl,
# goals.json, report.txt (goals G1 to G14 at its end) and log.txt.
#
#   scripts/gpu_check.sh                      on a machine with a GPU, for at most 570 s: --seconds N is another limit
#   scripts/gpu_check.sh --wheels FOLDER      on one without a network: first installs what gather_wheels.sh gathered,
#                                             beside the machine's own packages, into a folder of its own
#   scripts/gpu_check.sh --from STAGE         goes on there, on this machine or another; --resume: with what has not
#                                             ended well in $OUT. --list names the stages and their limits
#   scripts/gpu_check.sh --dry-run            anywhere: the same on the CPU and tiny shapes, to prove the script
#   python scripts/gpu_report.py FOLDER...    one table of what several runs left in their folders
#
# $PYTHON names the interpreter (default: .venv/bin/python where there is one, else python3), $BANDWIDTH the GPU's memory
# bandwidth in bytes per second (default: an H200's 4.8e12), which shares of the roofline are against.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$PYTHON" scripts/gpu_check.py "$@"
