"""`eagle-bench --table seeds`: every method that the papers compare, lossless, in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import put_tokenizer
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.opening.datastore_file import with_datastore
from eagle_runtime.opening.loading import open_bundle
from eagle_tools.bench.cli import main
from eagle_tools.bench.contenders import bundle_contenders, without_datastore
from eagle_tools.bench.published import PUBLISHED, SETS, SOURCES, published_table
from eagle_tools.bench.seeds import HEADS, WITH_HEAD, WITHOUT_HEAD, seed_methods
from eagle_tools.questions import read_sets
from insides import bundle_in

SEVERAL = {"qa": "def f(n):", "mt_bench": "class A:", "heldout": "import os"}


@pytest.fixture
def pair(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    bundle: Path = shutil.copytree(bundle_of("eagle1"), tmp_path / "pair")
    put_tokenizer(bundle)
    return bundle


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def f(n):\n    return n\n" * 20)
    return path


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder of three sets, whose questions have the same ids."""
    folder = tmp_path / "sets"
    folder.mkdir()
    for name, text in SEVERAL.items():
        rows = [{"question_id": number, "category": "c", "turns": [f"{text}{number}"]} for number in (1, 2)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table_rows(text: str, title: str) -> list[list[str]]:
    """The rows of the table below a title."""
    lines = text.split(title)[1].lstrip("\n").split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:])]


def test_all_drafters_that_the_bundles_can_run_are_in_the_table_by_set_and_temperature(
    pair: Path, store: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart.png"
    given = [str(pair), "--prompts", str(sets), "--count", "1", "--threads", "1", "--max-new-tokens", "8"]
    given += ["--table", "seeds", "--draft-bundle", str(pair), "--datastore", str(store), "--chart", str(chart)]
    assert main(given) == 0
    text = capsys.readouterr().out
    expected = [name for name, _ in WITHOUT_HEAD.values()] + [f"EAGLE-1, {name}" for name in WITH_HEAD.values()]
    for temperature in (0, 1):
        titles, *rows = table_rows(text, f"Drafters in fp32, temperature {temperature}:")
        assert titles == ["drafter", "x vanilla", "tau", "MT-bench", "NQ", "heldout", "same tokens", "published as"]
        assert [row[0] for row in rows] == expected
        for row in rows:
            assert float(row[1].split("x")[0]) > 0 and float(row[2]) >= 1 and row[6] == "3/3"
            assert all(float(cell.split("x, ")[1]) >= 1 for cell in row[3:6])
    target = read_manifest(pair).target
    assert f"The target here has {target.num_layers} layers of width {target.hidden_size}." in text
    assert "completes code and does not chat" in text and text.rstrip().endswith(SOURCES)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_the_table_as_data(pair: Path, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(pair), "--prompts", str(sets / "qa.jsonl"), "--prompts", str(sets / "heldout.jsonl"), "--json"]
    given += ["--threads", "1", "--max-new-tokens", "8", "--table", "seeds", "--temperature", "0"]
    assert main(given) == 0
    report = json.loads(capsys.readouterr().out)
    methods = {one["method"] for one in report["table"]}
    assert methods == {*WITHOUT_HEAD, *WITH_HEAD} - {"draft-model:chain", "draft-model:cost-aware", "datastore"}
    for one in report["table"]:
        assert one["same"] == {"": [4, 4], "qa": [2, 2], "heldout": [2, 2]}[one["prompt_set"]]
        assert one["vs_vanilla"]["low"] <= one["vs_vanilla"]["value"] <= one["vs_vanilla"]["high"]
    assert {one["key"] for one in report["published"]} == set(PUBLISHED)


def test_heads_of_several_kinds_have_rows_of_their_own(
    bundle_of: Callable[..., Path], pair: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are of one precision, so that the first alone runs what needs no head."""
    bundles = [pair]
    for kind in ("eagle3", "deepspec"):
        bundles.append(shutil.copytree(bundle_of(kind), tmp_path / kind))
        put_tokenizer(bundles[-1])
    given = [*map(str, bundles), "--prompts", str(sets / "qa.jsonl"), "--count", "1", "--threads", "1"]
    assert main([*given, "--max-new-tokens", "6", "--table", "seeds", "--temperature", "0"]) == 0
    titles, *rows = table_rows(capsys.readouterr().out, "Drafters in fp32, temperature 0:")
    grown = {name for method, name in WITH_HEAD.items() if method != "eagle:static"}
    for head, published in (("EAGLE-3", "EAGLE-3"), ("block head", "DFlash")):
        of_head = {row[0].removeprefix(f"{head}, "): row for row in rows if row[0].startswith(f"{head}, ")}
        assert of_head.keys() == grown
        for row in of_head.values():
            assert row[-1] == PUBLISHED[published].name and float(row[1].split("x")[0]) > 0 and row[-2] == "1/1"
    assert sum(row[0].startswith("prompt lookup, chain") for row in rows) == 1 and titles[-1] == "published as"


def test_drafters_without_a_head_run_on_the_first_bundle_of_a_precision_alone(
    bundle_of: Callable[..., Path], pair: Path
) -> None:
    manifests = [
        read_manifest(path) for path in (bundle_of("eagle1"), bundle_of("eagle3"), bundle_of("eagle1", "int8"))
    ]
    first, second, third = seed_methods(manifests, draft_model=True, datastore=True)
    assert first == third == ("vanilla", *WITHOUT_HEAD, *WITH_HEAD)
    assert second == ("vanilla", "eagle:dynamic", "eagle:cost-aware", "eagle+lookup")
    assert "datastore" not in seed_methods(manifests, draft_model=True, datastore=False)[0]
    assert not any("draft" in method for method in seed_methods(manifests, draft_model=False, datastore=True)[0])


def test_only_method_datastore_searches_the_datastore(pair: Path, store: Path) -> None:
    opened = with_datastore(open_bundle(pair, "auto", None, 1, check_hashes=True), store)
    with EagleModel(opened) as model:
        plain = without_datastore(opened)
        both = bundle_contenders(model, "pair", ("lookup", "datastore"), (0.0,), 0, ignore_eos=False, plain=plain)
        assert [bundle_in(one._model).datastore is not None for one in both] == [False, True]
        alone = bundle_contenders(model, "pair", ("lookup",), (0.0,), 0, ignore_eos=False)
        assert bundle_in(alone[0]._model).datastore is not None


def test_every_row_knows_its_published_counterpart(bundle_of: Callable[..., Path]) -> None:
    assert {key for _, key in WITHOUT_HEAD.values()} | {
        key for row in HEADS.values() for key in row.published.values()
    } <= set(PUBLISHED)
    for one in PUBLISHED.values():
        assert one.greedy is None or len(one.greedy) == 6  # five sets and their mean
        if one.greedy is not None:
            *each, mean = one.greedy
            for place in (0, 1):
                assert sum(ratio[place] for ratio in each) / 5 == pytest.approx(mean[place], abs=0.011), one.name
    five = list(SETS.values())[:5]
    titles = [cell.strip() for cell in published_table().splitlines()[0].split("|")[2:7]]
    assert titles == [f"T = 0: {five[0]}", *five[1:]]


def test_sets_are_read_from_files_and_folders(sets: Path, tmp_path: Path) -> None:
    questions = read_sets([sets], 1)
    assert [(one.id, one.prompt_set) for one in questions] == [(f"{name}/1", name) for name in sorted(SEVERAL)]
    alone = read_sets([sets / "qa.jsonl"])
    assert [(one.id, one.prompt_set) for one in alone] == [(1, ""), (2, "")]
    with pytest.raises(RequestError, match="two question files are named 'qa'"):
        read_sets([sets, sets / "qa.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"empty has no \.jsonl file"):
        read_sets([tmp_path / "empty"])


def test_what_cannot_be_drawn_is_refused(
    pair: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(pair), "--prompts", str(sets)]
    assert (
        main([*given, "--chart", str(tmp_path / "a.png")]) == 2 and "give --table seeds too" in capsys.readouterr().err
    )
    assert main([*given, "--table", "seeds", "--chart", str(tmp_path / "a.gif")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "a.gif cannot be drawn; name a file that ends in .png, .svg, .pdf" in printed.err
