"""What forward passes may cost, estimated from the shapes of the weights and figures of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from eagle_runtime.base.backend_names import NATIVE, on_cpu
from eagle_runtime.bundle.manifest import DTYPE_BITS, GraphSpec, HeadSpec, Manifest, TargetSpec
from eagle_runtime.drafting.cost_model import CONTEXTS, HEAD_ROWS, TARGET_ROWS, Costs, Timings

EMBEDDING = "model.embed_tokens.weight"
LAYERS_TABLE = "model.embed_tokens_per_layer.weight"  # Gemma-4's, which nothing else reads
FOUR_BITS = ".int4"  # ends the names of tensors that hold two weights in a byte


@dataclass(frozen=True, slots=True)
class Assumed:
    """Figures of a machine. bytes_per_s: read from memory. layer_s: the engine's own time for a layer, of graphs that
    compute in their weights' type and of others, which hold more operators. row_s: for a weight and a row, by the
    weight's bits. context_s: for a byte of the keys and values before a row; attention_s: for a further row and a
    number among those. host_s: for a verification, and for a level of the head's tree. hidden: whether products are
    computed while weights are read, so that the first rows take no time of their own."""

    bytes_per_s: float
    layer_s: tuple[float, float]
    row_s: dict[int, float]
    context_s: float
    attention_s: float
    host_s: tuple[float, float]
    hidden: bool = False


# As single passes were timed on two cores of an EPYC (Zen 5) with the pair of tools/demo_pair, and with it grown
# to 12 layers x 1024, in fp32, int8 and int4: fp32 reads 558 MB in 12.7 ms, a further row takes 0.66 ms of it for 140
# million weights, and 0.51 ms in int4. For int8 from docs/dev/toy_results.md: 60 rows take four times as long as one.
CPU = Assumed(45e9, (40e-6, 150e-6), {32: 5e-12, 16: 5e-12, 8: 1.6e-12, 4: 3.5e-12}, 55e-12, 6e-12, (3e-4, 2e-4))
# Native operators on two cores of an EPYC (Zen 3, AVX2) that others used too, fitted to what `costs()` had learned of
# 18 answers of SmolLM2-135M-Instruct in int4 and in int8: eight rows took 2.1 and 1.7 times as long as one.
NATIVE_CPU = Assumed(
    18e9, (100e-6, 100e-6), {32: 2e-11, 16: 2e-11, 8: 16e-12, 4: 12e-12}, 55e-12, 12e-12, (8e-4, 7e-4), True
)
# A GPU reads a terabyte per second, its kernels start in microseconds, and sixty rows are nearly free.
GPU = Assumed(1e12, (30e-6, 50e-6), dict.fromkeys((32, 16, 8, 4), 3e-14), 2e-12, 6e-14, (3e-4, 3e-4))


def prior_costs(manifest: Manifest, backend: str, draft_model: TargetSpec | None = None) -> Costs:
    """Returns what forward passes of a bundle's graphs may cost on a backend, the host's work included. draft_model:
    drafts in place of the head."""
    machine = NATIVE_CPU if backend == NATIVE else CPU if on_cpu(backend) else GPU
    verifying, level = machine.host_s
    target = _timings(manifest.target, machine, TARGET_ROWS, verifying)
    head = draft_model or manifest.head
    if head is None:
        return Costs(target, None)
    plain = _timings(manifest.target, machine, (1,), verifying / 2)  # there is no tree to choose
    return Costs(target, _timings(head, machine, HEAD_ROWS, level), plain)


def pass_bytes(graph: GraphSpec) -> int:
    """Returns the bytes of weights that one pass of a graph reads: all that are stored, but not an embedding table from
    which only the rows of the tokens are gathered. A table that doubles as LM head in the same form is read whole."""
    return sum(count * bits // 8 for count, bits in _read(graph))


def _read(graph: GraphSpec) -> Iterator[tuple[int, int]]:
    """Yields (numbers, bits of one) of every stored tensor that a pass reads whole."""
    table = [name for name in graph.weights if name == EMBEDDING or name.startswith(f"{EMBEDDING}.")]  # in any form
    if any("lm_head." in name for name in graph.weights):  # the target's or the head's own
        gathered = set(table)
    else:  # the LM head is the table, in the same form or in another one beside it
        apart = f"{EMBEDDING}.fp16" if f"{EMBEDDING}.fp16" in table else EMBEDDING
        gathered = {apart} if len(table) > 1 else set()
    for name, spec in graph.weights.items():
        if name not in gathered and not name.startswith(LAYERS_TABLE):
            count, bits = prod(map(int, spec.shape)), DTYPE_BITS[spec.dtype]
            yield (2 * count, 4) if name.endswith(FOUR_BITS) and bits == 8 else (count, bits)


def _timings(spec: TargetSpec | HeadSpec, machine: Assumed, rows: tuple[int, ...], host: float) -> Timings:
    read = list(_read(spec.graph))
    quantised = any(bits < 16 for _, bits in read)
    own = host + machine.layer_s[quantised] * spec.num_layers
    reading = pass_bytes(spec.graph) / machine.bytes_per_s
    row = sum(count * machine.row_s.get(bits, 0.0) for count, bits in read)
    graph = spec.graph.native_form() if machine is NATIVE_CPU else spec.graph
    context = graph.kv_token_bytes * machine.context_s
    # As many query heads as fill the width.
    attention = 2 * spec.num_layers * spec.hidden_size * machine.attention_s
    numbers = np.array(rows, np.float64)
    products = np.maximum(reading, numbers * row) if machine.hidden else reading + (numbers - 1) * row
    lines = [own + products + before * (context + (numbers - 1) * attention) for before in CONTEXTS]
    return Timings(rows, CONTEXTS, tuple(tuple(line.tolist()) for line in lines))
