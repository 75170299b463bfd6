"""Estimating what forward passes cost on an unknown machine, from the shapes of the weights that they read.

A pass over n rows that follow P others reads every weight once, multiplies it n times, and reads the keys and values of
P rows; each layer costs the engine some time whatever its size. How a machine's true times part from this is learned
from the first forward passes on (see estimate.py), their common factor from a single one, so what counts here are
ratios: of many rows to one, and of the head to the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from eagle_runtime.bundle.manifest import GraphSpec, HeadSpec, Manifest, TargetSpec
from eagle_runtime.drafting.costs.tables import CONTEXTS, HEAD_ROWS, TARGET_ROWS, Costs, Timings

EMBEDDING = "model.embed_tokens.weight"
BITS = {"bfloat16": 16, "int4": 4, "uint4": 4}  # of types that NumPy has no name for
FOUR_BITS = ".int4"  # ends the names of tensors that hold two weights in a byte


@dataclass(frozen=True, slots=True)
class Assumed:
    """Figures of a machine. bytes_per_s: read from memory. layer_s: the engine's own time for a layer, of graphs that
    compute in their weights' type and of others, which hold more operators. row_s: for a weight and a row, by the
    weight's bits. context_s: for a byte of the keys and values before a row; attention_s: for a further row and a
    number among those. host_s: for a verification, and for a level of the head's tree."""

    bytes_per_s: float
    layer_s: tuple[float, float]
    row_s: dict[int, float]
    context_s: float
    attention_s: float
    host_s: tuple[float, float]


# As `eagle-bench --tune` measured on two cores of an EPYC (Zen 5) with the pair of tools/demo_pair, and with it grown
# to 12 layers x 1024, in fp32, int8 and int4: fp32 reads 558 MB in 12.7 ms, a further row takes 0.66 ms of it for 140
# million weights, and 0.51 ms in int4. For int8 from docs/results.md: 60 rows take four times as long as one.
CPU = Assumed(45e9, (40e-6, 150e-6), {32: 5e-12, 16: 5e-12, 8: 1.6e-12, 4: 3.5e-12}, 55e-12, 6e-12, (3e-4, 2e-4))
# A GPU reads a terabyte per second, its kernels start in microseconds, and sixty rows are nearly free.
GPU = Assumed(1e12, (30e-6, 50e-6), dict.fromkeys((32, 16, 8, 4), 3e-14), 2e-12, 6e-14, (3e-4, 3e-4))


def prior_costs(manifest: Manifest, backend: str) -> Costs:
    """Returns what forward passes of a bundle's graphs may cost on a backend, the host's work included."""
    machine = CPU if backend == "cpu" else GPU
    verifying, level = machine.host_s
    target = _timings(manifest.target, machine, TARGET_ROWS, verifying)
    if manifest.head is None:
        return Costs(target, None)
    plain = _timings(manifest.target, machine, (1,), verifying / 2)  # there is no tree to choose
    return Costs(target, _timings(manifest.head, machine, HEAD_ROWS, level), plain)


def pass_bytes(graph: GraphSpec) -> int:
    """Returns the bytes of weights that one pass of a graph reads: all that are stored, but not an embedding table from
    which only the rows of the tokens are gathered. A table that doubles as LM head in the same form is read whole."""
    return sum(count * bits // 8 for count, bits in _read(graph))


def _read(graph: GraphSpec) -> Iterator[tuple[int, int]]:
    """Yields (numbers, bits of one) of every stored tensor that a pass reads whole."""
    gathered = f"{EMBEDDING}.fp16" if f"{EMBEDDING}.fp16" in graph.weights else EMBEDDING
    own_head = any(name != gathered and name.startswith(("lm_head.", f"{EMBEDDING}.")) for name in graph.weights)
    for name, spec in graph.weights.items():
        if not (own_head and name == gathered):
            count, bits = prod(map(int, spec.shape)), bits_of(spec.dtype)
            yield (2 * count, 4) if name.endswith(FOUR_BITS) and bits == 8 else (count, bits)


def bits_of(dtype: str) -> int:
    """Returns the bits of one number of a stored type."""
    return BITS[dtype] if dtype in BITS else 8 * np.dtype(dtype).itemsize


def _timings(spec: TargetSpec | HeadSpec, machine: Assumed, rows: tuple[int, ...], host: float) -> Timings:
    read = list(_read(spec.graph))
    quantised = any(bits < 16 for _, bits in read)
    one = host + machine.layer_s[quantised] * spec.num_layers + pass_bytes(spec.graph) / machine.bytes_per_s
    further = sum(count * machine.row_s.get(bits, 0.0) for count, bits in read)
    context = 2 * spec.num_layers * spec.graph.kv_row_bytes * machine.context_s
    # As many query heads as fill the width.
    attention = 2 * spec.num_layers * spec.hidden_size * machine.attention_s
    counts = np.array(rows, np.float64) - 1
    lines = [one + counts * further + before * (context + counts * attention) for before in CONTEXTS]
    return Timings(rows, CONTEXTS, tuple(tuple(line.tolist()) for line in lines))
