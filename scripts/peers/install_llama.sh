#!/usr/bin/env bash
# llama.cpp's llama-server, built from the sources that the package llama-cpp-python carries: needs cmake and a C++
# compiler, takes some minutes a core, and downloads nothing but that package.
#
#   scripts/peers/install_llama.sh [FOLDER]      leaves FOLDER/llama/llama-server (default: peers)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath -m "${1:-$here/../../peers}")/llama
python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
command -v cmake >/dev/null || { echo "install_llama.sh: cmake is missing" >&2; exit 1; }
mkdir -p "$folder"
cd "$folder"

if [ ! -d src ]; then
    "$python" -m venv venv
    venv/bin/pip download --quiet --no-deps --no-binary :all: -d . -r "$here/llama.txt"
    mkdir src.part
    tar --extract --gzip --file llama_cpp_python-*.tar.gz --directory src.part --strip-components=3 \
        --wildcards '*/vendor/llama.cpp/*'
    rm -rf llama_cpp_python-*.tar.gz venv
    mv src.part src
fi
# What the converter imports beside torch and transformers.
"$python" -m pip install --quiet --no-deps --upgrade --target python -r "$here/llama-converter.txt"
# The web UI would be downloaded.
cmake -S src -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
cmake --build build --target llama-server --parallel "$jobs"
cp build/bin/llama-server llama-server
rm -rf build
