"""What forward passes cost: the tables that draft trees are sized by, an estimate of them from the shapes of the
weights, and how each pass of a generation corrects them.

A pass over n rows that follow P others takes about a(n) + P * b(n) seconds: it reads every weight once, multiplies it n
times, and reads the keys and values of P rows; each layer costs the engine some time whatever its size. Tables hold
some n at two lengths of context, and in between straight lines.

What is believed is a table (from shapes alone, of an earlier run, or measured), a correction of each of its sizes, and
the covariance of these corrections: a Kalman filter on the logarithms of seconds. A pass corrects its own size, and in
proportion the sizes near it, whose corrections are taken to be alike. A scale common to all passes may change from pass
to pass: a machine that is slower for some seconds makes no size look expensive, since the next pass, whatever its size,
is slower too. The scale is learned from a single pass, so of a table from shapes alone ratios count: of many rows to
one, and of the head to the target.

Shapes: S corrections, of them one of the scale, one of verifications that follow another, one of the context's share
for each graph, and those of the sizes of target and head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.backend_names import NATIVE, on_cpu
from eagle_runtime.bundle.manifest import DTYPE_BITS, GraphSpec, HeadSpec, Manifest, TargetSpec

Seconds = npt.NDArray[np.float64]
# Forward passes: a verification of a tree, one of a single token that follows another such, a level of the head's tree.
Kind = Literal["target", "plain", "head"]

LARGEST = 64  # nodes of a tree whose size follows the costs
TARGET_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, LARGEST)
HEAD_ROWS = (1, 4, 10, 32)
CONTEXTS = (64, 2048)  # rows before a pass; less where the model serves less


@dataclass(frozen=True, slots=True)
class Timings:
    """seconds[c][r]: of a forward pass over rows[r] rows that follow contexts[c] others."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, context: int) -> Seconds:
        """Returns [LARGEST + 1] seconds of a pass over 0, 1, 2 ... rows that follow `context` others."""
        near, slope = line_of(self)
        seconds: Seconds = near + slope * max(0, context - self.contexts[0])
        return seconds


@functools.lru_cache(maxsize=16)
def line_of(timings: Timings) -> tuple[Seconds, Seconds]:
    """Returns [LARGEST + 1] seconds of passes after the shorter context, and [LARGEST + 1] more for each row before."""
    counts = np.arange(LARGEST + 1)
    # A pass over more rows never takes less; where it seems to, the smaller one was disturbed.
    near, *far = (np.interp(counts, timings.rows, np.minimum.accumulate(line[::-1])[::-1]) for line in timings.seconds)
    if not far:
        return near, np.zeros_like(near)
    short, long = timings.contexts
    return near, np.maximum(far[0] - near, 0) / (long - short)


class Pass(NamedTuple):
    """One forward pass with the host's work around it. rows: of the pass; context: rows before it."""

    kind: Kind
    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of verifying a tree (target), and of growing one by a level (head; None without one), each with the
    host's own work.

    A pass takes less time after one of the same graph than after the other, whose threads and weights come in between.
    plain: of verifications of one row that follow each other; None: as in `target`."""

    target: Timings
    head: Timings | None
    plain: Timings | None = None

    def plain_at(self, context: int) -> float:
        """Returns the seconds of a token without drafts."""
        timings = self.plain or self.target
        near, slope = line_of(timings)
        return float(near[1]) + float(slope[1]) * max(0, context - timings.contexts[0])


def shared(costs: Costs, others: int) -> Costs:
    """Costs of a text whose passes `others` more texts share: of a pass in which each has one row, its part; and what
    its further rows add to that. They are more expensive than alone where the first rows of a pass wait for memory, so
    trees shrink as load grows (Sequoia, arXiv 2402.12374, measures the same of batches)."""
    contexts, lines = costs.target.contexts, []
    for context in contexts:
        seconds = costs.target.at(context)
        rows = np.minimum(np.array(TARGET_ROWS) + others, LARGEST)
        beyond = np.array(TARGET_ROWS) + others - rows  # each as expensive as the last one that the table knows
        of_all = seconds[min(1 + others, LARGEST)]  # a row of each text
        added = seconds[rows] - of_all + beyond * (seconds[-1] - seconds[-2])
        lines.append(tuple((added + of_all / (1 + others)).tolist()))
    return Costs(Timings(TARGET_ROWS, contexts, tuple(lines)), costs.head)


EMBEDDING = "model.embed_tokens.weight"
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


# As `eagle-bench --tune` measured on two cores of an EPYC (Zen 5) with the pair of tools/demo_pair, and with it grown
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
        if name not in gathered:
            count, bits = prod(map(int, spec.shape)), DTYPE_BITS[spec.dtype]
            yield (2 * count, 4) if name.endswith(FOUR_BITS) and bits == 8 else (count, bits)


def _timings(spec: TargetSpec | HeadSpec, machine: Assumed, rows: tuple[int, ...], host: float) -> Timings:
    read = list(_read(spec.graph))
    quantised = any(bits < 16 for _, bits in read)
    own = host + machine.layer_s[quantised] * spec.num_layers
    reading = pass_bytes(spec.graph) / machine.bytes_per_s
    row = sum(count * machine.row_s.get(bits, 0.0) for count, bits in read)
    context = 2 * spec.num_layers * spec.graph.kv_row_bytes * machine.context_s
    # As many query heads as fill the width.
    attention = 2 * spec.num_layers * spec.hidden_size * machine.attention_s
    numbers = np.array(rows, np.float64)
    products = np.maximum(reading, numbers * row) if machine.hidden else reading + (numbers - 1) * row
    lines = [own + products + before * (context + (numbers - 1) * attention) for before in CONTEXTS]
    return Timings(rows, CONTEXTS, tuple(tuple(line.tolist()) for line in lines))


Array = npt.NDArray[np.float64]

SCALE, PLAIN, TARGET_CONTEXT, HEAD_CONTEXT, SIZES = range(5)
STARTS = {"target": SIZES, "head": SIZES + len(TARGET_ROWS)}
ROWS = {"target": TARGET_ROWS, "head": HEAD_ROWS}
COUNT = STARTS["head"] + len(HEAD_ROWS)

# Standard deviations of logarithms: how far a table may be off before any pass was seen. They are assumptions; with
# them, trees on the five simulated machines of test_learned_costs.py reach 95 % of the best rate after 1200 tokens.
SCALE_OFF, OLD_SCALE_OFF = 2.0, 0.5  # the speed of a machine that is not known, and of one that is known from before
PLAIN_OFF, CONTEXT_OFF = 0.2, 0.7
HEAD_OFF = 0.5  # the head against the target
GROWTH_OFF, NEAR_OFF = 0.7, 0.3  # of 64 rows against one, and of a size against those near it
MEASURED = 0.15  # what is left of these in a measured table
NOISE = 0.25  # of a pass
CLIPPED = 2.0  # deviations that a pass may be off at most; what was more disturbed counts as this
DRIFT = 0.05  # of the scale from pass to pass
RENEWED = 0.001  # of the first uncertainty comes back with every pass, so that learning goes on


@dataclass(frozen=True, slots=True)
class Belief:
    """base: the table corrected; corrections [S]: logarithms; spread [S, S]: their covariance."""

    base: Costs
    corrections: Array
    spread: Array


def _weights(rows: Sequence[int]) -> Array:
    """[LARGEST + 1, len(rows)]: what the correction of 0, 1, 2 ... rows takes of each size's, straight lines over the
    logarithm of rows."""
    counts = np.log(np.maximum(np.arange(LARGEST + 1), 1))
    return np.array([np.interp(counts, np.log(rows), one) for one in np.eye(len(rows))]).T


WEIGHTS = {kind: _weights(rows) for kind, rows in ROWS.items()}


def _first_spread() -> Array:
    """[S, S]: covariance of the corrections of a table made of shapes alone."""
    spread = np.zeros((COUNT, COUNT))
    spread[SCALE, SCALE] = SCALE_OFF**2
    spread[PLAIN, PLAIN] = PLAIN_OFF**2
    spread[[TARGET_CONTEXT, HEAD_CONTEXT], [TARGET_CONTEXT, HEAD_CONTEXT]] = CONTEXT_OFF**2
    spread[STARTS["head"] :, STARTS["head"] :] = HEAD_OFF**2
    for kind, start in STARTS.items():
        logs = np.log2(ROWS[kind]) / np.log2(LARGEST)
        apart = (logs[:, None] - logs[None]) * np.log2(LARGEST) / 2
        near = GROWTH_OFF**2 * np.outer(logs, logs) + NEAR_OFF**2 * np.exp(-(apart**2) / 2)
        spread[start : start + len(logs), start : start + len(logs)] += near
    return spread


FIRST_SPREAD = _first_spread()
LASTING = FIRST_SPREAD.copy()  # what uncertainty goes back to; the scale's grows by DRIFT alone
LASTING[SCALE, SCALE] = 0.0


def unknown(base: Costs) -> Belief:
    """Returns the belief that begins with a table of shapes alone."""
    return Belief(base, np.zeros(COUNT), FIRST_SPREAD)


def measured(base: Costs) -> Belief:
    """Returns the belief that begins with a table of passes that were timed one by one."""
    spread = MEASURED**2 * FIRST_SPREAD
    spread[SCALE, SCALE] = OLD_SCALE_OFF**2
    return Belief(base, np.zeros(COUNT), spread)


def expected(belief: Belief, one: Pass) -> tuple[float, Array]:
    """Returns the logarithm of the seconds that a pass is expected to take, and its derivative by the corrections
    [S]."""
    graph = "target" if one.kind == "plain" else one.kind
    timings = getattr(belief.base, one.kind) or belief.base.target
    rows = min(one.rows, LARGEST)
    near, slope = line_of(timings)
    place = TARGET_CONTEXT if graph == "target" else HEAD_CONTEXT
    context = slope[rows] * max(0, one.context - timings.contexts[0]) * np.exp(belief.corrections[place])
    total = near[rows] + context
    by = np.zeros(COUNT)
    by[SCALE] = 1
    by[PLAIN] = one.kind == "plain"
    start, weights = STARTS[graph], WEIGHTS[graph][rows]
    by[start : start + len(weights)] = weights
    log = float(np.log(total) + by @ belief.corrections)
    by[place] = context / total
    return log, by


def learned(belief: Belief, passes: Sequence[Pass]) -> Belief:
    """Returns the belief after some passes, in the order they ran."""
    corrections, spread = belief.corrections, belief.spread
    for one in passes:
        log, by = expected(Belief(belief.base, corrections, spread), one)
        spread = spread + RENEWED * (LASTING - spread)
        spread[SCALE, SCALE] = min(spread[SCALE, SCALE] + DRIFT**2, SCALE_OFF**2)
        shared = spread @ by
        variance = float(by @ shared) + NOISE**2
        most = CLIPPED * variance**0.5
        off = min(max(float(np.log(one.seconds)) - log, -most), most)
        corrections = corrections + shared * (off / variance)
        spread = spread - np.outer(shared, shared) / variance
    return Belief(belief.base, corrections, spread)


def table(belief: Belief) -> Costs:
    """Returns the table with its corrections."""
    by_context = np.exp(belief.corrections[[TARGET_CONTEXT, HEAD_CONTEXT]])
    scale, plain = np.exp(belief.corrections[[SCALE, PLAIN]])

    def corrected(timings: Timings, kind: str, of_context: float, factor: float, rows: tuple[int, ...]) -> Timings:
        near, slope = line_of(timings)
        factors = factor * np.exp(WEIGHTS[kind] @ belief.corrections[STARTS[kind] :][: len(ROWS[kind])])
        lines = [factors * (near + slope * of_context * (context - timings.contexts[0])) for context in CONTEXTS]
        return Timings(rows, CONTEXTS, tuple(tuple(line[list(rows)].tolist()) for line in lines))

    base, (of_target, of_head) = belief.base, by_context.tolist()
    target = corrected(base.target, "target", of_target, scale, TARGET_ROWS)
    alone = corrected(base.plain or base.target, "target", of_target, scale * plain, (1,))
    if base.head is None:
        return Costs(target, None, alone)
    return Costs(target, corrected(base.head, "head", of_head, scale, HEAD_ROWS), alone)
