"""What heads are trained on: the unrolled head against the reference fixture and against one path at a time, losses and
acceptance counts against plain loops over rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN, load_trace
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.config import TrainConfig
from eagle_train.losses import masked_mean, shared, soft_cross_entropy
from eagle_train.metrics import Tally, simulated_tau
from eagle_train.objective import Vocabulary, eagle1_objective, eagle3_objective, measure
from eagle_train.taught import Batch, Taught, WholeLogits
from eagle_train.ttt import unroll
from tiny_heads import golden_head, one_path, tiny


def test_unroll_equals_reference_fixture() -> None:
    fixture = load_file(GOLDEN / "eagle3_ttt.fixture.safetensors")
    head, config = golden_head(GOLDEN / "head_eagle3_dv44")
    with torch.no_grad():
        features = head.fc(fixture["target_taps"][None])
        steps = list(unroll(head, config, features, fixture["input_ids"][None], 4))
        for hidden, wanted, logits, valid in zip(
            steps, fixture["ttt_hidden"], fixture["ttt_logits"], fixture["ttt_valid"], strict=True
        ):
            torch.testing.assert_close(hidden[0][valid], wanted[valid], rtol=0, atol=1e-4)
            torch.testing.assert_close(head.logits(hidden)[0][valid], logits[valid], rtol=0, atol=1e-4)


def test_losses_and_accuracies_equal_reference_figures() -> None:
    fixture = load_file(GOLDEN / "eagle3_ttt.fixture.safetensors")
    offsets = load_file(GOLDEN / "head_eagle3_dv44" / "model.safetensors")["d2t"]
    kept = offsets + torch.arange(len(offsets))
    best, teacher = fixture["target_logits"].argmax(-1), fixture["target_logits"][..., kept].softmax(-1)
    for row in load_trace("eagle3_ttt")["per_step"]:
        step, count = row["step"], row["rows"]
        logits = fixture["ttt_logits"][step, :count]
        reachable = torch.isin(best, kept)[1 + step :]
        losses = soft_cross_entropy(logits, teacher[1 + step :])
        assert int(reachable.sum()) == row["masked_rows"]
        assert float(losses[reachable].sum()) == pytest.approx(row["sum_masked_ce"], rel=1e-5)
        right = kept[logits.argmax(-1)] == best[1 + step :]
        assert int((right & reachable).sum()) == row["acc_masked"]


@pytest.mark.parametrize("offset", [1, 0])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_unroll_equals_path_by_path(kind: HeadKind, offset: int) -> None:
    head, config = tiny(kind)
    torch.manual_seed(6)
    length, steps = 9, 4
    features, ids = torch.randn(2, length, 24), torch.randint(0, 11, (2, length))
    with torch.no_grad():
        for step, hidden in enumerate(unroll(head, config, features, ids, steps, offset=offset)):
            for text in range(2):
                for row in range(length - 1 - step):
                    wanted = one_path(head, features[text], ids[text], row, step, offset)
                    torch.testing.assert_close(hidden[text, row], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_gradients_flow_through_all_steps_as_path_by_path(kind: HeadKind) -> None:
    head, config = tiny(kind)
    torch.manual_seed(7)
    features, ids = torch.randn(1, 6, 24), torch.randint(0, 11, (1, 6))
    last = list(unroll(head, config, features, ids, 3))[-1]
    weights = [p for name, p in head.named_parameters() if "self_attn" in name or "mlp" in name]
    got = torch.autograd.grad(last[0, :3].square().sum(), weights)
    rows = torch.stack([one_path(head, features[0], ids[0], row, 2, 1) for row in range(3)])
    wanted = torch.autograd.grad(rows.square().sum(), weights)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_later_tokens_and_padding_change_nothing_before_them() -> None:
    head, config = tiny("eagle3")
    torch.manual_seed(9)
    features, ids = torch.randn(1, 8, 24), torch.randint(0, 11, (1, 8))
    with torch.no_grad():
        whole = [h[:, :3] for h in unroll(head, config, features, ids, 2)]
        cut = [h[:, :3] for h in unroll(head, config, features[:, :5], ids[:, :5], 2)]
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def by_hand_eagle1(x: Tensor, f: Tensor, logits: Tensor, teacher: Tensor, mask: Tensor, weight: float = 0.1) -> float:
    total, count = 0.0, 0
    for row in range(len(x)):
        if not mask[row]:
            continue
        count += 1
        regression = 0.0
        for a, b in zip(x[row].tolist(), f[row].tolist(), strict=True):
            gap = abs(a - b)
            regression += 0.5 * gap * gap if gap < 1 else gap - 0.5
        scale = math.log(sum(math.exp(z) for z in logits[row].tolist()))
        entropy = sum(p * (scale - z) for p, z in zip(teacher[row].tolist(), logits[row].tolist(), strict=True))
        total += regression / x.shape[1] + weight * entropy
    return total / max(1, count)


def random_batch(seed: int, width: int) -> tuple[Batch, Taught, Tensor]:
    """Returns a batch, what is taught, and the target's logits [B, T, V] in it."""
    torch.manual_seed(seed)
    ids, mask = torch.randint(0, 11, (2, 8)), torch.rand(2, 8) < 0.7
    logits = torch.randn(2, 8, 11) * 2
    return Batch(ids, mask), Taught(torch.randn(2, 8, width), WholeLogits(logits)), logits


def test_eagle1_rows_are_paired_as_in_decoding() -> None:
    """Row i: feature i and token i + 1 in, taught by feature i + 1, counted if token i + 2 carries loss."""
    head, config = tiny("eagle1")
    batch, taught, target_logits = random_batch(1, 24)
    noise = torch.randn(2, 8, 24) * 0.05
    tally = Tally(1, torch.device("cpu"))
    assert isinstance(head, Eagle1Head)
    loss, _ = eagle1_objective(head, config, batch, taught, noise, TrainConfig("eagle1", steps=1), tally)
    losses, right = [], []
    with torch.no_grad():
        (hidden,) = unroll(head, config, taught.features + noise, batch.ids, 1)
        logits = head.logits(hidden)
    for text in range(2):
        for row in range(6):
            if batch.loss_mask[text, row + 2]:
                teacher = target_logits[text, row + 1].softmax(-1)
                one = (hidden[text, row : row + 1], taught.features[text, row + 1 : row + 2])
                losses.append(
                    by_hand_eagle1(*one, logits[text, row : row + 1], teacher[None], torch.ones(1, dtype=torch.bool))
                )
                right.append(int(logits[text, row].argmax()) == int(target_logits[text, row + 1].argmax()))
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert tally.read().accuracy[0] == pytest.approx(sum(right) / len(right))


def test_eagle3_loss_and_counts_equal_a_loop() -> None:
    head, config = tiny("eagle3")
    batch, taught, target_logits = random_batch(2, 24)
    kept = torch.tensor([0, 2, 3, 5, 7, 8, 10])
    vocabulary = Vocabulary(kept, torch.isin(torch.arange(11), kept))
    assert isinstance(head, Eagle3Head)
    settings_ = TrainConfig("eagle3", steps=1, ttt_steps=3)
    device = torch.device("cpu")
    trained, measured = Tally(3, device), Tally(3, device)
    loss, parts = eagle3_objective(head, config, batch, taught, vocabulary, settings_, trained)
    measure(head, config, batch, taught, vocabulary, settings_, measured)
    with torch.no_grad():
        states = list(unroll(head, config, taught.features, batch.ids, 3))
    wanted, accuracy, alphas = 0.0, [], []
    alive = {(text, row) for text in range(2) for row in range(7)}
    for step, hidden in enumerate(states):
        losses, right, reached = [], {}, []
        for text in range(2):
            for row in range(8 - 1 - step):
                predicted = row + 2 + step
                if predicted >= 8 or not batch.loss_mask[text, predicted]:
                    continue
                z, q = target_logits[text, row + 1 + step], head.logits(hidden[text, row]).detach()
                best = int(z.argmax())
                right[text, row] = int(kept[q.argmax()]) == best
                reached += [right[text, row]] if (text, row) in alive else []
                if best in kept:
                    p = z[kept].softmax(-1)
                    entropy, shared = -(p * q.log_softmax(-1)).sum(), torch.minimum(p, q.softmax(-1)).sum()
                    losses.append(float(0.3 * entropy + 0.7 * (1 - shared)))
        mean = sum(losses) / len(losses)
        assert float(parts[f"step{step}"]) == pytest.approx(mean, rel=1e-4)
        wanted += 0.8**step * mean
        accuracy.append(sum(right.values()) / len(right))
        alphas.append(sum(reached) / len(reached) if reached else 0.0)
        alive = {at for at in alive if right.get(at)}
    assert loss.item() == pytest.approx(wanted, rel=1e-4)
    for acceptance in (trained.read(), measured.read()):
        assert acceptance.accuracy == pytest.approx(accuracy)
        assert acceptance.n_alpha == pytest.approx(alphas)


def test_loss_mask_moves_with_the_tokens() -> None:
    mask = torch.tensor([[False, False, False, True, True, False, True]])
    batch = Batch(torch.zeros(1, 7, dtype=torch.int64), mask)
    assert batch.counted(0).tolist() == [[False, True, True, False, True, False]]  # rows predict tokens 2..6 and 7
    assert batch.counted(2).tolist() == [[True, False, True, False]]


def test_short_texts_leave_later_steps_out() -> None:
    head, config = tiny("eagle3")
    assert isinstance(head, Eagle3Head)
    batch = Batch(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool))
    taught = Taught(torch.randn(1, 3, 24), WholeLogits(torch.randn(1, 3, 11)))
    kept = torch.arange(7)
    vocabulary = Vocabulary(kept, torch.arange(11) < 7)
    tally = Tally(7, torch.device("cpu"))
    loss, parts = eagle3_objective(
        head,
        config,
        batch,
        taught,
        vocabulary,
        TrainConfig("eagle3", steps=1),
        tally,
    )
    assert set(parts) == {"step0", "step1"}
    assert torch.isfinite(loss)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_simulated_tau_is_the_expected_length(alphas: list[float]) -> None:
    """Expected tokens of a chain that stops at the first rejected draft, the target's own token included."""
    expected, reached = 0.0, 1.0
    for n, alpha in enumerate(alphas):
        expected += reached * (1 - alpha) * (n + 1)
        reached *= alpha
    assert simulated_tau(alphas) == pytest.approx(expected + reached * (len(alphas) + 1))


def test_overlap_counts_target_mass_outside_the_draft_vocabulary_as_lost() -> None:
    target, kept = torch.log(torch.tensor([[[0.5, 0.3, 0.2]]])), torch.tensor([1, 2])
    draft, row = torch.log(torch.tensor([[0.9, 0.1]])), torch.tensor([0])
    said = WholeLogits(target)
    assert float(shared(draft, said.probabilities(row, kept))) == pytest.approx(0.3 + 0.1)
    assert float(shared(target[0], said.probabilities(row, None))) == pytest.approx(1.0)
    torch.testing.assert_close(said.logits(row, kept).softmax(-1), torch.tensor([[0.6, 0.4]]))


def test_masked_mean_of_nothing_is_zero() -> None:
    assert float(masked_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool))) == 0.0
