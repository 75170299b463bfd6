"""Predicts milliseconds of forward passes and of decode cycles on a card: a roofline for each product and the cache,
a fixed time for each kernel, and the host's calls, copies and synchronisations.

Shapes: n nodes of a tree, rows padded to N, P past rows padded, k children per node, D levels of the head after the
first, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_runtime.trt import fixed_shapes as padding
from eagle_tools.card.cards import Assumed, Card
from eagle_tools.card.facts import WEIGHT_ONLY, Facts, Pair

PASS_ROWS = tuple(rows for rows in padding.TARGET_ROWS if rows <= padding.TREE_ROWS)  # of a padded verification
HEAD_ROWS = padding.HEAD_ROWS[0]  # of a padded forward pass of the head: a level, or an accepted path
CONTEXT = 4096  # tokens that the cache is made for, where memory is counted
BEST, WATCHED = 64, 64  # likeliest tokens of a row that come to the host for sampling, and chosen ones
GREEDY = 8  # likeliest tokens that come for greedy decoding
PROPOSALS = 64  # tokens that the head names after the root, or for each node when all levels came to the host
ID, SHORT, FLOAT, HALF = 8, 4, 4, 2  # bytes
LOGIT_READS = 3


@dataclass(frozen=True, slots=True)
class Tree:
    """A dynamic tree: nodes with the root, levels after the first, children per node."""

    nodes: int = 60
    depth: int = 5
    top_k: int = 10

    @property
    def candidates(self) -> int:
        """Tokens that the head's one call proposes for the tree."""
        return self.top_k + self.depth * self.top_k**2


@dataclass(frozen=True, slots=True)
class Kernels:
    """Numbers of kernels: of a forward pass of the target, of one of the head, and of the head's one call."""

    target: int
    head: int
    tree: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a cycle costs besides kernels. calls: of engines. syncs: waits of the host. copies: queued. up, down: bytes
    over PCIe."""

    calls: int
    syncs: int
    copies: int
    up: int
    down: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds on one card, the host's work included in the cycles alone.

    plain: a forward pass of one row; verify: of a tree; draft: the head's one call; six: D + 1 calls of the head with
    the host between them. token: a token without drafts. cycle: a cycle with one call of the head; old_cycle: with
    D + 1 calls, and whole logits on the host. traffic, old_traffic: of these. gigabytes: weights and cache; fits: in
    the card's memory. runs: whether the card has kernels for the precision."""

    card: str
    precision: str
    plain: float
    verify: float
    draft: float
    six: float
    token: float
    cycle: float
    old_cycle: float
    traffic: Traffic
    old_traffic: Traffic
    gigabytes: float
    fits: bool
    runs: bool

    def speed_up(self, tau: float) -> float:
        """Returns how many times as fast drafts make decoding. tau: tokens per cycle."""
        return tau * self.token / self.cycle

    def tau_for(self, speed_up: float) -> float:
        """Returns the tau with which drafts reach this speed-up."""
        return speed_up * self.cycle / self.token


def padded_rows(rows: int) -> int:
    """Returns the rows of the padded pass; beyond the largest of PASS_ROWS as many of those passes as are needed."""
    return next((size for size in PASS_ROWS if rows <= size), -(-rows // PASS_ROWS[-1]) * PASS_ROWS[-1])


def padded_past(past: int) -> int:
    """Returns the smallest of 256, 512, 1024, ... that holds `past` rows."""
    return padding.next_step(padding.past_steps(max(CONTEXT, past)), past)


def body(facts: Facts, rows: int, past: int, card: Card, assumed: Assumed) -> float:
    """Returns the seconds in which a forward pass reads and computes. rows: padded; past: padded, or any number of
    committed rows."""
    bandwidth = card.bandwidth * assumed.bandwidth
    seconds = facts.vectors / bandwidth
    for product in facts.products:
        moved = product.nbytes + HALF * rows * (product.inputs + product.outputs)
        work = 2 * rows * product.inputs * product.outputs
        seconds += max(moved / bandwidth, work / compute_rate(product.kind, card, assumed))
    joined = facts.kv_row * (2 * past + rows)  # read and written once by the joining kernels
    read = facts.kv_row * (past + rows)
    work = 4 * rows * (past + rows) * facts.attention_width * facts.layers
    seconds += joined / bandwidth + max(read / bandwidth, work / compute_rate("fp16", card, assumed))
    return seconds + LOGIT_READS * FLOAT * rows * facts.vocab / bandwidth


def compute_rate(kind: str, card: Card, assumed: Assumed) -> float:
    """Returns operations per second for factors of this kind (facts.Product). Where a card lacks them it computes in
    fp16; Prediction.runs then says that it does not run the precision."""
    if kind == WEIGHT_ONLY:
        return card.compute["fp16"] * assumed.weight_only
    return card.compute.get(kind, card.compute["fp16"]) * assumed.compute


def predict(
    pair: Pair, kernels: Kernels, card: Card, tree: Tree, past: int, assumed: Assumed, *, sampled: bool = False
) -> Prediction:
    """Returns the prediction for a pair with a head. past: rows before the pass. sampled: at a temperature above 0."""
    target, head = pair.target, pair.head
    assert head is not None, "a cycle needs a head"
    before = padded_past(past)

    def target_pass(rows: int) -> float:
        return kernels.target * assumed.kernel_s + body(target, rows, before, card, assumed)

    level = body(head, HEAD_ROWS, before, card, assumed)
    plain, verify = target_pass(1), target_pass(padded_rows(tree.nodes))
    draft = kernels.tree * assumed.kernel_s + (tree.depth + 1) * level
    six = (tree.depth + 1) * (kernels.head * assumed.kernel_s + level)
    new, old = traffic(target, head, tree, before, sampled=sampled), old_traffic(target, tree)
    one = Traffic(1, 1, 2, _feeds(target, 1, before, sampled), _answers(1, sampled))
    kept = 2 * (target.kv_row + head.kv_row) * (tree.depth + 2) / (card.bandwidth * assumed.bandwidth)
    race = assumed.race_s * target.vocab * tree.nodes if sampled else 0.0
    cycle_host = assumed.verify_s + assumed.level_s
    old_host = assumed.verify_s + (tree.depth + 1) * assumed.level_s + race
    needed = target.weights + head.weights + (target.kv_row + head.kv_row) * CONTEXT + HALF * head.vocab * head.hidden
    kinds = {product.kind for facts in (target, head) for product in facts.products}
    return Prediction(
        card.name,
        pair.precision,
        plain,
        verify,
        draft,
        six,
        token=plain + assumed.plain_s + _moving(one, card, assumed),
        cycle=verify + draft + kept + cycle_host + _moving(new, card, assumed),
        old_cycle=verify + six + kept + old_host + _moving(old, card, assumed),
        traffic=new,
        old_traffic=old,
        gigabytes=needed / 1e9,
        fits=needed + assumed.reserve <= card.memory,
        runs=kinds - {WEIGHT_ONLY} <= set(card.compute),
    )


def traffic(target: Facts, head: Facts, tree: Tree, past: int, *, sampled: bool) -> Traffic:
    """Returns what a cycle with one call of the head moves: two calls, and one that keeps the accepted rows."""
    rows = padded_rows(tree.nodes)
    noise = FLOAT * (tree.depth + 1) * head.vocab if sampled else 0  # for every token, one for each level
    up = _feeds(target, rows, past, sampled) + _feeds(head, HEAD_ROWS, past, False) + noise
    pool = (tree.candidates + PROPOSALS) * (SHORT + FLOAT) + (tree.depth - 1) * tree.top_k * SHORT
    return Traffic(calls=3, syncs=2, copies=14, up=up, down=_answers(rows, sampled) + pool)


def old_traffic(target: Facts, tree: Tree) -> Traffic:
    """Returns what a cycle moved when every level came to the host with its proposals, every verification with its
    logits, and the accepted rows moved by a copy for each."""
    calls = tree.depth + 2
    moved = 9 * (tree.depth + 1)  # device copies: 54 for trees of five levels
    down = FLOAT * target.vocab * tree.nodes + (tree.depth + 1) * tree.top_k * PROPOSALS * (ID + FLOAT)
    return Traffic(calls, syncs=calls, copies=3 * calls + moved, up=calls * 64 * 64 * HALF, down=down)


def _feeds(facts: Facts, rows: int, past: int, sampled: bool) -> int:
    """Bytes up: embeddings, positions, rows with logits, the two masks, and the tokens whose logits are asked for."""
    return rows * (HALF * facts.hidden + 2 * ID + ID * WATCHED * sampled) + HALF * (rows * rows + past)


def _answers(rows: int, sampled: bool) -> int:
    """Bytes down: the likeliest tokens of every row with their logits, the logarithm of the sum; for sampling more of
    them, and the logits asked for."""
    return rows * ((BEST if sampled else GREEDY) * (SHORT + FLOAT) + FLOAT + WATCHED * FLOAT * sampled)


def _moving(moves: Traffic, card: Card, assumed: Assumed) -> float:
    """Seconds of calls, synchronisations and copies."""
    queued = moves.calls * assumed.call_s + moves.syncs * assumed.sync_s + moves.copies * assumed.copy_s
    return queued + ((moves.up + moves.down) / (card.bus * assumed.bus) if card.bus else 0.0)
