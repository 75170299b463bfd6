"""The check of block heads: on a text that is what a head drafts, the head passes as it was made, and each way to
misread its folder is noticed and named.

All of them: pytest -m slow tests/export/test_block_check.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_writers import changed, deepspec, dflash
from eagle_export.graphs.eager import eager_head, eager_weights
from eagle_export.graphs.pair import open_pair
from eagle_export.heads.block import BlockHead, read_blocks
from eagle_export.reading.families.source import load_source
from eagle_export.recording.source_text import Written
from greedy_texts import check_head
from head_writers import TARGET, Head

STARTS = torch.tensor([[5, 40 + 9 * text, 70 + text] for text in range(8)])
TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return load_source(TARGET)


@torch.inference_mode()
def drafted_texts(folder: Path, model: Any) -> list[Written]:
    """Texts in which every token is the one that the head drafts first, greedily."""
    part = open_pair(TARGET, folder).head
    assert part is not None and part.config.block is not None
    head, row = eager_head(part.config, eager_weights(part, model)), 0 if part.config.block.anchor else 1
    assert isinstance(head, BlockHead)
    ids = STARTS
    for _ in range(TOKENS):
        states: tuple[Tensor, ...] = model(input_ids=ids, output_hidden_states=True).hidden_states
        roots = ids.new_full((len(ids), 1), ids.shape[1] - 1)
        hidden = read_blocks(head, part.config, ids, [states[tap] for tap in part.config.taps], states[-1], roots)
        logits = head.logits(hidden[:, 0, row])
        if head.markov_head is not None:
            logits = logits + head.markov_head(ids[:, -1])
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return [Written(text[:3], text[3:]) for text in ids.tolist()]


def ids_of(*layers: int) -> Callable[[], Head]:
    return lambda: changed(deepspec(), target_layer_ids=list(layers))


MISREAD: dict[str, tuple[Callable[[], Head], Callable[[], Head], str]] = {  # as trained, as written, what is named
    "taps too early": (ids_of(1, 3, 6), ids_of(0, 2, 5), "its taps one layer later (the outputs of layers [1, 3, 6])"),
    "taps too late": (ids_of(0, 2, 5), ids_of(1, 3, 6), "its taps one layer earlier (the outputs of layers [0, 2, 5])"),
    "no anchor": (deepspec, lambda: changed(deepspec(), sample_from_anchor=False), "sample_from_anchor true"),
    "an anchor": (dflash, lambda: changed(dflash(), sample_from_anchor=True), "sample_from_anchor false"),
    "causal": (dflash, lambda: changed(dflash(), causal=True), "causal false"),
}


QUICK = ("taps too early", "no anchor")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MISREAD]


@pytest.mark.parametrize("name", CASES)
def test_a_misread_block_head_is_noticed_and_named(name: str, tmp_path: Path, model: Any) -> None:
    trained, written, words = MISREAD[name]
    right, wrong = trained().write(tmp_path / "right"), written().write(tmp_path / "wrong")
    texts = drafted_texts(right, model)
    parts = [open_pair(TARGET, folder).head for folder in (right, wrong)]
    assert parts[0] is not None and parts[1] is not None
    passed, failed = check_head(parts[0], model, texts), check_head(parts[1], model, texts)
    assert passed.share == 1.0
    assert passed.rows == len(texts) * (TOKENS - 1)
    assert passed.warning() is None
    assert failed.share < passed.share
    warning = failed.warning()
    assert warning is not None and words in warning and warning.startswith(f"{failed.share:.0%} of the head's first")


def test_a_text_of_one_token_has_nothing_to_check(tmp_path: Path, model: Any) -> None:
    part = open_pair(TARGET, deepspec().write(tmp_path / "head")).head
    assert part is not None
    check = check_head(part, model, [Written([5, 6], [1])])
    assert (check.rows, check.warning()) == (0, None)
