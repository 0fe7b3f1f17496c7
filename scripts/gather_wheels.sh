#!/usr/bin/env bash
# The wheels that a machine without a network needs for aserve and its GPU check: what pyproject.toml asks for and the
# image of scripts/gpu_image.txt lacks, for its Python, in the versions of constraints.txt. From the package index that
# pip is configured for. Wheels that FOLDER has are deleted. Prints the sizes; fails where they exceed 60 MiB, or where
# one is of another Python or asks for what is neither there nor on the image.
#
#   scripts/gather_wheels.sh FOLDER
#
# $PYTHON names the interpreter that has pip and packaging (default: .venv/bin/python where there is one, else python3).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${1:?a folder for the wheels}"
PYTHON=${PYTHON:-$([ -x "$here/../.venv/bin/python" ] && echo "$here/../.venv/bin/python" || echo python3)}
platforms=(--platform manylinux2014_x86_64)
for glibc in $(seq 17 34); do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done

mkdir -p "$1"
rm -f "$1"/*.whl
"$PYTHON" "$here/wheels.py" wanted >"$1/wanted.txt"
"$PYTHON" -m pip download --quiet --dest "$1" --only-binary=:all: --implementation cp --python-version 3.12 \
    "${platforms[@]}" --constraint "$here/../constraints.txt" --requirement "$1/wanted.txt"
"$PYTHON" "$here/wheels.py" check "$1"
