"""The target as a bundle holds it, usually quantised: features and logits of texts, and answers to prompts, from the
engine that will decode.

Texts are read as decoding reads drafts, by `Target.verify` of chains, so that a head learns from the very features that
the runtime hands to it. EAGLE-3's fc is part of a bundle's target, with its own rounding: a head that learns from such
features keeps the fc of the head that the bundle was exported with, and all else of it is trained.

Shapes: T tokens of a text, W width of the features, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear

from eagle_export.graphs.pair import HeadPart, open_pair
from eagle_export.heads.kinds import KINDS
from eagle_export.heads.reading import default_taps
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.texts import read_texts
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import Float, chain_of
from eagle_runtime.bundle.manifest import HeadKind, Manifest, read_manifest
from eagle_runtime.core.target import SCORE_CHUNK
from eagle_runtime.opening.loading import MAX_THREADS, open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_train.answering import Request, Requests, checked
from eagle_train.batches import padded
from eagle_train.data import Windows
from eagle_train.errors import TrainError
from eagle_train.sampling import cut_loop
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, Taught, WholeLogits

# Least mean cosine of the bundle's features and the target's: int4 of the hardest pair measured has 0.95.
ALIKE = 0.5
COMPARED = 64  # tokens at most over which they are compared


class BundleTarget:
    """A bundle's target, opened for texts of limited length. A Teacher."""

    def __init__(self, folder: Path, opened: OpenBundle) -> None:
        self._folder, self._opened = folder, opened

    @property
    def description(self) -> str:
        """Returns the bundle's name, its target's precision and what runs it."""
        return f"{self._folder} ({self._opened.manifest.precision['target']}, run by {self._opened.backend})"

    def check_features(self, target: FrozenTarget, given: HeadPart | None) -> None:
        """Raises TrainError if the features are not those of a target or, for an EAGLE-3 head, of its fc.

        They are compared over a text of pseudo-random ids."""
        taps = () if given is None else given.config.taps
        ids = np.random.default_rng(0).integers(0, target.vocab_size, min(COMPARED, self._opened.context)).tolist()
        theirs = target.states(torch.tensor([ids], device=target.device), taps).features[0].float()
        if given is not None and taps:
            theirs = linear(theirs, *_fc(given, theirs))
        alike = float(cosine_similarity(torch.from_numpy(self.read(ids)[0]).to(theirs), theirs, dim=-1).mean())
        if not alike >= ALIKE:
            made = f"{target.checkpoint.folder}" + (
                f" with the fc of {given.checkpoint.folder}" if given and taps else ""
            )
            raise TrainError(
                f"the features of {self._folder} are not those of {made} (mean cosine {alike:.2f}); give a bundle that "
                "was exported from them"
            )

    def read(self, ids: Sequence[int]) -> tuple[Float, Float]:
        """Returns features [T, W] and logits [T, V] of a text, fp32."""
        target = self._opened.target
        target.cache.truncate(0)
        features, logits = [], []
        for start in range(0, len(ids), SCORE_CHUNK):
            root, *drafted = ids[start : start + SCORE_CHUNK]
            new_logits, new_features = target.verify(chain_of(root, drafted))
            features.append(np.array(new_features, np.float32))
            logits.append(np.array(new_logits, np.float32))
            target.cache.keep(np.arange(1 + len(drafted)))
        return np.concatenate(features), np.concatenate(logits)

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        """Returns features and logits of a batch of windows, zero in the padding."""
        rows = [self.read(windows.ids[windows.window(index)].tolist()) for index in indices]
        features, logits = (torch.from_numpy(padded(part)).to(batch.ids.device) for part in zip(*rows, strict=True))
        return Taught(features, WholeLogits(logits))

    def fingerprint(self) -> str:
        """Returns a hash of the files that the features depend on."""
        files = self._opened.manifest.files
        return hashlib.sha256(repr(sorted(i for i in files.items() if i[0].startswith("target/"))).encode()).hexdigest()


def check_bundle(bundle: Path, target: Checkpoint, kind: HeadKind, seq_len: int, init: Path | None) -> None:
    """Raises TrainError unless heads of this kind can learn from the bundle, and BundleError for a damaged one. Reads
    no weights."""
    manifest = check_same_target(bundle, target)
    head = manifest.head
    if seq_len > manifest.target.context:
        raise TrainError(
            f"seq_len is {seq_len}, but {bundle} serves {manifest.target.context} tokens; give a smaller seq_len"
        )
    if kind != "eagle3":
        if head is not None and KINDS[head.kind].reads_taps:
            raise TrainError(
                f"the features of {bundle} are those of its {head.kind} head, which no {kind} head reads; give a "
                "bundle of the target alone, or with an eagle1 head"
            )
        return
    if head is None or head.kind != "eagle3":
        raise TrainError(f"{bundle} has no eagle3 head, so its target returns no taps; export the target with one")
    if head.taps != (taps := default_taps(manifest.target.num_layers)):
        raise TrainError(
            f"{bundle} reads the taps {list(head.taps)}, but heads trained here read {list(taps)}; train on TARGET"
        )
    if init is None:
        raise TrainError(
            f"fc is part of the target in {bundle}, which an eagle3 head trained on it has to share; give the head "
            "that the bundle was exported with as --init"
        )
    part = open_pair(target.folder, init).head
    if part is not None and part.config.hidden_size != head.hidden_size:
        raise TrainError(
            f"{init} has features of width {part.config.hidden_size}, but {bundle} of {head.hidden_size}; give the "
            "head that the bundle was exported with"
        )


def check_same_target(bundle: Path, target: Checkpoint) -> Manifest:
    """Returns the manifest of a bundle. Raises TrainError if it shows that the bundle is of another target."""
    manifest = read_manifest(bundle)
    spec = manifest.target
    for name, stored, key in (
        ("vocabulary", spec.vocab_size, "vocab_size"),
        ("hidden size", spec.hidden_size, "hidden_size"),
        ("number of layers", spec.num_layers, "num_hidden_layers"),
    ):
        if stored != (wanted := target.integer(key)):
            raise TrainError(
                f"{bundle} has a {name} of {stored}, but {target.folder} of {wanted}; give a bundle that was exported "
                "from this target"
            )
    own, stored_hash = read_texts(target).get("tokenizer.json"), manifest.files.get("tokenizer.json")
    if stored_hash is not None and own is not None and stored_hash != hashlib.sha256(own).hexdigest():
        raise TrainError(
            f"{bundle} has another tokenizer.json than {target.folder}; give a bundle that was exported from it"
        )
    return manifest


@contextmanager
def opened_target(bundle: Path, seq_len: int) -> Iterator[BundleTarget]:
    """Opens a bundle that check_bundle has accepted, with torch's number of threads. Raises BundleError, and
    BackendError if no engine runs it here."""
    opened = open_bundle(bundle, "auto", seq_len, _threads(), check_hashes=True)
    try:
        yield BundleTarget(bundle, opened)
    finally:
        opened.engines.close()


def _fc(given: HeadPart, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of a head's fc, in the type and on the device of `like`."""
    tensors = given.checkpoint.tensors
    bias = tensors["fc.bias"].read().to(like) if "fc.bias" in tensors else None
    return tensors["fc.weight"].read().to(like), bias


class BundleSampler:
    """An AnswerSampler of a bundle, with its own drafts, which do not change the answers."""

    def __init__(self, model: EagleModel) -> None:
        self.vocab_size = model.manifest.target.vocab_size
        self.context = model.context
        self._model = model

    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        """Yields each request's new tokens, one request after another. Raises TrainError for a prompt that the context
        does not hold."""
        while (request := requests.take()) is not None:
            settings = checked(request, self.context).sampling
            result = self._model.generate(
                list(request.ids), max_new_tokens=settings.max_new_tokens, sampling=settings.of_answer(request.number)
            )
            tokens = list(result.token_ids)
            yield request, cut_loop(tokens) if settings.cut_loops else tokens


@contextmanager
def opened_sampler(bundle: Path, target: Checkpoint) -> Iterator[BundleSampler]:
    """Opens a bundle of this target, with torch's number of threads. Raises TrainError for one of another target,
    BundleError, and BackendError if no engine runs it here."""
    check_same_target(bundle, target)
    with EagleModel.load(bundle, threads=_threads()) as model:
        yield BundleSampler(model)


def _threads() -> int:
    return min(torch.get_num_threads(), MAX_THREADS)
