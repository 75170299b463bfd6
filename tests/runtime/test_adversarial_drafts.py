"""Wrong drafts of every kind on the golden pair's real engines: no answer differs from vanilla's.

100,000 cases: pytest -m slow tests/runtime/test_adversarial_drafts.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ahead_writers import fitted_hydra, fitted_medusa, write_hydra, write_medusa
from conftest import GOLDEN, load_trace
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.core.engines import Engines
from insides import bundle_in, sessions_of
from studies.trials.adversarial import Campaign, Outcome, attack_bundle, main
from studies.trials.liars import LIES, AnyTree, Liar, LyingSession

CASES, KINDS = 100_000, ("deepspec", "dflash", "eagle1", "eagle3", "medusa", "hydra", "alone")
PRECISIONS = ("fp32", "int8", "int4")
SHARE = -(-CASES // (len(KINDS) * len(PRECISIONS)))


def texts() -> list[list[int]]:
    return [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]


@pytest.fixture(scope="module")
def any_bundle_of(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As bundle_of, also of Medusa's and Hydra's heads, which are fitted to the reference texts."""
    folder, target = tmp_path_factory.mktemp("ahead"), GOLDEN / "target"

    def bundle(kind: str, precision: str) -> Path:
        if kind not in ("medusa", "hydra"):
            return bundle_of(kind, precision)
        if kind == "medusa":
            head = write_medusa(folder / kind, fitted_medusa(target, texts(), 4))
        else:
            head = write_hydra(folder / kind, fitted_hydra(target, texts(), 4))
        export(target, head, folder / f"{kind}-{precision}", Settings(precision=precision, certify=False, record=False))
        return folder / f"{kind}-{precision}"

    return bundle


def check(outcome: Outcome, cases: int) -> None:
    """No failure, and no attack that attacked nothing; ties in fp32 alone, and few."""
    print(outcome)
    assert outcome.failures == 0 and outcome.cases >= cases
    assert outcome.ties <= (outcome.answers / 1000 if outcome.precision == "fp32" else 0)
    heads = [name for name in outcome.of if name.startswith(("eagle,", "draft-model,"))]
    assert all(sum(cases for cases, _ in outcome.of[name].values()) > 0 for name in ("any tree", "recycling", *heads))
    # Nothing that is always wrong is accepted, and what is left as it is, is.
    assert all(outcome.of[name].get("wrong", (0, 0))[1] == 0 for name in heads)
    assert sum(outcome.of[name].get("none", (0, 0))[1] for name in heads) > 0


@pytest.mark.parametrize(("kind", "precision"), [("deepspec", "fp32"), ("eagle3", "int8")])
def test_some_wrong_drafts(kind: str, precision: str, bundle_of: Callable[..., Path]) -> None:
    check(attack_bundle(bundle_of(kind, precision), 300, 24, threads=1, texts=texts()), 300)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_100_000_cases(kind: str, precision: str, any_bundle_of: Callable[..., Path]) -> None:
    check(attack_bundle(any_bundle_of(kind, precision), SHARE, threads=1, texts=texts()), SHARE)


def test_the_command_says_what_was_compared(bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundles = [str(bundle_of(kind)) for kind in ("alone", "eagle1")]
    assert main([*bundles, "--cases", "40", "--tokens", "4", "--threads", "1"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 and all(" 0 failures" in row for row in rows) and last.startswith("together: 0 failures in ")
    assert main([bundles[0], "--cases", "20", "--tokens", "4", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"] >= 20
    assert main([bundles[0], "--cases", "0"]) == 2


def test_another_answer_is_a_failure(bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Control: a target whose logits are other ones in every pass never answers twice the same, which is seen."""
    random = np.random.default_rng(0)
    with EagleModel.load(bundle_of("alone"), threads=1) as model:
        liar, unsteady = (Liar(model.manifest.target.vocab_size, random) for _ in range(2))
        unsteady.begin("random", np.arange(3))
        engines = Engines([LyingSession(sessions_of(model)[0], unsteady)])
        campaign = Campaign(replace(bundle_in(model), engines=engines).with_new_caches(), liar, random, texts())
        campaign.run(cases=40, new_tokens=8)
    assert 0 < campaign.failures <= campaign.answers and "DIFFERS" in capsys.readouterr().err


def test_lies_are_what_they_are_called() -> None:
    liar, wrong = Liar(50, np.random.default_rng(0)), np.array([7, 8, 9])
    ids, log_probs = np.arange(10).reshape(2, 5), np.log(np.full((2, 5), 0.2, np.float32))
    seen = {}
    for lie in LIES:
        liar.begin(lie, wrong)
        seen[lie] = liar.proposals(ids, log_probs)
    assert np.array_equal(seen["none"][0], ids) and np.array_equal(seen["none"][1], log_probs)
    assert len(np.unique(seen["constant"][0])) == 1
    assert not np.isfinite(seen["not numbers"][1]).all() and np.array_equal(seen["not numbers"][0], ids)
    assert ((seen["outside"][0] < 0) | (seen["outside"][0] >= 50)).any()
    assert set(seen["wrong"][0].flat) == {7, 8, 9} and (seen["wrong"][1] > -1e-5).all()
    assert not np.array_equal(seen["random"][0], ids)
    liar.begin("mixed", wrong)
    passes = {liar.proposals(ids, log_probs)[0].tobytes() for _ in range(40)}
    assert ids.tobytes() in passes and len(passes) > 3
    tree = AnyTree(liar, [3, 4], 0, np.random.default_rng(1)).grow([1, 2], 6)
    assert tree.tokens[0] == 2 and 1 <= tree.num_nodes - 1 <= 5 and (tree.parents < np.arange(tree.num_nodes)).all()
