"""Whether a head is read as it was trained: how often its first drafted token is the target's own next one.

A head that reads the wrong taps, or lacks a norm or a bias, still drafts: the text stays right, and nothing but its
speed tells. So the head is run eagerly, on the source's hidden states, over text that the source itself generated.
Other ways to read the same folder are tried too: configs leave open which layers the taps are, whether the residual is
normalised, the base of the rotation, in which order a multi-token-prediction layer reads its two inputs, whether a
block head drafts from the root's row, and whether its rows see later ones.

Shapes: T tokens of a text, H width of the target, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_export.graphs.eager import Hidden, TokenRows, eager_head, features_of, read_block_rows, read_rows
from eagle_export.graphs.head_modules import AnyHead
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS
from eagle_export.reading.families.family import Family
from eagle_export.recording.source_text import Written

LEAST = 0.4  # share of first tokens below which a head is not worth its time, and probably misread
NAMED = 0.2  # least share of another reading that is named: of a head of another target all readings are wrong
GAIN, ERRORS = 0.02, 3.0  # nats per token, and standard errors of them, by which another reading must fit better
STARTS, START = 16, 8  # texts that the target continues, and tokens that each starts with
TOKENS = 48  # greedy tokens of each
TEXTS = 4  # that a head reads at once: more take memory for their logits
MOST = 4096  # tokens of the package's text that starts are taken from
CONFIG = "config.json does not say how the head was trained; correct it"
NAMES = "the file is not written as {} writes its own; convert it again"


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to read a head's folder. words: how it differs from how it was read. share: of the first drafted tokens
    that are right with it. gain: nats per token by which the target's tokens are likelier than as it was read. errors:
    the gain in its standard errors. why: what is wrong, and what to do."""

    words: str
    share: float
    gain: float
    errors: float
    why: str = CONFIG

    @property
    def clearly_better(self) -> bool:
        """Whether chance does not explain that the head fits better with it."""
        return self.gain >= GAIN and self.errors >= ERRORS


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """share: of first drafted tokens that are right, as the folder was read. best: the other reading that fits best,
    None if there are none. rows: drafted tokens."""

    share: float
    best: Reading | None
    rows: int

    def warning(self) -> str | None:
        """Returns what is wrong, in a sentence; None for a head that drafts as it should."""
        best = self.best
        better = best if best is not None and best.clearly_better and best.share >= max(self.share, NAMED) else None
        if self.share >= LEAST and better is None:
            return None
        text = f"{self.share:.0%} of the head's first drafted tokens are the target's own (of {self.rows})"
        if better is not None:
            gain = f"{better.share:.0%}, and each token is e^{better.gain:.2f} times as likely, with {better.words}"
            return f"{text}, but {gain}: {better.why}"
        tried = "" if self.best is None else ", and no other reading of its config.json fits better"
        return f"only {text}{tried}: it was trained for another target, or too little, and hardly speeds it up"


@torch.inference_mode()
def compare_readings(
    part: HeadPart,
    family: Family,
    target: Any,
    weights: Mapping[str, Tensor],
    texts: Iterable[Written],
    embedding: TokenRows | None = None,
) -> HeadCheck:
    """Returns the share of first drafted tokens that are the target's own, and what other readings of the folder would
    change. part: the head of a pair. family, target: of its target, and the target's config. texts: one or more of the
    target, with its hidden states; no head drafts the first token of one. The others: as for eager_head."""
    readings = [("", part.config), *_other_readings(part.config, target)]
    heads = [(eager_head(config, weights, embedding), config) for _, config in readings]
    rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in readings]
    scaled = partial(family.logits, target) if part.config.borrows_lm_head else None
    taps = {-1, *taps_of_readings(part.config, target)}
    for batch, hidden in _batches(texts, taps, 1 if isinstance(heads[0][0], BlockHead) else TEXTS):
        for results, (head, config) in zip(rows, heads, strict=True):
            results.append(_drafted(head, part, config, scaled, batch, hidden))
    right = [torch.cat([right for right, _ in results]).double() for results in rows]
    likely = [torch.cat([likely for _, likely in results]).double() for results in rows]
    if not len(right[0]):
        return HeadCheck(1.0, None, 0)
    known = likely[0].isfinite()  # tokens outside the draft vocabulary are impossible with every reading
    others = []
    for index, (words, _) in enumerate(readings[1:], 1):
        gains = (likely[index] - likely[0])[known]
        error = float(gains.std()) / len(gains) ** 0.5 if len(gains) > 1 else math.inf
        gain = float(gains.mean()) if len(gains) else 0.0
        named = readings[index][1].hidden_first == part.config.hidden_first  # else the layout decides, and no config
        why = CONFIG if named else NAMES.format(part.layout.producer)
        others.append(Reading(words, float(right[index].mean()), gain, gain / max(error, 1e-12), why))
    return HeadCheck(float(right[0].mean()), max(others, key=lambda one: one.gain, default=None), len(right[0]))


def _batches(texts: Iterable[Written], taps: Collection[int], most: int) -> Iterator[tuple[list[Written], Hidden]]:
    """Yields at most `most` texts of one length, and the hidden states at the taps [B, T, H]."""
    same: dict[tuple[int, int], list[Written]] = {}
    for text in texts:
        same.setdefault((len(text.start), len(text.tokens)), []).append(text)
    for each in same.values():
        for first in range(0, len(each), most):
            batch = each[first : first + most]
            yield batch, {tap: torch.cat([text.hidden[tap] for text in batch]) for tap in taps}


def _drafted(
    head: AnyHead,
    part: HeadPart,
    config: HeadConfig,
    scaled: Callable[[Tensor], Tensor] | None,
    texts: Sequence[Written],
    hidden: Hidden,
) -> tuple[Tensor, Tensor]:
    """scaled: what the target makes of the output of its LM head, if the head borrows that. texts: of one length, one
    alone for a block head. hidden: the target's hidden states [B, T, H], the embedding first and the last one after the
    last norm. Returns per generated token but the first, which no head drafts, whether the head drafts it, and its
    log-probability by the head (-inf outside the draft vocabulary)."""
    tokens = torch.tensor([[*text.start, *text.tokens] for text in texts])
    first, length = len(texts[0].start) - 1, tokens.shape[1]
    if isinstance(head, BlockHead):
        roots = torch.arange(first + 1, length - 1)
        logits = read_block_rows(head, config, tokens[0], hidden, roots, scaled)[:, 0]
    elif isinstance(head, HeadsAhead):
        logits = head.forced(0, hidden[-1], tokens)[:, first:-1]
    else:  # row i reads feature i and token i + 1, and drafts token i + 2
        features = features_of(head, config.taps, hidden)[:, : length - 2]
        logits = head.logits(read_rows(head, config, tokens[:, 1:-1], features)[:, first:])
    if scaled is not None and not isinstance(head, BlockHead):
        logits = scaled(logits)
    scores, wanted = logits.flatten(0, -2).log_softmax(-1), tokens[:, first + 2 :].flatten()
    best, places = scores.argmax(-1), wanted
    if part.d2t is not None:
        ids = part.d2t + torch.arange(len(part.d2t))
        place_of = torch.full((config.vocab_size,), -1).index_copy(0, ids, torch.arange(len(ids)))
        best, places = ids[best], place_of[wanted]
    likely = scores.gather(1, places.clamp(min=0)[:, None])[:, 0]
    return best == wanted, likely.masked_fill(places < 0, -math.inf)


def taps_of_readings(config: HeadConfig, target: Any) -> set[int]:
    """The hidden states that compare_readings asks for but for the last one. target: the target's config."""
    return {tap for each in (config, *(other for _, other in _other_readings(config, target))) for tap in each.taps}


def _other_readings(config: HeadConfig, target: Any) -> Iterator[tuple[str, HeadConfig]]:
    """Other ways to read the same folder, in words that follow a share."""
    for words, step in (("later", 1), ("earlier", -1)):
        taps = tuple(tap + step for tap in config.taps)
        if taps and taps[0] > 0 and taps[-1] < int(target.num_hidden_layers):
            layers = [tap - 1 for tap in taps]
            yield f"its taps one layer {words} (the outputs of layers {layers})", replace(config, taps=taps)
    yield from KINDS[config.kind].other_readings(config)
    if config.ahead is not None:
        return
    rope = config.rope["rope_parameters"]
    theirs = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")  # None if there is more than one
    known = {10000.0, float(theirs)} if isinstance(theirs, int | float) else {10000.0}
    for theta in sorted(known - {rope["rope_theta"]}):
        other_rope = {**config.rope, "rope_parameters": {**rope, "rope_theta": theta}}
        yield f"rope_theta {theta:g}", replace(config, rope=other_rope)
