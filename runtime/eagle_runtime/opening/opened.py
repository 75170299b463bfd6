"""What an opened bundle consists of, and making one of sessions that are open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_runtime.base.backend_names import on_cpu
from eagle_runtime.bundle.listed_files import read_listed, read_text_file
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.engines import Engines
from eagle_runtime.core.head import HeadOfText
from eagle_runtime.core.session import Session
from eagle_runtime.core.target import NATIVE_CHUNK, PREFILL_CHUNK, SHORT_CHUNK, Target
from eagle_runtime.drafting.acceptance import Acceptance
from eagle_runtime.drafting.cost_learning import unknown
from eagle_runtime.drafting.cost_prior import prior_costs
from eagle_runtime.drafting.cost_storage import LearnedCosts
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.drafting.draft_model import CHILDREN, DraftModelHead
from eagle_runtime.drafting.habits import SUCCESSORS, Habits
from eagle_runtime.drafting.head import SCRATCH
from eagle_runtime.drafting.heads import head_of
from eagle_runtime.drafting.method import Loaded, Proposer
from eagle_runtime.drafting.rank_acceptance import MANY, SOME, Ranks
from eagle_runtime.drafting.transitions import Transitions, read_transitions
from eagle_runtime.opening.backends import PassedOver
from eagle_runtime.opening.exact_rows import RowCheck
from eagle_runtime.opening.habits_file import OFTEN, HabitsFile
from eagle_runtime.sampling.grammars import Grammars
from eagle_runtime.text.tokenizer import Text

TRANSITIONS_BYTES = 1 << 31  # of a file, which is read whole
# Seconds of a token without drafts from which a model's habits pay without a head: the host takes about 0.2 ms for a
# level of their trees. On a CPU, a target whose passes take 1 ms emits 0.93 times as many tokens per second with them
# as with matches alone, and one whose passes take 50 ms 1.14 times as many (docs/dev/trees.md).
HABITS_PAY_S = 0.01


@dataclass(frozen=True, slots=True)
class OpenBundle:
    """An opened bundle. target and head own the caches; a model and its twins share everything else.

    context: tokens of prompt and output that the caches hold. head: None for a bundle without one. grammars: of
    constraints. habits: of the target, for method recycling. acceptance: how drafts were accepted so far; ranks:
    the same by rank and depth. kv_budget: bytes for the keys and values of conversations. weight_bytes: of the files of
    graphs and weights. habits_file: keeps the habits. drafts: bundles whose targets draft (draft_bundle.py); the
    costs of each are those of this bundle's target with it. datastore: a text that is searched for matches.
    transitions: of a block head. pass_s: seconds of a token without drafts, estimated from the weights alone.
    passed_over, notice, row_check: see loading.open_bundle."""

    manifest: Manifest
    context: int
    backend: str
    threads: int | None
    text: Text
    engines: Engines
    target: Target
    head: HeadOfText | None
    costs: LearnedCosts
    grammars: Grammars
    habits: Habits
    acceptance: Acceptance = dataclasses.field(default_factory=dict)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    transitions: Transitions | None = None
    row_check: RowCheck | None = None
    passed_over: PassedOver = ()
    notice: str | None = None
    kv_budget: int = 2**62
    weight_bytes: int = 0
    habits_file: HabitsFile | None = None
    drafts: tuple[OpenBundle, ...] = ()
    datastore: Datastore | None = None
    pass_s: float = 0.0

    @property
    def loaded(self) -> Loaded:
        """What decides between methods. Habits pay where a token without drafts takes long, or a user has them kept;
        not with a datastore, which is searched for matches."""
        per_row: dict[Proposer, int] = {"habits": SUCCESSORS}
        if self.head is not None:
            per_row["head"] = self.head.top_k
        if self.drafts:
            per_row["draft model"] = min(CHILDREN, self.manifest.target.vocab_size)
        if len(self.drafts) > 1:
            per_row["draft models"] = per_row["draft model"]
        pay = self.datastore is None and (self.habits_file is not None or self.pass_s >= HABITS_PAY_S)
        return Loaded(self.manifest.tree_defaults, per_row, self.datastore is not None, pay)

    @property
    def on_cpu(self) -> bool:
        """Whether forward passes run on the CPU, where one engine may have several caches."""
        return on_cpu(self.backend)

    @property
    def drafts_are_off(self) -> bool:
        """Whether drafts would change the output, since rows differ by which others share their forward pass."""
        return self.row_check is not None and self.row_check.padding is None

    def save_learned(self, *, last: bool = True) -> None:
        """Save what passes cost, and what they do with draft models (LearnedCosts.save), and the habits, if a file
        keeps them. last: else only what has changed a lot."""
        for one in (self, *self.drafts):
            one.costs.save(last=last)
        self.ranks.save(SOME if last else MANY)
        if self.habits_file is not None:
            self.habits_file.save(1 if last else OFTEN)

    def with_habits_of(self, file: HabitsFile | None) -> OpenBundle:
        """Returns the same bundle with the habits of a file; itself for None."""
        return self if file is None else dataclasses.replace(self, habits=file.habits, habits_file=file)

    def with_new_caches(self) -> OpenBundle:
        """Returns the same bundle with a target and a head whose caches are empty."""
        target, head = _models(self.engines.sessions, self.manifest, self.context, self.transitions)
        drafts = tuple(one.with_new_caches() for one in self.drafts)
        return dataclasses.replace(self, target=target, head=head, drafts=drafts)

    def state(self) -> DecodingState:
        """Returns a state without a text, in the caches of this bundle."""
        return DecodingState(self.target, self.head, [DraftModelHead(one.target) for one in self.drafts])


def bundle_of_sessions(
    folder: Path,
    manifest: Manifest,
    sessions: tuple[Session, ...],
    context: int,
    *,
    backend: str = "cpu",
    threads: int | None = None,
) -> OpenBundle:
    """Make an OpenBundle of sessions that are open: of the target and, if the bundle has one, of the head. Its costs
    are estimates that are kept in no file. Raises BundleError for a broken tokenizer."""
    transitions = transitions_of(folder, manifest)
    target, head = _models(sessions, manifest, context, transitions)
    text = Text(folder, partial(read_text_file, folder, manifest))
    estimated = prior_costs(manifest, backend)
    return OpenBundle(
        manifest=manifest,
        context=context,
        backend=backend,
        threads=threads,
        text=text,
        engines=Engines(sessions),
        target=target,
        head=head,
        transitions=transitions,
        costs=LearnedCosts(unknown(estimated)),
        pass_s=estimated.plain_at(0),
        habits=Habits(manifest.target.vocab_size),
        grammars=Grammars(text.tokenizer_json, manifest.target.vocab_size, manifest.target.eos_token_ids),
    )


def transitions_of(folder: Path, manifest: Manifest) -> Transitions | None:
    """Reads those of a bundle with a block head that has some. Raises BundleError."""
    head = manifest.head
    if head is None or head.transitions is None:
        return None
    file = head.transitions
    content = read_listed(folder, manifest, file, TRANSITIONS_BYTES)
    return read_transitions(content, manifest.target.vocab_size, head.draft_vocab_size, str(folder / file))


def _models(
    sessions: tuple[Session, ...], manifest: Manifest, context: int, transitions: Transitions | None
) -> tuple[Target, HeadOfText | None]:
    session, *heads = sessions
    exact, native = getattr(session, "exact", False), getattr(session, "native", False)
    short = (
        exact and not native
    ) or manifest.target.graph.states is not None  # whose cache holds a chunk's rows in full
    target = Target(session, context, SHORT_CHUNK if short else NATIVE_CHUNK if native else PREFILL_CHUNK)
    return target, head_of(heads[0], manifest, context, SCRATCH, transitions) if heads else None
