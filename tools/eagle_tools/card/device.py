"""The card of this machine, for predictions: its driver's figures of clocks and memory, or the published ones."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from eagle_runtime.base.errors import RequestError
from eagle_runtime.machine.nvidia import LIBRARIES, DeviceInfo
from eagle_tools.card.cards import ADA, AMPERE, CARDS, PCIE4, PCIE5, Card

# Device attributes of CUDA's driver API: clocks in kHz, width of the memory bus in bits.
CLOCK, MULTIPROCESSORS, MEMORY_CLOCK, MEMORY_BITS = 13, 16, 36, 37
RATES = {"8.6": AMPERE, "8.9": ADA, "12.0": ADA}


def card_of(gpu: DeviceInfo, driver: Any = None, bandwidth: float | None = None) -> Card:
    """Returns the figures of a GPU. driver: libcuda, after cuInit; None loads it. bandwidth: bytes per second of its
    memory, instead of what the driver says.

    Raises RequestError for a card whose figures neither the driver nor the table of published cards has."""
    published = next((card for card in CARDS if re.search(rf"\b{card.name}$", gpu.name)), None)
    clock, count, memory_clock, bits = _attributes(driver)
    rates = RATES.get(gpu.compute_capability)
    # Memory of a GeForce moves two words per reported clock.
    bandwidth = bandwidth or 2 * memory_clock * 1e3 * bits / 8 or (published.bandwidth if published else 0.0)
    compute = {kind: count * clock * 1e3 * rate for kind, rate in rates.items()} if rates and count * clock else {}
    compute = compute or (published.compute if published else {})
    if not bandwidth or not compute:
        raise RequestError(
            f"neither the driver nor the table of cards says how fast {gpu.name} is; give its memory's GB/s with "
            "--bandwidth, and expect a prediction on 8.6, 8.9 and 12.0 only"
        )
    bus = published.bus if published else (PCIE5 if gpu.compute_capability == "12.0" else PCIE4)
    source = f"{count} multiprocessors at {clock / 1e3:.0f} MHz by the driver" if count * clock else "published"
    return Card(gpu.name, gpu.compute_capability, gpu.total, bandwidth, bus, dict(compute), source)


def _attributes(driver: Any) -> tuple[int, int, int, int]:
    """Returns kHz, number of multiprocessors, kHz of the memory, and bits of its bus; 0 for what the driver does not
    say."""
    if driver is None:
        try:
            driver = ctypes.CDLL(LIBRARIES[0])
        except OSError:
            return 0, 0, 0, 0
        driver.cuInit(0)
    values = []
    for attribute in (CLOCK, MULTIPROCESSORS, MEMORY_CLOCK, MEMORY_BITS):
        number = ctypes.c_int()
        failed = driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        values.append(0 if failed else number.value)
    return values[0], values[1], values[2], values[3]
