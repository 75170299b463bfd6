"""Cards as their vendor publishes them, and what is assumed about every card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A card's published figures. memory: bytes. bandwidth: bytes per second of its memory. bus: bytes per second of
    PCIe in one direction; 0 where the processor shares the memory.

    compute: operations per second of the tensor cores, dense, with 32-bit accumulation, by the type of the factors;
    without "fp8" the card has no such kernels. capability: CUDA's compute capability."""

    name: str
    capability: str
    memory: float
    bandwidth: float
    bus: float
    compute: dict[str, float]
    source: str


def _geforce(
    name: str, capability: str, memory: float, bandwidth: float, bus: float, sms: int, mhz: int, rates: dict[str, int]
) -> Card:
    """sms, mhz: multiprocessors and boost clock. rates: operations of a multiprocessor per clock."""
    compute = {kind: sms * mhz * 1e6 * rate for kind, rate in rates.items()}
    source = f"{sms} multiprocessors at {mhz} MHz, {bandwidth / 1e9:.0f} GB/s"
    return Card(name, capability, memory, bandwidth, bus, compute, source)


# Operations of one multiprocessor per clock: GA102 whitepaper (RTX 3070: 40.6 TFLOPS fp16 with fp32 accumulation, 162.6
# int8, 46 multiprocessors at 1725 MHz), Ada whitepaper (RTX 4090: 165.2, 660.6, fp8 330.3), RTX Blackwell whitepaper
# (RTX 5090: 209.5, 838, fp8 419).
AMPERE = {"fp16": 512, "int8": 2048}
ADA = {"fp16": 512, "int8": 2048, "fp8": 1024}
PCIE4, PCIE5 = 32e9, 64e9  # 16 lanes, one direction

CARDS = (
    _geforce("RTX 3060", "8.6", 12e9, 360e9, PCIE4, 28, 1777, AMPERE),
    _geforce("RTX 4070", "8.9", 12e9, 504e9, PCIE4, 46, 2475, ADA),
    _geforce("RTX 4090", "8.9", 24e9, 1008e9, PCIE4, 128, 2520, ADA),
    _geforce("RTX 5090", "12.0", 32e9, 1792e9, PCIE5, 170, 2407, ADA),
    Card(
        "H200",
        "9.0",
        141e9,
        4800e9,
        PCIE5,
        {"fp16": 989e12, "int8": 1979e12, "fp8": 1979e12},
        "H200 SXM data sheet without sparsity; TensorRT for RTX does not serve it",
    ),
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is assumed of every card, its driver and the host. Shares are of the published figures.

    kernel_s: what a kernel adds to its own reading and computing in a replayed CUDA graph. call_s: the host's time to
    queue one engine call; sync_s: from the end of the last kernel until the host goes on; copy_s: to start a copy.
    plain_s, verify_s, level_s: the host's own work for a token without drafts, for verifying a tree, and for choosing a
    tree or growing it by a level. race_s: the host's time for a number of a row of logits that it samples from.
    reserve: bytes of memory left to the driver, kernels and the scratch memory."""

    bandwidth: float = 0.80
    compute: float = 0.60
    weight_only: float = 0.40
    bus: float = 0.80
    kernel_s: float = 2e-6
    call_s: float = 20e-6
    sync_s: float = 15e-6
    copy_s: float = 5e-6
    plain_s: float = 0.15e-3
    verify_s: float = 0.3e-3
    level_s: float = 0.2e-3
    race_s: float = 2.9e-9
    reserve: float = 1e9

    def lines(self) -> list[str]:
        """Returns every assumption as a sentence."""
        return [
            f"A kernel reads memory at {self.bandwidth:.0%} of the published bandwidth.",
            f"Products compute at {self.compute:.0%} of the published dense rate with 32-bit accumulation, and at "
            f"{self.weight_only:.0%} of the fp16 rate where weights are int8 or int4 and activations fp16.",
            f"A kernel in a replayed CUDA graph adds {self.kernel_s * 1e6:.1f} µs to reading and computing.",
            f"Queueing an engine call takes the host {self.call_s * 1e6:.0f} µs, a synchronisation "
            f"{self.sync_s * 1e6:.0f} µs, starting a copy {self.copy_s * 1e6:.0f} µs; PCIe runs at {self.bus:.0%}.",
            f"The host's own work is {self.plain_s * 1e3:.2f} ms for a token without drafts, {self.verify_s * 1e3:.2f} "
            f"ms for a verification and {self.level_s * 1e3:.2f} ms for choosing a tree, or for a level of it in the "
            f"older design; sampling from whole rows took {self.race_s * 1e9:.1f} ns per logit.",
            "Weights are read once per forward pass and nothing stays in the L2 cache between kernels.",
            "Keys and values of the past are read, written and read again: the graph joins past and new rows, then "
            "attention reads the result.",
            "Logits are written in fp16 and read three times in fp32 for the largest, the best and the sum.",
            "Rows are padded to 1, 16, 32 or 64, the past to 256, 512, 1024, ...; no pass waits for compilation.",
            f"{self.reserve / 1e9:.1f} GB of the card's memory are left to driver, kernels and scratch memory.",
        ]
