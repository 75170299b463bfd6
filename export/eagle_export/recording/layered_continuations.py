"""A source's greedy continuations where it does not fit into the memory: its bundle drafts them, and the source, run
layer by layer (layered.py), verifies what was drafted.

One run of the layers reads all weights from the disk, and gives the source's token after every token of all texts. The
source's own are those up to and with the first that was drafted otherwise; the bundle drafts again from there, as in
greedy speculative decoding. A bundle that follows its source closely takes two or three runs.

Shapes: T tokens of a text, H hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.recording.continuations import check_finite, run_errors
from eagle_export.recording.layered import LayeredModel
from eagle_export.recording.source_text import Written

Draft = Callable[[list[int], int], list[int]]  # a text, the most tokens -> greedy tokens after it, one or more


def verified_continuations(
    source: Checkpoint,
    prompts: Sequence[Sequence[int]],
    draft: Draft,
    eos: Collection[int],
    most: int,
    taps: Collection[int] = (),
    report: Callable[[str], None] = lambda step: None,
) -> list[Written]:
    """Returns the source's greedy tokens after each prompt, with their logits: at most `most`, up to the first eos,
    included.

    draft: the bundle's tokens. taps: hidden states to keep beside the last. report: called with what is being done.
    Raises ExportError if transformers cannot run the source or its logits are not finite."""
    texts = [Written(list(prompt), []) for prompt in prompts]
    run = 0

    def goes_on(text: Written) -> bool:
        return len(text.tokens) < most and not (text.tokens and text.tokens[-1] in eos)

    while rest := [text for text in texts if goes_on(text)]:
        run += 1
        report(f"comparing with the source (run {run}, the bundle drafts)")
        drafts = [draft([*text.start, *text.tokens], most - len(text.tokens)) for text in rest]
        with run_errors(source, " layer by layer", OSError):
            verified = iter(_verify(source, rest, drafts, eos, taps, run, report))
        texts = [next(verified) if goes_on(text) else text for text in texts]
    return texts


@torch.inference_mode()
def _verify(
    source: Checkpoint,
    texts: Sequence[Written],
    drafts: Sequence[Sequence[int]],
    eos: Collection[int],
    taps: Collection[int],
    run: int,
    report: Callable[[str], None],
) -> list[Written]:
    """Returns the texts with the tokens that one run of the source adds, the run of this number."""
    model = LayeredModel(
        source, [[*text.start, *text.tokens, *new[:-1]] for text, new in zip(texts, drafts, strict=True)]
    )
    states: list[dict[int, Tensor]] = [{} for _ in texts]
    while True:
        if model.next in taps:
            for number, hidden in enumerate(model.hidden):
                states[number][model.next] = hidden
        if model.next == len(model.layers):
            break
        report(f"comparing with the source (run {run}, layer {model.next + 1} of {len(model.layers)})")
        for _ in model.run_layer():
            pass
    for number, kept in enumerate(states):
        kept[-1] = model.last_hidden(number)
    ends = torch.cat([kept[-1][0, -len(new) :] for kept, new in zip(states, drafts, strict=True)])
    logits = model.logits(ends).float().numpy()
    check_finite(source, logits)
    verified = []
    for text, new, kept in zip(texts, drafts, states, strict=True):
        own, logits = logits[: len(new)], logits[len(new) :]
        wanted = own.argmax(-1).tolist()
        last = (place for place in range(len(new)) if wanted[place] != new[place] or wanted[place] in eos)
        right = next(last, len(new) - 1) + 1
        tokens, rows = [*text.tokens, *wanted[:right]], np.append(text.logits, own[:right]).reshape(-1, own.shape[1])
        length = len(text.start) + len(tokens) - 1
        verified.append(Written(text.start, tokens, rows, {tap: hidden[:, :length] for tap, hidden in kept.items()}))
    return verified
