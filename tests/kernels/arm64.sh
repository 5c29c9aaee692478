#!/usr/bin/env bash
# The CPU kernels' tests on ARM, emulated: compiled by a cross-compiler, run by QEMU in Debian's Python of that machine.
# Arguments are pytest's. CPU names QEMU's processor: max has all that the kernels know, cortex-a76 has dot products,
# cortex-a72 neither. FOLDER keeps what is fetched and built. Needs Debian's packages g++-aarch64-linux-gnu,
# qemu-user-static, mmdebstrap and ninja-build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath -m "${FOLDER:-.venv/arm64}") python=$(realpath -s "${PYTHON:-.venv/bin/python}")
uv="$(dirname "$python")/uv"
root=$folder/root site=$folder/site
mkdir -p "$folder"

if [ ! -e "$folder/root.done" ]; then
  rm -rf "$root"
  mmdebstrap --quiet --variant=extract --architectures=arm64 \
    --include=python3.11-minimal,libpython3.11-stdlib,libpython3.11-dev,libgomp1,libstdc++6,zlib1g,libffi8,libssl3,libbz2-1.0,liblzma5,libsqlite3-0,libexpat1,libuuid1 \
    bookworm "$root"
  touch "$folder/root.done"
fi
if [ ! -e "$folder/site.done" ]; then
  # Of torch, a version whose wheel for this machine needs no CUDA.
  "$uv" pip install --quiet --target "$site" --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
    --only-binary :all: --no-deps torch==2.9.1 numpy==2.2.6 sympy mpmath networkx jinja2 markupsafe filelock fsspec \
    typing-extensions gguf tqdm pyyaml requests safetensors psutil msgpack xxhash hypothesis sortedcontainers attrs \
    pytest pytest-asyncio pytest-rerunfailures pytest-timeout pluggy iniconfig packaging pygments
  "$uv" pip install --quiet --target "$folder/nanobind" nanobind
  touch "$folder/site.done"
fi
PYTHONPATH=$folder/nanobind cmake -S kernels/cpu/native -B "$folder/build" -G Ninja \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  "-DCMAKE_CXX_FLAGS=-idirafter $root/usr/include" -DPython_EXECUTABLE="$python" \
  -DPython_INCLUDE_DIR="$root/usr/include/python3.11" -DSKBUILD_SOABI=cpython-311-aarch64-linux-gnu
cmake --build "$folder/build"
cp "$folder"/build/_native*.so kernels/cpu/
exec qemu-aarch64-static -cpu "${CPU:-max}" -L "$root" -E PYTHONPATH="$PWD:$site" -E OMP_NUM_THREADS=1 \
  "$root/usr/bin/python3.11" -P -m pytest -p no:cacheprovider --timeout 900 "$@"
