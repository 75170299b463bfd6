"""What a pair needs at each precision: bytes on the disk and in memory, and the least time of a token."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_export.inspection.facts import HeadFacts, TargetFacts
from eagle_export.inspection.graph_shapes import draft_shapes, target_shapes
from eagle_export.inspection.sizes import GraphBytes, graph_bytes, precisions_of
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.plan import RECIPES, default_draft_precision
from eagle_runtime.core.target import PREFILL_CHUNK

BACKENDS = ("cpu", "tensorrt-rtx")
CONTEXT = 4096  # default of the tokens that caches are counted for
CACHE_BYTES = {"fp32": 4, "fp16": 2}  # of a number, by the type of the traced graph
# What a process holds next to weights, caches and activations. On a CPU as docs/dev/toy_results.md has it for a pair of
# 5.6 M parameters; on a GPU an assumption: the driver's context, an engine's scratch memory with activations, the
# screen.
OVERHEAD = {"cpu": 150 * 10**6, "tensorrt-rtx": 10**9}
# Activations on a CPU while a prompt is read: copies at once of what a row's MLP and residuals hold and of its scores,
# as measured (docs/dev/inspect.md).
ROW_COPIES = 6
SCORE_COPIES = {True: 3, False: 1}  # by whether the graph has ExactAttention


@dataclass(frozen=True, slots=True)
class Need:
    """A pair at one precision of one backend. draft_precision, draft: None without a head. cache: bytes of the keys and
    values of a whole text. activations: bytes while a prompt of that length is read. memory: bytes of everything at run
    time."""

    backend: str
    precision: str
    draft_precision: str | None
    target: GraphBytes
    draft: GraphBytes | None
    cache: int
    activations: int
    memory: int

    @property
    def stored(self) -> int:
        """Bytes of the weights of both graphs on the disk."""
        return self.target.stored + (0 if self.draft is None else self.draft.stored)

    def seconds(self, bandwidth: float) -> float:
        """The least time of a token without drafts: that of reading the target's weights once."""
        return self.target.read / bandwidth


def needs(target: TargetFacts, checkpoint: Checkpoint, head: HeadFacts | None, context: int) -> tuple[Need, ...]:
    """Every precision that shapes decide. checkpoint: the target's. head: left out unless it fits. context: tokens that
    caches hold."""
    assert target.family is not None and not target.problems, "looked at before"
    config = None if head is None else head.config
    official = None if head is None or config is None else head.official
    shapes = target_shapes(target.family, checkpoint, official, config)
    drafting = None if official is None or config is None else draft_shapes(checkpoint, official, config)
    rows = target.num_layers * target.num_kv_heads * target.head_dim
    rows += 0 if config is None else config.num_layers * config.num_kv_heads * config.head_dim
    bounded = checkpoint.config.get("attn_logit_softcapping") is not None
    needed = []
    for backend in BACKENDS:
        if bounded and backend != "cpu":
            continue
        for precision in precisions_of(backend):
            draft_precision = None if drafting is None else default_draft_precision(backend, precision)
            of_target = graph_bytes(shapes, backend, precision, "target")
            of_draft = None
            if drafting is not None and draft_precision is not None:
                of_draft = graph_bytes(drafting, backend, draft_precision, "draft")
            cache = 2 * rows * context * CACHE_BYTES[RECIPES[backend][precision].traced]
            weights = of_target.stored + (0 if of_draft is None else of_draft.stored)
            activations = _activations(target, backend, precision, context)
            memory = weights + cache + activations + OVERHEAD[backend]
            needed.append(Need(backend, precision, draft_precision, of_target, of_draft, cache, activations, memory))
    return tuple(needed)


def _activations(target: TargetFacts, backend: str, precision: str, context: int) -> int:
    """Bytes while the last rows of a prompt of `context` tokens are read. On a GPU they are a part of OVERHEAD."""
    if backend != "cpu":
        return 0
    recipe = RECIPES[backend][precision]
    exact = any(isinstance(step, ExactAttention) for step in recipe.target(None))
    rows = min(PREFILL_CHUNK, context)
    row = ROW_COPIES * (2 * target.intermediate_size + 4 * target.hidden_size)
    scores = SCORE_COPIES[exact] * target.num_heads * context
    return rows * (row + scores) * CACHE_BYTES[recipe.traced]
