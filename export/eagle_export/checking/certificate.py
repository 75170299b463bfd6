"""A bundle's certificate: the source model's greedy continuations of a few prompts, and how closely the bundle follows.

The source is the checkpoint, run by transformers on the CPU in fp32, as a whole or layer by layer: different code from
the traced graphs, so that an error of the export shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from eagle_calib.replay import forced_logits, mean_tau, replay
from eagle_calib.scoring import divergence, log_softmax
from eagle_export.base.destination import folder_bytes
from eagle_export.base.errors import ExportError
from eagle_export.base.memory import check_memory
from eagle_export.checking.head_check import HeadCheck, compare_readings, taps_of_readings
from eagle_export.checking.limits import LIMITS, Advice, FidelityError, RequiredFidelity, refusal
from eagle_export.checking.source_reading import SourceReading
from eagle_export.checking.worst_layers import ROWS, Layer, LayerError, layer_errors, progress, worst_layers
from eagle_export.graphs.eager import weights_for_tokens
from eagle_export.graphs.pair import HeadPart, Pair
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.registry import family_of, read_config
from eagle_export.recording.layered import layer_numbers
from eagle_export.recording.layered_continuations import verified_continuations
from eagle_export.recording.source_text import Written
from eagle_runtime import BackendError, EagleError, EagleModel, SamplingParams
from eagle_runtime.base.errors import first_line
from eagle_runtime.base.tree import Float
from eagle_runtime.bundle.fidelity import shortfall
from eagle_runtime.bundle.listed_files import read_text_file
from eagle_runtime.bundle.manifest import Certificate, GoldenPrompt, Manifest, TopTokens
from eagle_runtime.text.tokenizer import Text

TOP = 5  # tokens stored per row of logits


@dataclass(frozen=True, slots=True)
class Comparison:
    """A certificate, the continuation with the largest mean KL, and what was seen of the head, if it was looked at."""

    certificate: Certificate
    farthest: Written
    head: HeadCheck | None


def certified(
    pair: Pair,
    bundle: Path,
    manifest: Manifest,
    layers: Sequence[Layer],
    required: RequiredFidelity,
    report: Callable[[str], None],
    reading: SourceReading | None = None,
) -> tuple[Manifest, HeadCheck | None, list[str]]:
    """Returns the manifest of a bundle, with a certificate if this machine can make one, what was seen of the head, and
    warnings.

    pair: what the bundle was made of. layers: of the target's graph before the recipe. report: called with what is
    being done. reading: of the source, if it was read before. Raises FidelityError for a bundle that does not reach
    what is required, and ExportError if limits were asked for and cannot be checked."""
    report("comparing with the source")
    try:
        comparison = compare_with_source(pair.target, bundle, manifest, pair.torch_head, report, reading)
    except FidelityError:
        raise
    except ExportError as error:
        if required.explicit:
            raise ExportError(f"the bundle cannot be held to an agreement or a KL: {error}") from None
        return manifest, None, [f"the bundle has no certificate: {error}"]
    certificate = comparison.certificate
    if not required.limits.met(certificate.agreement, certificate.kl):
        worst = _worst_layers(bundle, manifest, layers, comparison.farthest, report)
        raise refusal(certificate, required, worst)
    manifest = replace(manifest, certificate=certificate)
    marked, misread = shortfall(manifest), None if comparison.head is None else comparison.head.warning()
    warnings = [] if marked is None else [f"the bundle is marked: {marked}"]
    return manifest, comparison.head, warnings + ([] if misread is None else [f"the head may be misread: {misread}"])


def _worst_layers(
    bundle: Path, manifest: Manifest, layers: Sequence[Layer], continuation: Written, report: Callable[[str], None]
) -> list[LayerError]:
    """The worst layers over the first rows of a continuation; none if this machine cannot run the graph."""
    count = min(ROWS, len(continuation.tokens))
    tokens, graph = [*continuation.start, *continuation.tokens[: count - 1]], manifest.target.graph

    began = 0.0

    def count_layers(done: int, steps: int) -> None:
        nonlocal began
        began = began if done else time.perf_counter()
        report(progress(done, steps, time.perf_counter() - began))

    try:
        logits = continuation.logits[:count]
        return worst_layers(layer_errors(bundle / graph.file, graph, layers, tokens, logits, count_layers))
    except (EagleError, MemoryError):
        return []


def compare_with_source(
    source: Checkpoint,
    bundle: Path,
    manifest: Manifest,
    head: HeadPart | None = None,
    report: Callable[[str], None] = lambda step: None,
    reading: SourceReading | None = None,
) -> Comparison:
    """Runs the source, then the bundle, on the golden prompts. bundle: complete but for the certificate. head: to be
    checked on the source's own text. reading: of the source, if it was read before.

    Raises ExportError if this machine cannot run one of them, FidelityError if the bundle's logits are not finite."""
    try:
        import eagle_runtime.ort.library  # noqa: F401
    except BackendError as error:
        raise ExportError(str(error)) from None
    if reading is None or reading.expected is None:
        whole = _fits_whole(source, bundle, manifest)
        text = Text(bundle, partial(read_text_file, bundle, manifest))
        target = manifest.target
        reading = SourceReading.of(source, text, target.vocab_size, target.context, target.eos_token_ids, head)
        if not whole:
            reading.expected, reading.checked = _read_by_layers(bundle, manifest, reading, report)
    else:
        check_memory(folder_bytes(bundle))
    expected, checked = reading.read()
    prompts = reading.prompts
    with _engine(bundle) as model:
        forced = [forced_logits(model, each.start, each.tokens) for each in expected]
        if not all(np.isfinite(rows).all() for rows in forced):
            raise _not_finite(manifest)
        tau = mean_tau(replay(model, prompts, drafts=True))
    same = np.concatenate([rows.argmax(-1) == each.tokens for rows, each in zip(forced, expected, strict=True)])
    kl = [divergence(log_softmax(each.logits), log_softmax(rows)) for rows, each in zip(forced, expected, strict=True)]
    certificate = Certificate(
        prompts=tuple(GoldenPrompt(tuple(each.start), tuple(each.tokens), _top(each.logits)) for each in expected),
        agreement=round(float(same.mean()), 6),
        kl=float(f"{np.concatenate(kl).mean():.4g}"),
        tau=round(tau, 4),
        limits=LIMITS[manifest.precision["target"]],
    )
    farthest = expected[int(np.argmax([rows.mean() for rows in kl]))]
    return Comparison(certificate, farthest, checked)


def _read_by_layers(
    bundle: Path, manifest: Manifest, reading: SourceReading, report: Callable[[str], None]
) -> tuple[list[Written], HeadCheck | None]:
    """What the reading asks, with the bundle and one layer of the source in the memory. The head is checked on it."""
    source, prompts, count, head = reading.source, reading.prompts, reading.count, reading.head
    family, not_finite = family_of(source), _not_finite(manifest)
    config = read_config(family, source)
    taps = set() if head is None else taps_of_readings(head.config, config)
    with _engine(bundle) as model:

        def draft(text: list[int], most: int) -> list[int]:
            if not np.isfinite(forced_logits(model, text, [0])).all():
                raise not_finite
            return list(
                model.generate(text, sampling=SamplingParams(), method="vanilla", max_new_tokens=most).token_ids
            )

        texts = verified_continuations(source, prompts, draft, manifest.target.eos_token_ids, count, taps, report)
    drafted = [text for text in texts if len(text.tokens) > 1]
    if head is None or not drafted:
        return texts, None
    report("checking the head")
    tokens = [token for text in texts for token in (*text.start, *text.tokens)]
    weights, embedding = weights_for_tokens(head, source, tokens, lm_head=True)
    return texts, compare_readings(head, family, config, weights, drafted, embedding)


@contextmanager
def _engine(bundle: Path) -> Iterator[EagleModel]:
    """The bundle, loaded. Raises ExportError for what its engine raises."""
    try:
        with EagleModel.load(bundle, backend="cpu", check_hashes=False) as model:
            yield model
    except ExportError:
        raise
    except Exception as error:  # engines raise a dozen kinds without a common base
        raise ExportError(f"the bundle does not run here ({type(error).__name__}: {first_line(error)})") from None


def _not_finite(manifest: Manifest) -> FidelityError:
    reason = f"in {manifest.precision['target']} the bundle's logits are not finite"
    return FidelityError(reason, [Advice("use a wider precision")])


def _top(logits: Float) -> tuple[TopTokens, ...]:
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
    values = np.take_along_axis(logits, best, -1)
    return tuple(
        TopTokens(tuple(ids), tuple(round(value, 4) for value in row))
        for ids, row in zip(best.tolist(), values.tolist(), strict=True)
    )


def _fits_whole(source: Checkpoint, bundle: Path, manifest: Manifest) -> bool:
    """Whether the memory holds the whole source. Raises ExportError if it holds neither that nor the bundle next to one
    layer of the source."""
    stored = folder_bytes(bundle)
    try:
        check_memory(max(4 * source.numbers, stored))  # the one is loaded after the other
        return True
    except ExportError:
        engine = 2 * stored if manifest.precision["target"] == "fp16" else stored  # ONNX Runtime widens fp16 on CPUs
        check_memory(engine + 4 * layer_numbers(source))
    return False
