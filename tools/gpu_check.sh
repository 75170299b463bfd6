#!/usr/bin/env bash
# Checks eagle-edge for hours on a bare Linux machine with an NVIDIA GPU and no network (docs/backends.md is the short check):
#
#     tools/gpu_check.sh WHEELS [OUT]
#
# WHEELS holds the wheels of eagle-edge and its dependencies, fetched on a machine with a network and the same Python:
#
#     pip wheel -w WHEELS ".[cuda,export,calib,bench]" pytest filelock      and ".[tensorrt-rtx]" for RTX GPUs
#
# OUT (default gpu_check_out) gets report.md, report.json, and the log and rows of every step. PYTHON names the
# interpreter. Exit status: 0 all well, 1 something differs or fails, 2 the check could not start.
set -euo pipefail

stop() {
    echo "gpu_check: $1" >&2
    exit 2
}

[ $# -eq 1 ] || [ $# -eq 2 ] || stop "usage: tools/gpu_check.sh WHEELS [OUT]"
wheels=$1
out=${2:-gpu_check_out}
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

command -v "$python" >/dev/null || stop "$python is not installed; set PYTHON to a Python 3.11 or newer"
reason=$("$python" - <<'PY'
import ctypes

try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no NVIDIA driver is installed (libcuda.so.1 is missing)")
else:
    count = ctypes.c_int()
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error or count.value == 0:
        print(f"the NVIDIA driver sees no GPU (error {error}); look at nvidia-smi")
PY
) || stop "$python does not run"
[ -z "$reason" ] || stop "this machine has no GPU to check: $reason"
compgen -G "$wheels/eagle_edge-*.whl" >/dev/null || stop "$wheels holds no wheel of eagle-edge; see $0 for how to fetch"

mkdir -p "$out"
out=$(cd "$out" && pwd)
extras=cuda,export,calib,bench
if compgen -G "$wheels/tensorrt_rtx_*.whl" >/dev/null; then extras=$extras,tensorrt-rtx; fi
if compgen -G "$wheels/tensorrt_cu*.whl" >/dev/null; then extras=$extras,tensorrt; fi
"$python" -m venv --clear "$out/venv"
"$out/venv/bin/python" -m pip install --quiet --no-index --find-links "$wheels" "eagle-edge[$extras]" pytest filelock \
    || stop "the wheels in $wheels do not install"
exec "$out/venv/bin/python" "$root/tools/gpu_check.py" "$out"
