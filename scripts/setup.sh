#!/usr/bin/env bash
# Sets up .venv, says what it does, and how much it fetches: what serving needs, or with "dev" what the tests need, too.
#
#   scripts/setup.sh [dev]
#
# $PYTHON makes .venv (default: python3). On Linux without an NVIDIA driver torch is its build for CPUs, from $TORCH_INDEX,
# unless pip is configured to look elsewhere than in PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
unset PYTHONDONTWRITEBYTECODE  # what is compiled here is for later
say() { echo "setup: $*" >&2; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "Python 3.11 or later is needed, but $PYTHON is $("$PYTHON" --version 2>&1); set PYTHON to another"
    exit 1
}
if [ ! -x .venv/bin/python ]; then
    say "making .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv .venv
fi

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
install() { pip install -c constraints.txt "$@"; }

configured=$(pip config list)
if grep -q -E "index-url|find-links|no-index" <<<"$configured"; then
    say "fetching from where pip is configured to look"
elif [ "$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia ]; then
    say "no NVIDIA driver is here: fetching torch's build for CPUs (200 MB) from $TORCH_INDEX"
    install --no-deps --retries 1 --index-url "$TORCH_INDEX" torch ||
        say "that cannot be had: torch will be its build for CUDA, with CUDA's libraries: some GB"
elif [ "$(uname -s)" = Linux ]; then
    say "an NVIDIA driver is here: torch will be its build for CUDA, with CUDA's libraries: some GB"
fi

if [ "${1:-}" = dev ]; then
    say "fetching aserve's other dependencies, and those of its tests: some 300 MB, but for what pip has in its cache"
    install --no-compile -e '.[dev]'  # Python compiles what tests import as they do: a small part of it all
else
    say "fetching aserve's other dependencies: some 70 MB, but for what pip has in its cache"
    install -e .
fi

say "compiling the CPU kernels, where there is a C++ compiler: some 20 s, once"
say "$(.venv/bin/python -m aserve.kernels.native)"
say "done: $(du -sh .venv | cut -f1) in .venv; start the demonstration model with: .venv/bin/aserve serve demo"
