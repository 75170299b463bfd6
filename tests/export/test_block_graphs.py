"""Published block heads from folder to tokens: the graphs draft what the producers' own modules do, exports of all
precisions are certified, and speculative tokens are those of vanilla decoding.

All of them: pytest -m slow tests/export/test_block_graphs.py"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block_writers import RECORDED, deepspec, dflash, eagle_train, jetspec, speculators_dspark
from conftest import BLOCKS, GOLDEN
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.drafting.block_head import BlockHead
from head_writers import TARGET, Head
from insides import bundle_in

ROOTS = (10, 14, 31)  # of the recordings


@pytest.mark.parametrize(
    ("recorded", "write"),
    [
        ("dspark", deepspec),
        pytest.param("dflash", dflash, marks=pytest.mark.slow),
        pytest.param("jetspec", jetspec, marks=pytest.mark.slow),
        pytest.param("dspark", speculators_dspark, marks=pytest.mark.slow),
    ],
)
def test_the_graphs_draft_what_the_producers_module_drafts(
    recorded: str, write: Callable[[], Head], bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    if write.__name__ in BLOCKS:
        bundle = bundle_of(write.__name__)
    else:
        bundle = tmp_path / "bundle"
        export(TARGET, write().write(tmp_path / "head"), bundle, Settings(certify=False))
    tokens, logits = RECORDED["tokens"][0].tolist(), RECORDED[f"{recorded}.logits"]
    with EagleModel.load(bundle, threads=1) as model:
        head, spec = bundle_in(model).head, model.manifest.head
        assert isinstance(head, BlockHead) and spec is not None and spec.block is not None
        # Reduced vocabularies have a share of the logits.
        kept = list(range(256)) if spec.draft_vocab_size == 256 else list(range(0, 220, 5))
        for block, root in enumerate(ROOTS):
            head.truncate(0)
            _, features = bundle_in(model).target.prefill(tokens[:root])
            head.note(features)
            proposal = head.catch_up(tokens[: root + 1])
            scores = logits[block, :, kept].log_softmax(-1).numpy()
            # With transitions the next positions are drafted given the module's own tokens among their candidates.
            for depth in range(1 if spec.block.transitions else len(scores)):
                drafted = proposal.tokens[0].tolist()
                theirs = scores[depth, [kept.index(token) for token in drafted]]
                np.testing.assert_allclose(proposal.log_probs[0], theirs, atol=1e-4)
                assert theirs[0] == scores[depth].max()
                proposal = head.feed(
                    np.array(drafted[:1]), proposal.hidden, np.array([depth - 1]), committed=0, depth=depth
                )


PUBLISHED = [(write, precision) for write in (deepspec, eagle_train) for precision in ("int8", "fp32", "int4")]


@pytest.mark.parametrize(
    ("write", "precision"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one is not PUBLISHED[0] else []) for one in PUBLISHED],
    ids=[f"{write.__name__}-{precision}" for write, precision in PUBLISHED],
)
def test_a_published_head_is_certified_and_lossless(write: Callable[[], Head], precision: str, tmp_path: Path) -> None:
    target = Path(shutil.copytree(TARGET, tmp_path / "target"))
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", target / "tokenizer.json")
    export(target, write().write(tmp_path / "head"), tmp_path / "bundle", Settings(precision=precision))
    with EagleModel.load(tmp_path / "bundle", threads=1) as model:
        certificate, prompt = model.manifest.certificate, RECORDED["tokens"][0, :12].tolist()
        assert certificate is not None and certificate.agreement > 0.5
        for temperature in (0, 0.7, 1):
            settings: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_new_tokens": 32}
            vanilla = model.generate(prompt, method="vanilla", **settings).token_ids
            for tree in ("dynamic", "chain", "cost-aware"):
                drafted = model.generate(prompt, method="eagle", tree=tree, **settings)
                assert drafted.token_ids == vanilla, (temperature, tree)
