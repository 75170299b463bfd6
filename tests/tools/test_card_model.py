"""eagle_tools.card: bytes as in exported bundles and built engines, times that follow from the figures of a card, and
the command's tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import GOLDEN, HEADS
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.drafting.cost_model import CPU
from eagle_tools.card.cards import CARDS, Assumed, Card
from eagle_tools.card.facts import PRECISIONS, SHAPES, Facts, Product, Shape, pair_of_bundle, pair_of_shape
from eagle_tools.card.kernels import Count, count, recorded
from eagle_tools.card.model import Kernels, Tree, body, old_traffic, padded_past, padded_rows, predict, traffic
from eagle_tools.card_model import main

if TYPE_CHECKING:
    from eagle_export.tensorrt.build import Built

pytest_plugins = ["trt_bundles"]

TREE = Tree()
TOY = Card("toy", "8.9", 1e9, 100e9, 10e9, {"fp16": 1e12, "int8": 2e12}, "made up")
ROUND = Assumed(bandwidth=1, compute=1, weight_only=0.5, bus=1, kernel_s=1e-6)


def shape_of(pair: str) -> Shape:
    """The shape of a checkpoint of the tests with its EAGLE-3 head, as its configurations give it."""
    target = json.loads((GOLDEN / "target" / "config.json").read_text(encoding="utf-8"))
    head = json.loads((GOLDEN / HEADS[pair] / "config.json").read_text(encoding="utf-8"))
    return Shape(
        target["hidden_size"],
        target["num_hidden_layers"],
        target["num_attention_heads"],
        target["num_key_value_heads"],
        target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        target["intermediate_size"],
        target["vocab_size"],
        head["draft_vocab_size"],
        head["intermediate_size"],
    )


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_a_shape_has_the_bytes_of_its_bundle(
    precision: str, bundle_of: Callable[..., Path], quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    bundle = bundle_of("eagle3", "fp16") if precision == "fp16" else quantised_bundle_of("eagle3", precision)
    exported = pair_of_bundle("golden", read_manifest(bundle))
    derived = pair_of_shape("golden", shape_of("eagle3"), precision)
    for one, other in ((exported.target, derived.target), (exported.head, derived.head)):
        assert one is not None and other is not None
        assert one.weights == other.weights
        assert Counter(one.products) == Counter(other.products)
        assert dataclasses.replace(one, products=()) == dataclasses.replace(other, products=())


def test_kernels_hold_the_bytes_of_the_products(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    """What TensorRT compiled into the matrix products of the target is what the model says that they read."""
    bundle, built = engines_of("eagle3")
    target = pair_of_bundle("golden", read_manifest(bundle)).target
    (engine,) = (one for one in built.built if one.name == "target")
    products = [k for k in engine.kernels if k.profile == 0 and (k.kind == "gemm" or "Fc" in k.name)]
    held = sum(kernel.constant_bytes for kernel in products)
    scalars = 8 * len(products)  # alpha and beta of a product
    assert 0 <= held - sum(product.nbytes for product in target.products) <= scalars


def test_the_record_counts_what_is_built(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    """Kernels of other pairs: the golden pair's own number, within those of a layer."""
    _, built = engines_of("eagle3")
    (engine,) = (one for one in built.built if one.name == "target")
    here = count([kernel for kernel in engine.kernels if kernel.profile == 0])
    assert here.of(engine.layers) == sum(kernel.profile == 0 for kernel in engine.kernels)
    assert abs(recorded("fp16", engine.layers, TREE).target - here.of(engine.layers)) <= 12


def test_more_layers_and_levels_are_more_kernels() -> None:
    assert Count(12, 5).of(8) == 101
    one, other = recorded("int8", 8, TREE), recorded("int8", 9, Tree(depth=6))
    assert one.target < other.target and one.tree < other.tree and one.head == other.head
    assert recorded("int4-int8", 8, TREE) == recorded("int8", 8, TREE)


def test_a_pass_computed_by_hand() -> None:
    """Two products of 1000 x 1000 in fp16, one layer of 100 heads' numbers, on a card of 100 GB/s and 1 TFLOPS."""
    products = (Product(1000, 1000, 2_000_000, "fp16"), Product(1000, 1000, 2_000_000, "fp16", logits=True))
    facts = Facts(products, vectors=1000, layers=1, attention_width=100, kv_row=400, hidden=1000)
    assert (facts.weights, facts.vocab) == (4_001_000, 1000)
    # One row: weights and the row's 4000 bytes are read in 20.04 µs, which computing (2 µs) does not exceed.
    joined, attended, logits = 400 * 513 / 100e9, 400 * 257 / 100e9, 3 * 4 * 1000 / 100e9
    wanted = 1000 / 100e9 + 2 * 2_004_000 / 100e9 + joined + attended + logits
    assert body(facts, 1, 256, TOY, ROUND) == pytest.approx(wanted)
    # 64 rows: 128 µs of computing exceed 22.56 µs of reading; attention 8.192 µs exceed 1.28 µs.
    wanted = 1000 / 100e9 + 2 * 128e-6 + 400 * 576 / 100e9 + 4 * 64 * 320 * 100 / 1e12 + 64 * logits
    assert body(facts, 64, 256, TOY, ROUND) == pytest.approx(wanted)


def test_a_cycle_computed_by_hand() -> None:
    """The bytes of the design's own budget: below 16 kB at temperature 0, below 64 kB above."""
    pair = pair_of_shape("8b", SHAPES["8b"], "fp16")
    assert pair.head is not None
    greedy = traffic(pair.target, pair.head, TREE, 1024, sampled=False)
    sampled = traffic(pair.target, pair.head, TREE, 1024, sampled=True)
    assert TREE.candidates == 510
    assert greedy.down == 64 * 68 + 574 * 8 + 40 * 4 < 16_000 < sampled.down < 64_000
    assert (greedy.calls, greedy.syncs) == (3, 2)
    old = old_traffic(pair.target, TREE)
    assert (old.calls, old.syncs, old.down) == (7, 7, 60 * 128256 * 4 + 6 * 10 * 64 * 12)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_better_figures_are_never_slower(card: Card, precision: str) -> None:
    pair, kernels = pair_of_shape("1b", SHAPES["1b"], precision), recorded(precision, 16, TREE)

    def times(card: Card, kernels: Kernels = kernels, tree: Tree = TREE, past: int = 1000) -> list[float]:
        one = predict(pair, kernels, card, tree, past, Assumed())
        return [one.plain, one.verify, one.draft, one.six, one.token, one.cycle, one.old_cycle]

    now = times(card)
    faster = [
        dataclasses.replace(card, bandwidth=2 * card.bandwidth),
        dataclasses.replace(card, bus=2 * card.bus),
        dataclasses.replace(card, compute={kind: 2 * rate for kind, rate in card.compute.items()}),
    ]
    assert all(after <= before for other in faster for after, before in zip(times(other), now, strict=True))
    more = [times(card, Kernels(*(2 * n for n in dataclasses.astuple(kernels)))), times(card, past=3000)]
    assert all(after >= before for other in more for after, before in zip(other, now, strict=True))
    by_nodes = [times(card, tree=Tree(nodes=nodes)) for nodes in (2, 16, 17, 32, 60, 64, 65)]
    for less, others in itertools.pairwise(by_nodes):
        assert all(after >= before for before, after in zip(less, others, strict=True))
    assert now[2] < now[3] + 0.2e-3 * 6 and now[5] < now[6]


def test_one_call_saves_waits_and_bytes() -> None:
    pair = pair_of_shape("8b", SHAPES["8b"], "int8")
    for card in CARDS:
        one = predict(pair, recorded("int8", 32, TREE), card, TREE, 1000, Assumed(), sampled=True)
        assert one.cycle < one.old_cycle and one.speed_up(4) == pytest.approx(4 * one.token / one.cycle)
        assert one.speed_up(one.tau_for(2.2)) == pytest.approx(2.2)


def test_what_does_not_fit_or_run() -> None:
    at = {card.name: card for card in CARDS}
    whole = pair_of_shape("8b", SHAPES["8b"], "fp16")
    fits = {n: predict(whole, recorded("fp16", 32, TREE), c, TREE, 1000, Assumed()).fits for n, c in at.items()}
    assert fits == {"RTX 3060": False, "RTX 4070": False, "RTX 4090": True, "RTX 5090": True, "H200": True}
    floats = pair_of_shape("8b", SHAPES["8b"], "fp8")
    runs = {n: predict(floats, recorded("fp8", 32, TREE), c, TREE, 1000, Assumed()).runs for n, c in at.items()}
    assert runs == {name: name != "RTX 3060" for name in at}


def test_published_cards() -> None:
    """The vendor's own figures, from which the rates per multiprocessor were taken."""
    at = {card.name: card for card in CARDS}
    for name, kind, tera in (
        ("RTX 4090", "fp16", 165.2),
        ("RTX 4090", "int8", 660.6),
        ("RTX 4090", "fp8", 330.3),
        ("RTX 5090", "fp16", 209.5),
        ("RTX 5090", "int8", 838),
    ):
        assert at[name].compute[kind] == pytest.approx(tera * 1e12, rel=0.002)


def test_published_decoding() -> None:
    """NVIDIA's own figures of Qwen3-8B in int4 with an EAGLE-3 head and trees 60/6/10 on AGX Orin (TensorRT-Edge-LLM
    0.9.0, performance-benchmarks.md: 32.5 tokens per second without drafts, 59.3 with, tau 4.22)."""
    orin = Card("AGX Orin", "8.7", 64e9, 204.8e9, 0, {"fp16": 42.5e12, "int8": 85e12}, "data sheet, without sparsity")
    shape = Shape(4096, 36, 32, 8, 128, 12288, 151936, 32000, 12288)
    one = predict(pair_of_shape("qwen3", shape, "int4"), recorded("int4", 36, TREE), orin, TREE, 200, Assumed())
    assert one.token == pytest.approx(1 / 32.5, rel=0.15)
    assert one.cycle == pytest.approx(4.22 / 59.3, rel=0.15)


def test_the_hosts_work_is_what_costs_assume() -> None:
    assumed = Assumed()
    assert (assumed.verify_s, assumed.level_s) == CPU.host_s and assumed.plain_s == assumed.verify_s / 2


def test_padding() -> None:
    assert [padded_rows(n) for n in (1, 2, 16, 17, 33, 64, 65)] == [1, 16, 16, 32, 64, 64, 128]
    assert [padded_past(n) for n in (0, 256, 257, 1000, 1025)] == [256, 256, 512, 1024, 2048]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle_of: Callable[..., Path]) -> None:
    plot = tmp_path / "bars.png"
    assert main(["--shape", "8b", "--tau", "4.2", "--plot", str(plot)]) == 0
    page = capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert all(f"| {precision} | {card.name} |" in page for precision in PRECISIONS for card in CARDS)
    assert all(f"- {line}" in page for line in Assumed().lines())
    assert "| fp16 | RTX 3060 | 16.7 | does not fit |" in page and "| fp8 | RTX 3060 | 8.8 | no such kernels |" in page
    assert main([str(bundle_of("eagle3", "fp16")), "--card", "RTX 4090", "--assume", "kernel_s=3e-6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["assumed"]["kernel_s"] == 3e-6 and [row["card"] for row in report["rows"]] == ["RTX 4090"]
    (tmp_path / "shape.json").write_text(json.dumps(dataclasses.asdict(SHAPES["1b"])), encoding="utf-8")
    assert main(["--shape", str(tmp_path / "shape.json"), "--precision", "int4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["gigabytes"] < 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give either a bundle or --shape"),
        (["--shape", "8b", "--assume", "speed=2"], "give one of bandwidth, compute"),
        (["--shape", "8b", "--assume", "kernel_s=fast"], "give a number"),
        (["--shape", "8b", "--nodes", "1"], "--nodes must be 2 or more"),
        (["--shape", "8b", "--plot", "x.png"], "--plot needs --tau"),
        (["--shape", "nowhere.json"], "give a JSON file"),
        (["{fp32}"], "compute in fp16"),
    ],
)
def test_wrong_input_takes_a_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], bundle_of: Callable[..., Path]
) -> None:
    argv = [str(bundle_of("eagle3")) if word == "{fp32}" else word for word in argv]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
