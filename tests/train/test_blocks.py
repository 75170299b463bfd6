"""Training of block heads: what a block sees, what its loss counts, and short runs through the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.graphs.head_modules import build_any_head
from eagle_export.graphs.pair import open_pair
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_train.blocks import (
    FREE,
    ROW_DECAY,
    block_objective,
    block_shape,
    block_taps,
    draft_blocks,
    draw_roots,
    measure_block,
    start_block,
)
from eagle_train.cli import main
from eagle_train.config import TrainConfig
from eagle_train.losses import CROSS_ENTROPY
from eagle_train.metrics import Tally
from eagle_train.objective import Vocabulary
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, StateLogits, Taught, likeliest

TARGET = GOLDEN / "target"
QUICK = ["--threads", "1", "--backend", "cpu", "--batch-size", "8", "--seq-len", "48", "--draft-vocab", "64"]
DEMO = Path(__file__).parents[2] / "tools" / "demo_pair"
QUICK += ["--block", "4", "--anchors", "8", "--singles", "16", "--markov-rank", "16"]
VOCABULARY = Vocabulary.of(torch.arange(0, 256, 4), 256)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(TARGET, torch.device("cpu"))


def new_block(target: FrozenTarget) -> tuple[BlockHead, HeadConfig]:
    """An untrained head, with transitions that add something."""
    torch.manual_seed(0)
    config = TrainConfig("block", steps=1, block=4, markov_rank=8)
    shape = block_shape(target, config, len(VOCABULARY.ids))
    head = build_any_head(shape)
    assert isinstance(head, BlockHead)
    start_block(head, target)
    head.embed_tokens = target.model.model.embed_tokens
    if head.markov_head is not None:
        torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    return head, shape


def text_of(target: FrozenTarget, texts: int, length: int, prompt: int) -> tuple[Batch, Taught]:
    """Random tokens of which those after the prompt carry loss, and what the target says of them."""
    ids = torch.randint(0, 256, (texts, length), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(texts, length, dtype=torch.bool)
    mask[:, prompt:] = True
    states = target.states(ids, block_taps(8))
    said = StateLogits(states.last, target.lm_head, *likeliest(states.last, target.lm_head, torch.ones_like(mask)))
    return Batch(ids, mask), Taught(states.features, said, states.last)


def logits_of(target: FrozenTarget, taught: Taught) -> Tensor:
    assert taught.last is not None
    return target.logits(taught.last)


def drafts(head: BlockHead, shape: HeadConfig, batch: Batch, taught: Taught, root: int, text: int = 0) -> Tensor:
    with torch.no_grad():
        drafted = draft_blocks(head, shape, batch, taught, torch.full((len(batch.ids), 1), root))
        return head.logits(drafted.hidden[text, 0])


def test_a_block_sees_its_root_and_the_target_before_it(target: FrozenTarget) -> None:
    head, shape = new_block(target)
    batch, taught = text_of(target, 1, 20, 2)
    usual = drafts(head, shape, batch, taught, 9)
    for position, changes in ((8, True), (9, False), (12, False)):
        features = taught.features.clone()
        features[:, position] += 1
        other = drafts(head, shape, batch, Taught(features, taught.said, taught.last), 9)
        assert torch.equal(other, usual) is not changes, position
    for position, changes in ((7, False), (8, True), (9, False)):
        assert taught.last is not None
        last = taught.last.clone()
        last[:, position] += 1
        other = drafts(head, shape, batch, Taught(taught.features, taught.said, last), 9)
        assert torch.equal(other, usual) is not changes, position
    for position, changes in ((8, False), (9, True), (10, False)):
        ids = batch.ids.clone()
        ids[:, position] = (ids[:, position] + 1) % 256
        assert torch.equal(drafts(head, shape, Batch(ids, batch.loss_mask), taught, 9), usual) is not changes, position


def test_the_loss_is_that_of_a_loop_over_rows(target: FrozenTarget) -> None:
    head, shape = new_block(target)
    batch, taught = text_of(target, 2, 16, 6)
    roots, singles = torch.tensor([[5, 11], [8, 14]]), torch.tensor([[6, 7, 12], [5, 9, 14]])
    loss, _ = block_objective(head, shape, batch, taught, VOCABULARY, [roots, singles], Tally(4, torch.device("cpu")))
    assert head.markov_head is not None
    total = weights = 0.0
    for text in range(2):
        for places, rows in ((roots[text], 4), (singles[text], 1)):
            for root in places.tolist():
                free = drafts(head, shape, batch, taught, root, text)
                for row in range(min(rows, 15 - root)):
                    q = logits_of(target, taught)[text, root + row].softmax(-1)[VOCABULARY.ids]
                    given = free[row] + head.markov_head(batch.ids[text, root + row])
                    for logits, share in ((given, 1.0), (free[row], FREE if row else 0.0)):
                        p, weight = logits.softmax(-1), share * math.exp(-row / ROW_DECAY)
                        entropy, variation = -(q * p.log()).sum(), 1 - torch.minimum(p, q).sum()
                        total += weight * (CROSS_ENTROPY * entropy + (1 - CROSS_ENTROPY) * variation).item()
                        weights += weight
    assert loss.item() == pytest.approx(total / weights, rel=1e-4)


def test_roots_stand_before_tokens_that_carry_loss() -> None:
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 4:7] = True
    mask[1, 9] = True
    roots = draw_roots(Batch(torch.zeros(2, 10, dtype=torch.int64), mask), 50, torch.Generator().manual_seed(0))
    assert set(roots[0].tolist()) == {3, 4, 5}
    assert set(roots[1].tolist()) == {8}


def test_rows_after_the_end_of_an_answer_do_not_count(target: FrozenTarget) -> None:
    head, shape = new_block(target)
    batch, taught = text_of(target, 1, 12, 2)
    mask = batch.loss_mask.clone()
    mask[0, 7] = False  # a second answer begins at 8
    drafted = draft_blocks(head, shape, Batch(batch.ids, mask), taught, torch.tensor([[4, 9]]))
    assert drafted.counted[0].tolist() == [[True, True, False, False], [True, True, False, False]]


def test_measuring_counts_rows_with_and_without_transitions(target: FrozenTarget) -> None:
    head, shape = new_block(target)
    batch, taught = text_of(target, 1, 40, 2)
    tally, free = Tally(4, torch.device("cpu")), Tally(4, torch.device("cpu"))
    measure_block(head, shape, batch, taught, VOCABULARY, tally, free)
    drafted = draft_blocks(head, shape, batch, taught, torch.arange(1, 39)[None])
    best = logits_of(target, taught).argmax(-1)[0]
    for each, logits in ((tally, drafted.logits(head)), (free, drafted.logits(head, transitions=False))):
        proposal = VOCABULARY.ids[logits.argmax(-1)][0]
        for row in range(4):
            right = [int(proposal[root - 1, row]) == int(best[root + row]) for root in range(1, 39 - row)]
            assert each.read().accuracy[row] == pytest.approx(sum(right) / len(right))
    assert tally.read().overlap[0] == free.read().overlap[0]  # the root is known
    assert tally.read().overlap[1:] != free.read().overlap[1:]


def test_a_short_target_has_no_taps_for_a_block_head() -> None:
    assert block_taps(8) == (2, 4, 5, 7)
    with pytest.raises(ExportError, match="7 or more"):
        block_taps(6)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Path:
    """48 greedy answers of the golden target."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [json.dumps({"ids": prompts[i % len(prompts)][: 2 + i % 13]}) + "\n" for i in range(48)]
    (folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    arguments = ["generate", str(TARGET), "--data", str(folder / "prompts.jsonl"), "-o", str(folder / "answers.jsonl")]
    assert main([*arguments, "--max-new-tokens", "40", "--batch-size", "48", "--threads", "1", "--backend", "cpu"]) == 0
    return folder / "answers.jsonl"


def train(data: Path, output: Path, *options: str) -> int:
    return main(["block", str(TARGET), "--data", str(data), "-o", str(output), *QUICK, *options])


def test_a_short_run_learns_to_draft_and_goes_on(answers: Path, tmp_path: Path) -> None:
    assert train(answers, tmp_path / "head", "--steps", "60", "--eval-data", str(answers)) == 0
    rows = [json.loads(line) for line in (tmp_path / "head/training/log.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"] and set(steps[0]["parts"]) == {"transitions", "free"}
    assert rows[-1]["event"] == "eval" and len(rows[-1]["n_alpha"]) == 4
    assert rows[-1]["tau"] > 1.3 > rows[-1]["without_transitions"]["tau"] - 1
    part = open_pair(TARGET, tmp_path / "head").head
    assert part is not None and part.config.block is not None and part.d2t is not None
    assert (part.config.taps, part.config.num_layers, part.config.block.size) == (block_taps(8), 1, 4)
    assert (part.config.block.anchor, part.config.block.causal, part.config.block.markov_rank) == (True, True, 16)
    again = ["--init", str(tmp_path / "head")]
    assert train(answers, tmp_path / "same", "--steps", "0", *again) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "same"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert train(answers, tmp_path / "deeper", "--steps", "1", "--layers", "2", *again) == 2


def test_a_head_without_transitions(answers: Path, tmp_path: Path) -> None:
    assert train(answers, tmp_path / "head", "--steps", "1", "--markov-rank", "0", "--mlp", "96", "--layers", "2") == 0
    config = json.loads((tmp_path / "head/config.json").read_text("utf-8"))
    assert config["architectures"] == ["EagleTrainBlockModel"] and "markov_rank" not in config
    names = load_file(tmp_path / "head/model.safetensors")
    assert not any("markov" in name for name in names) and names["layers.1.mlp.up_proj.weight"].shape == (96, 64)
    part = open_pair(TARGET, tmp_path / "head").head
    assert part is not None and part.config.markov_rank == 0 and part.config.block is not None
    assert part.config.block.anchor


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out code, continued by the demo pair's target."""
    folder = tmp_path_factory.mktemp("code")
    arguments = ["generate", str(DEMO / "target"), "--data", str(DEMO / "heldout.jsonl"), "--max-new-tokens", "24"]
    assert main([*arguments, "-o", str(folder / "code.jsonl"), "--threads", "1", "--backend", "cpu"]) == 0
    return folder / "code.jsonl"


def held_out(folder: Path, *arguments: str) -> list[float]:
    """n-alpha as a command of eagle-train measures it."""
    assert main([*arguments, "--steps", "0", "-o", str(folder), "--threads", "1", "--backend", "cpu"]) == 0
    last = (folder / "training/log.jsonl").read_text("utf-8").splitlines()[-1]
    alphas: list[float] = json.loads(last)["n_alpha"]
    return alphas


def test_a_block_head_begins_where_an_eagle1_head_is(code: Path, tmp_path: Path) -> None:
    data = ["--data", str(code), "--eval-data", str(code), "--init", str(DEMO / "eagle1")]
    eagle1 = held_out(tmp_path / "eagle1", "head", str(DEMO / "target"), "--kind", "eagle1", *data)
    for layers in ("1", "2"):
        block = ["block", str(DEMO / "target"), *data, "--layers", layers, "--block", "4"]
        assert abs(held_out(tmp_path / layers, *block)[0] - eagle1[0]) < 0.03, layers
    folder = open_pair(DEMO / "target", tmp_path / "2").head
    assert folder is not None and folder.config.state_size == folder.config.hidden_size == 256


@pytest.mark.parametrize(
    ("head", "options", "words"),
    [
        (DEMO / "eagle1", ("--kv-heads", "4"), "num_kv_heads 2, but the block head 4"),
        (DEMO / "eagle3", (), "kind eagle3, not block"),
    ],
    ids=["other sizes", "eagle3"],
)
def test_heads_that_no_block_head_can_begin_from(
    head: Path, options: tuple[str, ...], words: str, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["block", str(DEMO / "target"), "--data", str(code), "--steps", "1", "--init", str(head), *options]
    assert main([*command, "-o", str(tmp_path / "head"), "--threads", "1", "--backend", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_a_head_whose_fc_has_a_bias_is_refused(
    answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(answers, tmp_path / "head", "--steps", "1", "--init", str(GOLDEN / "head_eagle1")) == 2
    assert "fc_bias True, but the block head False" in capsys.readouterr().err


def test_settings_that_no_block_head_has_are_refused(
    tmp_path: Path, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value, words in (
        ("--block", "1", "block is 1, but must be 2 or more"),
        ("--block", "65", "block is 65, but must be 64 or less"),
        ("--markov-rank", "-1", "markov_rank is -1"),
        ("--mlp", "0", "mlp is 0"),
        ("--kv-heads", "3", "4 heads cannot share"),
    ):
        assert train(answers, tmp_path / "head", "--steps", "1", option, value) == 2
        assert words in capsys.readouterr().err
