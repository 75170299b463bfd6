"""The plan of a run of the bench, and its checks before the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_tools.bench import machine
from eagle_tools.bench import pytorch as hf
from eagle_tools.bench.methods import check_names
from eagle_tools.bench.peers import check_peers
from eagle_tools.peers.engine import Format
from eagle_tools.questions import Question

SPARE = 64  # tokens: the text of an answer may be encoded in more tokens than it was sampled in


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run compares. bundles: each with the methods that it must run. wanted: more methods, for every bundle that
    can run them. pytorch: a checkpoint to compare with, in `modes`. assistant: the small model of its assisted mode.
    together: number of questions answered by turns at once. rows: file to write them to. record: whether to keep cycles
    for the page. peers: formats of other engines, in which the checkpoint runs too; of PyTorch's precisions only the
    first is compared then. peer_folder: where they are kept, None for the user's cache. peer_rows: whether
    passes over several rows are timed too. draft_bundles, datastore: as in EagleModel.load, for the bundles
    whose methods need them."""

    bundles: tuple[tuple[Path, tuple[str, ...]], ...]
    questions: tuple[Question, ...]
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 128
    wanted: tuple[str, ...] = ()
    backend: str = "auto"
    threads: int = field(default_factory=machine.physical_cores)
    context: int | None = None
    seed: int = 0
    pytorch: Path | None = None
    modes: tuple[str, ...] = hf.MODES
    assistant: Path | None = None
    peers: tuple[Format, ...] = ()
    peer_folder: Path | None = None
    peer_rows: bool = False
    together: int = 1
    draft_bundles: tuple[Path, ...] = ()
    datastore: Path | None = None
    rows: Path | None = None
    record: bool = False

    @property
    def names(self) -> list[str]:
        """As bundle_names, of its bundles."""
        return bundle_names([bundle for bundle, _ in self.bundles])


def check(plan: Plan) -> list[Manifest]:
    """Returns the bundles' manifests. Raises EagleErrors for all that can be checked without loading a model."""
    if plan.max_new_tokens < 2:
        raise RequestError(f"max_new_tokens is {plan.max_new_tokens}, but must be 2 or more: the first is not timed")
    if plan.threads < 1:
        raise RequestError(f"threads is {plan.threads}, but must be 1 or more")
    if not plan.temperatures or min(plan.temperatures) < 0 or len(set(plan.temperatures)) < len(plan.temperatures):
        raise RequestError(f"temperatures are {list(plan.temperatures)}, but must be 0 or more, each once")
    ids = [question.id for question in plan.questions]
    if repeated := [name for name in ids if ids.count(name) > 1]:
        raise RequestError(f"question_id {repeated[0]!r} occurs twice among the prompts; give each question its own")
    folders = [bundle.resolve() for bundle, _ in plan.bundles]
    for bundle, methods in plan.bundles:
        check_names((*methods, *(name for name in plan.wanted if name not in methods)))
        if folders.count(bundle.resolve()) > 1:
            raise RequestError(f"bundle {bundle} is given twice; give each once")
    manifests = [read_manifest(bundle) for bundle, _ in plan.bundles]
    check_vocabularies([bundle for bundle, _ in plan.bundles], manifests)
    if plan.pytorch is not None:
        if plan.peers:
            check_peers(plan.pytorch, plan.peers)
        _check_pytorch(plan, plan.pytorch, manifests[0].target.vocab_size)
    return manifests


def check_vocabularies(bundles: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Raises RequestError unless all bundles have the same vocabulary."""
    vocabularies = [(m.target.vocab_size, m.files.get("tokenizer.json")) for m in manifests]
    for bundle, vocabulary in zip(bundles, vocabularies, strict=True):
        if vocabulary != vocabularies[0]:
            raise RequestError(f"{bundle} has another vocabulary than {bundles[0]}; give bundles of one target")


def _check_pytorch(plan: Plan, folder: Path, vocab_size: int) -> None:
    if 0 not in plan.temperatures:
        raise RequestError("PyTorch is compared with greedy decoding; add temperature 0")
    known = (*hf.MODES, hf.ASSISTED)
    if unknown := [mode for mode in plan.modes if mode not in known]:
        raise RequestError(f"PyTorch method {unknown[0]!r} is unknown; there is {', '.join(known)}")
    if (hf.ASSISTED in plan.modes) != (plan.assistant is not None):
        raise RequestError("PyTorch's assisted method and an assistant need each other; give both or neither")
    for checkpoint in (folder, *([plan.assistant] if plan.assistant else [])):
        hf.check_checkpoint(checkpoint, vocab_size)


def check_length(plan: Plan, models: Sequence[EagleModel]) -> int:
    """Returns the number of tokens of the longest prompt with its answers. Raises RequestError if a context is shorter,
    since a truncated output would be compared with a complete one."""
    text = models[0].text
    longest = 0
    for question in plan.questions:
        if text.chat:
            said = [text for turn in question.turns for text in (("user", turn), ("assistant", ""))]
            messages = [{"role": role, "content": content} for role, content in said]
            spare = SPARE if len(question.turns) > 1 else 0
            length = len(text.encode(messages[:-1])) + len(question.turns) * plan.max_new_tokens + spare
        else:
            length = len(text.encode(question.turns[0])) + plan.max_new_tokens
        longest = max(longest, length)
    for (bundle, _), model in zip(plan.bundles, models, strict=True):
        if longest > model.context:
            raise RequestError(
                f"a prompt and its answers take up to {longest} tokens, the context of {bundle} holds {model.context}; "
                "give a smaller max_new_tokens, shorter prompts or a larger context"
            )
    return longest


def bundle_names(bundles: Sequence[Path]) -> list[str]:
    """Returns the folders' names; their paths where two have the same name."""
    names = [bundle.absolute().name for bundle in bundles]
    return [name if names.count(name) == 1 else str(bundle) for name, bundle in zip(names, bundles, strict=True)]
