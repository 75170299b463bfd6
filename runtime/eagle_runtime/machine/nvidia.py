"""The first NVIDIA GPU as its driver describes it. Asks the driver's own libraries (libcuda, and NVML for free memory
and the driver's release), so no package is needed."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from eagle_runtime.base.errors import BackendError

LIBRARIES = ("nvcuda.dll", "nvml.dll") if os.name == "nt" else ("libcuda.so.1", "libnvidia-ml.so.1")
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # device attributes of CUDA's driver API


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU. compute_capability: such as "8.9". cuda: the newest CUDA version that the driver serves, such as "13.0".
    total: bytes of its memory. free: bytes that no process holds, and driver: the driver's release, such as "580.65";
    None where they are unknown."""

    name: str
    compute_capability: str
    cuda: str
    total: int
    free: int | None
    driver: str | None = None

    @property
    def available(self) -> int:
        """Bytes of memory that can be allocated; all of it where the free part is unknown."""
        return self.total if self.free is None else self.free

    def __str__(self) -> str:
        free = "" if self.free is None else f", {self.free / 1e9:.1f} free"
        driver = "driver" if self.driver is None else f"driver {self.driver}"
        gpu = f"{self.name}, compute {self.compute_capability}, {self.total / 1e9:.1f} GB"
        return f"{gpu}{free}, {driver} for CUDA {self.cuda}"


def first_gpu() -> DeviceInfo:
    """Returns the first GPU that CUDA_VISIBLE_DEVICES leaves. Raises BackendError saying why there is none."""
    cuda, nvml = LIBRARIES
    try:
        driver = ctypes.CDLL(cuda)
    except OSError:
        raise BackendError(f"no NVIDIA driver is installed ({cuda} is missing)") from None
    try:
        management: Any = ctypes.CDLL(nvml)
    except OSError:
        management = None
    return read_gpu(driver, management)


def read_gpu(driver: Any, management: Any) -> DeviceInfo:
    """Returns the first GPU that the driver lists. driver: libcuda. management: NVML, None if it is missing. Raises
    BackendError."""
    number, text = ctypes.c_int(), ctypes.create_string_buffer(256)
    if error := driver.cuInit(0):
        raise BackendError(f"the NVIDIA driver does not start (error {error} of cuInit): look at nvidia-smi")
    if driver.cuDeviceGetCount(ctypes.byref(number)) or number.value == 0:
        raise BackendError("the NVIDIA driver sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    driver.cuDeviceGetName(text, len(text), 0)
    name = text.value.decode(errors="replace")
    compute = []
    for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        compute.append(str(number.value))
    driver.cuDriverGetVersion(ctypes.byref(number))
    memory = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), 0)
    driver.cuDeviceGetPCIBusId(text, len(text), 0)
    free, release = _ask_nvml(management, text.value)
    return DeviceInfo(name, ".".join(compute), cuda_version(number.value), memory.value, free, release)


def cuda_version(number: int) -> str:
    """Returns a CUDA version as text. number: as CUDA counts versions, 13010 for 13.1."""
    return f"{number // 1000}.{number % 1000 // 10}"


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _ask_nvml(library: Any, bus_id: bytes) -> tuple[int | None, str | None]:
    """Returns the free bytes of the GPU at a PCI address (CUDA and NVML number GPUs differently), and the driver's
    release; None for what NVML does not report."""
    if library is None or library.nvmlInit_v2():
        return None, None
    try:
        handle, memory, text = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
        failed = library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle))
        failed = failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        free = None if failed else memory.free
        failed = library.nvmlSystemGetDriverVersion(text, len(text))
        return free, None if failed else text.value.decode(errors="replace")
    finally:
        library.nvmlShutdown()
