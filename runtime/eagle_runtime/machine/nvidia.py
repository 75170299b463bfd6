"""What the NVIDIA driver says of the first GPU, asked of the driver itself (libcuda, and NVML for what it alone knows),
so that no package is needed."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from eagle_runtime.errors import BackendError

LIBRARIES = ("nvcuda.dll", "nvml.dll") if os.name == "nt" else ("libcuda.so.1", "libnvidia-ml.so.1")
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # device attributes of CUDA's driver API


@dataclass(frozen=True, slots=True)
class Gpu:
    """compute: capability, such as "8.9". cuda: newest CUDA version that the driver serves. memory: bytes. free: bytes
    that no process holds, and driver: its release; None where NVML does not tell."""

    name: str
    compute: str
    cuda: str
    memory: int
    free: int | None
    driver: str | None

    def __str__(self) -> str:
        free = "" if self.free is None else f", {self.free / 1e9:.1f} free"
        driver = "driver" if self.driver is None else f"driver {self.driver}"
        return f"{self.name}, compute {self.compute}, {self.memory / 1e9:.1f} GB{free}, {driver} for CUDA {self.cuda}"


def first_gpu() -> Gpu:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves. Raises BackendError with the one reason why there is none."""
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


def read_gpu(driver: Any, management: Any) -> Gpu:
    """driver: libcuda. management: NVML, None if it is missing."""
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
    free, release = _managed(management, text.value)
    return Gpu(
        name=name,
        compute=".".join(compute),
        cuda=f"{number.value // 1000}.{number.value % 1000 // 10}",
        memory=memory.value,
        free=free,
        driver=release,
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _managed(library: Any, bus_id: bytes) -> tuple[int | None, str | None]:
    """Free bytes of the GPU at a PCI address, and the driver's release. CUDA and NVML count GPUs differently."""
    if library is None or library.nvmlInit_v2():
        return None, None
    try:
        handle, memory, text = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
        found = not library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle))
        free = memory.free if found and not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else None
        told = not library.nvmlSystemGetDriverVersion(text, len(text))
        return free, text.value.decode(errors="replace") if told else None
    finally:
        library.nvmlShutdown()
