"""A bundle's certificate: what the source model says on a few prompts, and how closely the finished bundle follows.

The source is the checkpoint itself, run by transformers on the CPU in fp32: other code than the graphs were traced
from, so that an error of the export shows. Shapes: n tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from eagle_export.blame import ROWS, Layer, LayerError, worst_layers
from eagle_export.checkpoint import Checkpoint
from eagle_export.errors import ExportError
from eagle_export.gate import LIMITS, Demand, FidelityError, refusal
from eagle_export.trace import quiet
from eagle_runtime import BackendError, EagleError, EagleModel
from eagle_runtime.bundle.fidelity import shortfall
from eagle_runtime.bundle.manifest import Certificate, GoldenPrompt, Manifest, TopTokens, read_text_file
from eagle_runtime.replay import GOLDEN_TOKENS, forced_logits, golden_prompts, mean_tau, replay
from eagle_runtime.scoring import divergence, log_softmax
from eagle_runtime.text.tokenizer import Text
from eagle_runtime.tree import Float

TOP = 5  # tokens stored of each row
MEMORY_MARGIN = 1.25  # beside the weights: activations, and what an engine packs anew


@dataclass(frozen=True, slots=True)
class Continuation:
    """The source's greedy words after a prompt. logits [n, V]: the rows that chose them."""

    prompt: list[int]
    tokens: list[int]
    logits: Float


@dataclass(frozen=True, slots=True)
class Compared:
    """A certificate, and the continuation that the bundle is furthest from."""

    certificate: Certificate
    farthest: Continuation


def certified(
    source: Checkpoint,
    bundle: Path,
    manifest: Manifest,
    layers: Sequence[Layer],
    demand: Demand,
    tell: Callable[[str], None],
) -> tuple[Manifest, list[str]]:
    """The manifest of a bundle, with a certificate if one can be made, and what to warn of.

    layers: of the target's graph before it was changed. tell: called with what is being done. Raises FidelityError for
    a bundle that does not reach what is demanded, and ExportError where that is asked for but cannot be compared."""
    tell("comparing with the source")
    try:
        compared = compare_with_source(source, bundle, manifest)
    except FidelityError:
        raise
    except ExportError as error:
        if demand.asked:
            raise ExportError(f"the bundle cannot be held to an agreement or a KL: {error}") from None
        return manifest, [f"the bundle has no certificate: {error}"]
    certificate = compared.certificate
    if not demand.wanted.met(certificate.agreement, certificate.kl):
        raise FidelityError(refusal(certificate, demand, _blamed(bundle, manifest, layers, compared.farthest, tell)))
    manifest = replace(manifest, certificate=certificate)
    said = shortfall(manifest)
    return manifest, [] if said is None else [f"the bundle is marked: {said}"]


def _blamed(
    bundle: Path, manifest: Manifest, layers: Sequence[Layer], said: Continuation, tell: Callable[[str], None]
) -> list[LayerError]:
    """The worst layers over the first rows of a continuation; none if this machine cannot tell."""
    count = min(ROWS, len(said.tokens))
    tokens, graph = [*said.prompt, *said.tokens[: count - 1]], manifest.target.graph

    def told(done: int, steps: int) -> None:
        tell(f"looking for the worst layers ({done} of {steps})")

    try:
        return worst_layers(bundle / graph.file, graph, layers, tokens, said.logits[:count], told)
    except (EagleError, MemoryError):
        return []


def make_certificate(source: Checkpoint, bundle: Path, manifest: Manifest) -> Certificate:
    """What compare_with_source finds, in short."""
    return compare_with_source(source, bundle, manifest).certificate


def compare_with_source(source: Checkpoint, bundle: Path, manifest: Manifest) -> Compared:
    """Run the source, then the bundle, on the golden prompts. bundle: complete but for the certificate.

    Raises ExportError, saying why in one sentence, if this machine cannot do either; FidelityError if the bundle's
    logits are not finite."""
    _check_engine()
    _check_memory(source, bundle)
    target = manifest.target
    prompts = golden_prompts(Text(bundle, partial(read_text_file, bundle, manifest)), target.vocab_size, target.context)
    count = min(GOLDEN_TOKENS, target.context - max(map(len, prompts)))
    if count < 1:
        raise ExportError(f"a context of {target.context} tokens has no room for a prompt and a continuation")
    said = continuations(source.folder, prompts, target.eos_token_ids, count)
    try:
        with EagleModel.load(bundle, backend="cpu", check_hashes=False) as model:
            forced = [forced_logits(model, each.prompt, each.tokens) for each in said]
            finite = all(np.isfinite(rows).all() for rows in forced)
            tau = mean_tau(replay(model, prompts, drafts=True)) if finite else 1.0
    except Exception as error:  # engines raise a dozen kinds without a common base
        raise ExportError(f"the bundle does not run here ({_first_line(error)})") from None
    if not finite:
        raise FidelityError(
            f"in {manifest.precision['target']} the bundle's logits are not finite; use a wider --precision"
        )
    same = np.concatenate([rows.argmax(-1) == each.tokens for rows, each in zip(forced, said, strict=True)])
    kl = [divergence(log_softmax(each.logits), log_softmax(rows)) for rows, each in zip(forced, said, strict=True)]
    certificate = Certificate(
        prompts=tuple(GoldenPrompt(tuple(each.prompt), tuple(each.tokens), _top(each.logits)) for each in said),
        agreement=round(float(same.mean()), 6),
        kl=float(f"{np.concatenate(kl).mean():.4g}"),
        tau=round(tau, 4),
        limits=LIMITS[manifest.precision["target"]],
    )
    return Compared(certificate, said[int(np.argmax([rows.mean() for rows in kl]))])


def continuations(
    folder: Path, prompts: Sequence[Sequence[int]], eos: Collection[int], count: int
) -> list[Continuation]:
    """At most `count` tokens after each prompt, the first eos included, by the checkpoint in `folder`; it is freed
    again. Raises ExportError if transformers cannot run it or its logits are not finite."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            model = cast(Any, LlamaForCausalLM).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
            )
        said = [_continue(model.eval(), prompt, eos, count) for prompt in prompts]
    except Exception as error:  # transformers, safetensors and a full memory raise many kinds
        raise ExportError(f"transformers does not run {folder} ({_first_line(error)})") from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if not all(np.isfinite(each.logits).all() for each in said):
        raise ExportError(f"the logits of {folder} are not finite")
    return said


@torch.inference_mode()
def _continue(model: Any, prompt: Sequence[int], eos: Collection[int], count: int) -> Continuation:
    rows: list[Float] = []
    tokens: list[int] = []
    cache, new = None, list(prompt)
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        out = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float().numpy())
        tokens.append(int(rows[-1].argmax()))
        new = tokens[-1:]
    return Continuation(list(prompt), tokens, np.stack(rows))


def _top(logits: Float) -> tuple[TopTokens, ...]:
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
    values = np.take_along_axis(logits, best, -1)
    return tuple(
        TopTokens(tuple(ids), tuple(round(value, 4) for value in row))
        for ids, row in zip(best.tolist(), values.tolist(), strict=True)
    )


def _check_engine() -> None:
    try:
        import eagle_runtime.session.ort.library  # noqa: F401
    except BackendError as error:
        raise ExportError(str(error)) from None


def _check_memory(source: Checkpoint, bundle: Path) -> None:
    """Source and engine are loaded one after the other; a machine that runs out of memory would kill the export."""
    numbers = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
    stored = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    needed, free = int(MEMORY_MARGIN * max(4 * numbers, stored)), free_memory()
    if free is not None and needed > free:
        raise ExportError(f"comparing takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free")


def free_memory() -> int | None:
    """Bytes that can still be used: what Linux calls available, elsewhere all that is built in; None if not told."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no words'}"
