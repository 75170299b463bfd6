"""What eagle-calib refuses: bad text, bundles and places, in one line, with exit status 2 and no file left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from conftest import put_tokenizer
from eagle_calib.calibration import GRAPHS, read_calibration
from eagle_calib.cli import main
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import MANIFEST_NAME
from systems import largest_file, needs_links


@pytest.fixture(scope="module")
def bundles(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of head -> bundle with a tokenizer."""
    bundle = tmp_path_factory.mktemp("bundles") / "eagle1"
    shutil.copytree(bundle_of("eagle1"), bundle)
    put_tokenizer(bundle)
    return {"eagle1": bundle}


@pytest.fixture
def refused(bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, which must fail with one line and no other output, and returns that line."""

    def run(*arguments: str, bundle: Path = bundles["eagle1"], output: Path = tmp_path / "out") -> str:
        before = sorted(path for path in tmp_path.rglob("*"))
        assert main([str(bundle), "-o", str(output), "--threads", "1", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("eagle-calib: ")
        assert sorted(path for path in tmp_path.rglob("*")) == before
        return printed.err

    return run


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\n", "holds no text of two tokens"),
        ("a.txt", "Käse".encode("latin-1"), "not UTF-8 text (byte 1)"),
        ("a.txt", b"ab\0cd", "is not text (it holds zero bytes)"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": ""}\n', "holds no text"),
        ("a.jsonl", b'{"text": "abc"}\nabc\n', "line 2 is not readable JSON"),
        ("a.jsonl", b"[1, 2]\n", "line 1 does not hold a JSON object"),
        ("a.jsonl", b'{"prompt": "abc"}\n', "line 1 has no 'turns', 'text' or 'ids'"),
        ("a.jsonl", b'{"turns": []}\n', "line 1 has no 'turns', 'text' or 'ids'"),
        ("a.jsonl", b'{"text": "ab\\ud800"}\n', "line 1 holds half a character"),
        ("a.jsonl", b'{"ids": [1, 256]}\n', "line 1: 256 is not an id of the vocabulary of 256"),
        ("a.jsonl", b'{"ids": [1, -1]}\n', "line 1: -1 is not an id"),
        ("a.jsonl", b'{"ids": [1, "a"]}\n', "line 1: 'a' is not an id"),
        ("a.jsonl", b'{"ids": [true]}\n', "line 1: True is not an id"),
    ],
)
def test_bad_text(refused: Callable[..., str], tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in refused("--data", str(tmp_path / name))


def test_missing_data_and_wrong_numbers(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "none.txt cannot be read (No such file" in refused("--data", str(tmp_path / "none.txt"))
    why = "Is a directory" if os.name == "posix" else "Permission denied"  # the words are the system's
    assert f"{tmp_path} cannot be read ({why})" in refused("--data", str(tmp_path))
    assert "tokens is 0" in refused("--tokens", "0")
    assert "threads is 0" in refused("--threads", "0")


def test_a_bundle_without_tokenizer_takes_ids_only(
    refused: Callable[..., str], bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = bundle_of("eagle1")
    (tmp_path / "a.jsonl").write_text('{"ids": [5, 6, 7]}\n{"text": "abc"}\n')
    words = "but the bundle has no tokenizer.json; give rows of 'ids' as data"
    assert f"the calibration text is text, {words}" in refused(bundle=bundle)
    assert f"line 2 is text, {words}" in refused("--data", str(tmp_path / "a.jsonl"), bundle=bundle)
    (tmp_path / "a.jsonl").write_text('{"ids": [5, 6, 7]}\n')
    out = tmp_path / "out"
    assert main([str(bundle), "-o", str(out), "--threads", "1", "--data", str(tmp_path / "a.jsonl")]) == 0
    assert read_calibration(out).target["lm_head.weight"].rows > 3


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_bundle_of_another_precision(
    refused: Callable[..., str], bundles: dict[str, Path], tmp_path: Path, graph: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["eagle1"], bundle)
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["precision"][graph] = "int8"
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert f"the {graph} is int8; export it in fp32 first" in refused(bundle=bundle)


def test_bad_places(refused: Callable[..., str], bundles: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "notes.txt").touch()
    (tmp_path / "mixed" / "calibration.json").touch()
    (tmp_path / "file").touch()
    assert "holds other files" in refused(output=tmp_path / "full")
    assert "holds other files" in refused(output=tmp_path / "mixed")
    assert "exists and is not a folder" in refused(output=tmp_path / "file")
    assert "none does not exist; create it first" in refused(output=tmp_path / "none" / "out")
    assert "lies in the bundle" in refused(output=bundles["eagle1"] / "calibration")
    assert "lies in the bundle" in refused(output=bundles["eagle1"])
    assert "is not a folder" in refused(bundle=tmp_path / "none")


@needs_links
def test_a_place_that_is_a_link(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "exists and is not a folder" in refused(output=tmp_path / "link")


def test_an_altered_bundle(refused: Callable[..., str], bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["eagle1"], bundle)
    with (bundle / "target" / "model.onnx.data").open("r+b") as file:
        file.write(b"1234")
    assert "model.onnx.data does not match its SHA-256" in refused(bundle=bundle)


def with_weight(bundle: Path, graph: str, weight: str, value: float) -> None:
    """Fills a weight of a bundle, and updates the hash in the manifest."""
    data = bundle / graph / "model.onnx.data"
    model = onnx.load(str(bundle / graph / "model.onnx"), load_external_data=False)
    (tensor,) = (item for item in model.graph.initializer if item.name == weight)
    place = {entry.key: entry.value for entry in tensor.external_data}
    with data.open("r+b") as file:
        file.seek(int(place["offset"]))
        file.write(np.full(int(place["length"]) // 4, value, np.float32).tobytes())
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["files"][f"{graph}/model.onnx.data"] = file_sha256(data)
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("graph", "weight", "value", "words"),
    [
        ("target", "model.layers.3.mlp.up_proj.weight", np.nan, "model.layers.3.mlp.down_proj.weight holds values"),
        ("target", "model.layers.3.mlp.up_proj.weight", np.inf, "model.layers.3.mlp.down_proj.weight holds values"),
        ("target", "model.layers.3.mlp.gate_proj.weight", 0, "model.layers.3.mlp.down_proj.weight is zero throughout"),
        ("draft", "head.layers.0.mlp.up_proj.weight", np.nan, "head.layers.0.mlp.down_proj.weight holds values"),
        ("draft", "head.layers.0.mlp.gate_proj.weight", 0, "head.layers.0.mlp.down_proj.weight is zero throughout"),
    ],
)
def test_layers_without_a_range_are_named(
    refused: Callable[..., str],
    bundles: dict[str, Path],
    tmp_path: Path,
    graph: str,
    weight: str,
    value: float,
    words: str,
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["eagle1"], bundle)
    with_weight(bundle, graph, weight, value)
    assert f"{Path(graph, 'model.onnx')}: the input of {words}" in refused("--tokens", "8", bundle=bundle)


def test_a_full_disk_loses_nothing(
    refused: Callable[..., str], bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(bundles["eagle1"]), "-o", str(out), "--threads", "1", "--tokens", "8"]) == 0
    capsys.readouterr()
    before = read_calibration(out).target
    with largest_file(100_000):
        message = refused("--tokens", "8", output=out)
    assert "could not be written" in message and "no files were left" in message
    after = read_calibration(out).target
    assert {name: item.rows for name, item in after.items()} == {name: item.rows for name, item in before.items()}
