#!/usr/bin/env bash
# The native operators on other systems than this one, compiled here and compared to the bit with the plain form here:
#
#   tools/kernels_elsewhere.sh FOLDER      keeps libraries there (some 400 MB)
#
# Linux on ARM64 by qemu-user (tools/as_arm64.sh), Windows on x86-64 by wine, in that system's own ONNX Runtime. Needs
# qemu-user, wine64, `make kernels` and `make wheels`.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"; folder=$(realpath "$1"); python=${PYTHON:-.venv/bin/python}
PYTHONPATH=tests "$python" tests/recorded_graphs.py "$folder/cases"
compile() { "$python" -m ziglang cc -O1 -target "$1" -o "$2" tests/kernels/replay.c; }
unpacked() {  # SYSTEM: the folder of its wheel's library
  "$python" -m zipfile -e dist/eagle_edge_kernels-*"$1".whl "$folder/$1" && echo "$folder/$1/eagle_edge_kernels"
}

arm=$(unpacked manylinux2014_aarch64)
tools/as_arm64.sh "$folder/arm64" -c pass
compile aarch64-linux-gnu.2.31 "$folder/replay"
qemu-aarch64 -L "$folder/arm64/root" "$folder/replay" \
  "$(echo "$folder"/arm64/packages/onnxruntime/capi/libonnxruntime.so*)" "$arm/eagle_kernels.so" "$folder/cases"

windows=$(unpacked win_amd64)
version=$("$python" -c "import onnxruntime; print(onnxruntime.__version__)")
"$python" -m pip download --quiet --no-deps --platform win_amd64 --python-version 3.11 --only-binary=:all: \
  -d "$folder" "onnxruntime==$version"
"$python" -m zipfile -e "$folder"/onnxruntime-"$version"-*win_amd64.whl "$folder/onnxruntime"
cp "$folder"/onnxruntime/onnxruntime/capi/*.dll "$windows/eagle_kernels.dll" "$folder"
compile x86_64-windows-gnu "$folder/replay.exe"
(cd "$folder" && WINEDEBUG=-all WINEPREFIX="$folder/wine" "$(command -v wine64 || echo /usr/lib/wine/wine64)" \
  replay.exe onnxruntime.dll eagle_kernels.dll cases)
