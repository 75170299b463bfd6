"""The report on a target and a head: what the pair needs at each precision (bytes on the disk and in memory, and the
least time of a token), and where it would run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from eagle_export.base.errors import ExportError
from eagle_export.heads.prediction import without_prediction_layers
from eagle_export.inspection.bandwidth import SAMPLE_BYTES, physical_cores, read_bandwidth
from eagle_export.inspection.facts import HeadFacts, TargetFacts, head_facts, target_facts
from eagle_export.inspection.headers import open_headers
from eagle_export.inspection.sizes import GraphBytes, graph_bytes, pair_shapes
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.plan import BY_VALUES, RECIPES, default_draft_precision
from eagle_runtime.core.target import PREFILL_CHUNK
from eagle_runtime.machine.container import memory_limit

GB = 10**9
CLASSES = (8, 12, 16, 24, 32)  # GB of GPUs and machines
SYSTEM = 10**9  # bytes that a machine needs for itself
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
class Report:
    """context: tokens that caches are counted for. needs: empty for a target that cannot be exported."""

    target: TargetFacts
    target_commit: str | None
    head: HeadFacts | None
    head_commit: str | None
    context: int
    needs: tuple[Need, ...]

    @property
    def exportable(self) -> bool:
        """Whether headers and configs show no reason why an export would be refused."""
        return not self.target.problems and (self.head is None or not self.head.problems)


def inspect(target: str, draft: str | None, context: int | None = None) -> Report:
    """target, draft: folders or ids of models on the hub. context: tokens that caches are counted for; None for 4096,
    or all that the target has if they are fewer. Raises ExportError for what cannot be read."""
    if context is not None and context < 1:
        raise ExportError(f"the context is {context} tokens, but must be 1 or more")
    whole, model = open_headers(target)
    facts, checkpoint = target_facts(whole), without_prediction_layers(whole)
    if context is not None and facts.context is not None and context > facts.context:
        raise ExportError(f"the context is {context} tokens, but {target} has {facts.context} at most")
    tokens = context or min(CONTEXT, facts.context or CONTEXT)
    drafting, its_model = (None, None) if draft is None else open_headers(draft, head=True)
    head = None if drafting is None else head_facts(drafting, facts, checkpoint)
    needed = () if facts.problems else needs(facts, checkpoint, head, tokens)
    commit, its_commit = (None if each is None else each.commit for each in (model, its_model))
    return Report(facts, commit, head, its_commit, tokens, needed)


def places(need: Need, machine: Place | None) -> list[Place]:
    """Where a pair at this precision would run: this machine, or the GPUs."""
    if need.backend == "cpu":
        return [] if machine is None else [machine]
    return list(CARDS)


def fits(need: Need, place: Place) -> bool:
    return need.memory + (SYSTEM if need.backend == "cpu" else 0) <= place.memory


def least_class(need: Need) -> int | None:
    """The smallest class of GPUs or machines with the memory, in GB; None if all are too small."""
    return next((size for size in CLASSES if fits(need, Place("", size * GB, 1))), None)


@dataclass(frozen=True, slots=True)
class Need:
    """A pair at one precision of one backend. draft_precision, draft: None without a head. cache: bytes of the keys and
    values of a whole text, and of states. activations: bytes while a prompt of that length is read. memory: bytes of
    everything at run time."""

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
    """Every precision that shapes decide. checkpoint: the target's. head: if it fits. context: tokens of the caches."""
    assert target.family is not None and not target.problems, "looked at before"
    config = None if head is None else head.config
    shapes = pair_shapes(target.family, checkpoint, None if head is None else head.official, config)
    rows = sum(heads * width for heads, width in target.key_shapes)
    rows += 0 if config is None else config.row_size // 2
    states = 4 * target.state_size  # in fp32
    bounded = checkpoint.config.get("attn_logit_softcapping") is not None
    on_cpus = bounded or target.several_shapes or target.family.convolution or target.state_size
    needed = []
    for backend in BACKENDS:
        if on_cpus and backend != "cpu":
            continue
        for precision, recipe in RECIPES[backend].items():
            if precision in BY_VALUES:
                continue  # shapes do not decide its size
            of_target = graph_bytes(shapes["target"], backend, precision, "target")
            draft_precision, of_draft = None, None
            if "draft" in shapes:
                draft_precision = default_draft_precision(backend, precision)
                of_draft = graph_bytes(shapes["draft"], backend, draft_precision, "draft")
            cache = 2 * rows * context * CACHE_BYTES[recipe.traced] + states
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pair may run. memory: bytes. bandwidth: bytes per second."""

    name: str
    memory: int
    bandwidth: float


# One GPU of each size, with the memory and the bandwidth that docs/dev/inspect.md has the sources of.
CARDS = (
    Place("RTX 4060", 8 * GB, 272e9),
    Place("RTX 4070", 12 * GB, 504e9),
    Place("RTX 4080", 16 * GB, 717e9),
    Place("RTX 4090", 24 * GB, 1008e9),
    Place("RTX 5090", 32 * GB, 1792e9),
)


def this_machine() -> Place | None:
    """This machine, with the bandwidth of its memory as measured now; None where its memory is unknown."""
    if (memory := physical_memory()) is None:
        return None
    return Place("this machine", memory, read_bandwidth(physical_cores(), SAMPLE_BYTES // 4, 3))


def physical_memory() -> int | None:
    """Bytes of memory without swap, of the machine or of the container that it is; None if the system does not say."""
    if sys.platform == "win32":
        from eagle_runtime.machine.host import total_memory

        return total_memory()
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(size, memory_limit() or size)
    except (OSError, ValueError):
        return None
