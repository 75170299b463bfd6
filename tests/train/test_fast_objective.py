"""What training computes quickly is what the plain form computes (plain_objective.py): losses, and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_train import attention
from eagle_train.config import TrainConfig
from eagle_train.linear_loss import LEAST_ROWS, _loss_and_pull, linear_loss, whole_loss
from eagle_train.metrics import Tally
from eagle_train.objective import Vocabulary, eagle1_objective, eagle3_objective
from eagle_train.precision import unhalved
from eagle_train.rows import reaching, unroll_rows
from eagle_train.taught import LOGIT_ROWS, Batch, LmHead, StateLogits, Taught, WholeLogits, likeliest
from plain_objective import distribution_loss, plain_eagle1, plain_eagle3
from tiny_heads import build_head, golden_head, one_path, tiny

STEPS = 4
KEPT = torch.tensor([0, 2, 3, 5, 7, 8, 10])
CPU = torch.device("cpu")
# What families make of the output of their LM heads: nothing, Granite, Gemma.
FINISHED = (lambda logits: logits, lambda logits: logits / 4, lambda logits: 3 * (logits / 3).tanh())


def texts() -> Batch:
    """Two answers in one text, one that ends early, one without a prompt."""
    torch.manual_seed(3)
    mask = torch.ones(3, 14, dtype=torch.bool)
    mask[0, :3] = mask[0, 7:10] = False
    mask[1, :4] = mask[1, 9:] = False
    ids = torch.randint(0, 11, mask.shape)
    ids[1, 9:] = 0
    return Batch(ids, mask)


def gradients(head: torch.nn.Module, features: Tensor, loss: Tensor) -> list[Tensor]:
    wanted = [features, *(p for name, p in head.named_parameters() if name != "fc.weight")]
    return list(torch.autograd.grad(loss, wanted))


@pytest.fixture(params=["flash", "matrices"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention by the operator of CPUs, and by the matrices of other devices."""
    if request.param == "matrices":
        monkeypatch.setattr(attention, "_fused", lambda q: None)
    return str(request.param)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("form", ["plain", "biased", "normed"])
def test_eagle3_is_its_plain_form(kernels: str, recompute: bool, share: float, form: str) -> None:
    """With grouped heads, masks, padding and a draft vocabulary, with all rows unrolled and with some."""
    head, shape = tiny("eagle3")
    if form != "plain":
        changes: dict[str, HeadConfig] = {
            "biased": replace(shape, qkv_bias=True, qk_norm=True),
            "normed": replace(shape, normed_residual=True, output_norm="recurrent"),
        }
        shape = changes[form]
        head = build_head(shape)
    assert isinstance(head, Eagle3Head)
    batch, vocabulary = texts(), Vocabulary.of(KEPT, 11)
    features, logits = torch.randn(3, 14, 24, requires_grad=True), torch.randn(3, 14, 11) * 2
    chosen = None if share == 1 else torch.rand(3, 14) < share
    plain, of_steps = plain_eagle3(head, shape, batch, features, logits, vocabulary, STEPS, chosen)
    config = TrainConfig("eagle3", steps=1, ttt_steps=STEPS, recompute=recompute)
    taught = Taught(features, WholeLogits(logits))
    quick, parts = eagle3_objective(head, shape, batch, taught, vocabulary, config, Tally(STEPS, CPU), chosen)
    torch.testing.assert_close(quick, plain)
    torch.testing.assert_close(torch.stack(list(parts.values())), torch.stack(of_steps))
    for ours, theirs in zip(gradients(head, features, quick), gradients(head, features, plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_batch_that_teaches_nothing_has_no_loss(kernels: str) -> None:
    """All that the target writes is outside the draft vocabulary."""
    head, shape = tiny("eagle3")
    assert isinstance(head, Eagle3Head)
    batch, features = texts(), torch.randn(3, 14, 24, requires_grad=True)
    logits = torch.zeros(3, 14, 11)
    logits[..., 1] = 5
    taught, tally = Taught(features, WholeLogits(logits)), Tally(STEPS, CPU)
    config = TrainConfig("eagle3", steps=1, ttt_steps=STEPS)
    loss, _ = eagle3_objective(head, shape, batch, taught, Vocabulary.of(KEPT, 11), config, tally)
    assert float(loss.detach()) == 0 and not any(g.any() for g in gradients(head, features, loss))
    assert tally.read().accuracy == (0.0,) * STEPS


@pytest.mark.parametrize("finished", FINISHED)
def test_eagle1_is_its_plain_form(finished: Callable[[Tensor], Tensor]) -> None:
    head, shape = tiny("eagle1")
    assert isinstance(head, Eagle1Head)
    head.embed_tokens.requires_grad_(False)
    head.lm_head = LmHead(head.lm_head.weight, finished)
    batch = texts()
    features, logits = torch.randn(3, 14, 24), torch.randn(3, 14, 11) * 2
    noise = torch.randn(3, 14, 24) * 0.1
    plain = plain_eagle1(head, shape, batch, features, noise, logits, 0.3)
    config = TrainConfig("eagle1", steps=1, classification=0.3)
    taught = Taught(features, WholeLogits(logits))
    quick, _ = eagle1_objective(head, shape, batch, taught, noise, config, Tally(1, CPU))
    torch.testing.assert_close(quick, plain)
    learned = [p for p in head.parameters() if p.requires_grad]
    for ours, theirs in zip(torch.autograd.grad(quick, learned), torch.autograd.grad(plain, learned), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_rows_equal_the_reference_fixture() -> None:
    fixture = load_file(GOLDEN / "eagle3_ttt.fixture.safetensors")
    head, shape = golden_head(GOLDEN / "head_eagle3_dv44")
    assert isinstance(head, Eagle3Head)
    ids = fixture["input_ids"][None]
    valid = torch.cat([fixture["ttt_valid"], torch.zeros(len(fixture["ttt_valid"]), 1, dtype=torch.bool)], 1)
    rows = reaching([each[None] for each in valid])
    with torch.no_grad():
        states = list(unroll_rows(head, shape, head.fc(fixture["target_taps"][None]), ids, rows))
    for hidden, wanted, at in zip(states, fixture["ttt_hidden"], rows, strict=True):
        torch.testing.assert_close(hidden, wanted[at], rtol=0, atol=1e-4)


def test_each_row_is_a_path_of_decoding(kernels: str) -> None:
    head, shape = tiny("eagle3")
    assert isinstance(head, Eagle3Head)
    torch.manual_seed(8)
    features, ids = torch.randn(1, 12, 24), torch.randint(0, 11, (1, 12))
    rows = [torch.tensor([0, 2, 3, 6]), torch.tensor([2, 6]), torch.tensor([2, 6])]
    with torch.no_grad():
        states = list(unroll_rows(head, shape, features, ids, rows))
        for depth, (hidden, at) in enumerate(zip(states, rows, strict=True)):
            for state, row in zip(hidden, at.tolist(), strict=True):
                torch.testing.assert_close(state, one_path(head, features[0], ids[0], row, depth, 1))


def test_the_loss_through_the_lm_head_in_chunks() -> None:
    """More rows than a chunk holds, several of one teacher's row, of unlike weights."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(LEAST_ROWS * 2 + 5, 6, requires_grad=True), torch.randn(1 << 15, 6, requires_grad=True)
    teacher = (torch.randn(9, 1 << 15) * 3).softmax(-1)
    of = torch.randint(0, 9, (len(hidden),))
    weights, wanted = torch.rand(len(hidden)), torch.randint(0, 1 << 15, (len(hidden),))
    wanted[::3] = (hidden @ weight.T).argmax(-1)[::3]
    losses = linear_loss(hidden, weight, lambda rows: teacher[rows], of, wanted, weights)
    each = distribution_loss(hidden @ weight.T, teacher[of])
    torch.testing.assert_close(losses.each, each.detach())
    assert torch.equal(losses.right, (hidden @ weight.T).argmax(-1) == wanted)
    for ours, theirs in zip(
        torch.autograd.grad(losses.total * 2, [hidden, weight]),
        torch.autograd.grad((each * weights).sum() * 2, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_loss_that_gpus_compile_is_the_loss() -> None:
    torch.manual_seed(6)
    teacher, of = (torch.randn(5, 300) * 3).softmax(-1) * 0.9, torch.tensor([0, 0, 1, 2, 3, 4, 4])
    logits, wanted = torch.randn(7, 300) * 2, torch.randint(0, 300, (7,))
    wanted[0] = logits[0].argmax()
    losses, right, pull = whole_loss(teacher, of, logits, wanted)
    pulled = logits.clone()
    for ours, theirs in zip(
        (losses, right, pull), (*_loss_and_pull(teacher[of], pulled, torch.empty(7, 300), wanted), pulled), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("finished", FINISHED)
def test_what_states_say_is_what_their_logits_say(finished: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    states, lm_head = torch.randn(2, LOGIT_ROWS["cpu"], 6), LmHead(torch.randn(40, 6), finished)
    asked = torch.rand(2, LOGIT_ROWS["cpu"]) < 0.8
    logits = finished(states @ lm_head.weight.T)
    said, whole = StateLogits(states, lm_head, *likeliest(states, lm_head, asked)), WholeLogits(logits)
    assert torch.equal(said.best[asked], whole.best[asked])
    rows, kept = torch.nonzero(asked.flatten()).flatten()[::7], torch.tensor([3, 9, 30])
    for ids in (kept, None):
        torch.testing.assert_close(said.logits(rows, ids), whole.logits(rows, ids))
        torch.testing.assert_close(said.probabilities(rows, ids), whole.probabilities(rows, ids))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_bfloat16_is_near(kernels: str, kind: str) -> None:
    """As on processors with AVX-512 BF16 or AMX, and as on GPUs: here emulated, so that its losses can be compared."""
    head, shape = tiny("eagle3" if kind == "eagle3" else "eagle1")
    batch, vocabulary = texts(), Vocabulary.of(KEPT, 11)
    features, logits = torch.randn(3, 14, 24), torch.randn(3, 14, 11) * 2

    def loss() -> Tensor:
        config, taught = TrainConfig("eagle3", steps=1, ttt_steps=STEPS), Taught(features, WholeLogits(logits))
        if isinstance(head, Eagle3Head):
            return eagle3_objective(head, shape, batch, taught, vocabulary, config, Tally(STEPS, CPU))[0]
        noise, config = torch.zeros_like(features), TrainConfig("eagle1", steps=1)
        return eagle1_objective(head, shape, batch, taught, noise, config, Tally(1, CPU))[0]

    def learned(value: Tensor) -> Tensor:
        parameters = [p for name, p in head.named_parameters() if name != "fc.weight" or kind == "eagle1"]
        given: Callable[..., tuple[Tensor, ...]] = torch.autograd.grad
        return torch.cat([g.flatten() for g in given(value, parameters, allow_unused=True) if g is not None])

    value = loss()
    whole, exact = float(value.detach()), learned(value)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss()
    assert value.dtype == torch.float32 and not math.isclose(float(value.detach()), whole, rel_tol=1e-7)
    assert float(value.detach()) == pytest.approx(whole, rel=0.02)
    near = learned(value)
    assert near.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(near, exact, dim=0) > 0.99


def test_fp16_of_a_target_is_joined_with_what_a_head_computes() -> None:
    """As on a GPU, where a target stays in the type of its checkpoint: autocast to bfloat16 joins no fp16."""
    half, single = torch.tensor([1.5], dtype=torch.float16), torch.tensor([2.5])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            torch.cat([half, single])
        assert torch.cat([unhalved(half), single]).tolist() == [1.5, 2.5]
    assert unhalved(single) is single and unhalved(None) is None
