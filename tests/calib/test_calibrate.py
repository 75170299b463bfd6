"""eagle-calib on the golden pair: what it writes against a plain run that fetches everything, and what it refuses."""

from __future__ import annotations

import json
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from conftest import put_tokenizer
from eagle_calib.calibrate import NEW_TOKENS, WINDOW, decode_windows
from eagle_calib.calibration import GRAPHS, Float, Observed, read_calibration
from eagle_calib.cli import main
from eagle_calib.observe import SAMPLE_ROWS, InputStatistics, ObservingSession
from eagle_calib.texts import read_windows
from eagle_export.recipes.graph import linears
from eagle_runtime.bundle.manifest import MANIFEST_NAME, GraphSpec, read_manifest
from eagle_runtime.cache import Cache, KVCache
from eagle_runtime.files import file_sha256
from eagle_runtime.session.ort.session import OrtSession
from eagle_runtime.session.protocol import Array
from eagle_runtime.text.tokenizer import Text
from fakes import rows_of

MAX_TOKENS = WINDOW + 64
ARGUMENTS = ("--threads", "1", "--max-tokens", str(MAX_TOKENS))
KINDS = ("eagle1", "eagle3")
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def bundles(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> bundle that takes text."""
    base = tmp_path_factory.mktemp("bundles")
    for kind in KINDS:
        shutil.copytree(bundle_of(kind), base / kind)
        put_tokenizer(base / kind)
    return {kind: base / kind for kind in KINDS}


@pytest.fixture(scope="module")
def calibrations(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> calibration on the text that comes along, made by the command."""
    base = tmp_path_factory.mktemp("calibrations")
    for kind, bundle in bundles.items():
        assert main([str(bundle), "-o", str(base / kind), *ARGUMENTS]) == 0
    return {kind: base / kind for kind in bundles}


class Recorder:
    """A Session that works on the bundle's own graph, and keeps what a plain engine says of its linear layers."""

    def __init__(self, path: Path, spec: GraphSpec) -> None:
        self._session = OrtSession(path, spec, threads=1)
        self.inputs, self.outputs = self._session.inputs, self._session.outputs
        model = ir.load(path)
        self.layers = {linear.name: str(linear.x.name) for linear in linears(model)}
        for linear in linears(model):
            if linear.x not in model.graph.outputs:
                model.graph.outputs.append(linear.x)
        ir.save(model, path.with_name("all.onnx"))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._all = ort.InferenceSession(str(path.with_name("all.onnx")), options)
        self._kept: dict[str, list[Float]] = {tensor: [] for tensor in self.layers.values()}

    def new_cache(self, capacity: int) -> Cache:
        return self._session.new_cache(capacity)

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        ranks = {name: len(spec.shape) for name, spec in self.inputs.items()}
        batch = {name: value.reshape((1,) * (ranks[name] - value.ndim) + value.shape) for name, value in feeds.items()}
        past = {
            f"past_key_values.{layer}.{part}": cache.rows[2 * layer + half][None, : cache.length]
            for layer in range(cache.layers)
            for half, part in enumerate(("key", "value"))
        }
        for tensor, value in zip(self._kept, self._all.run(list(self._kept), {**batch, **past}), strict=True):
            self._kept[tensor].append(value.reshape(-1, value.shape[-1]).copy())
        return self._session.run(feeds, cache)

    def joined(self, parts: Sequence[Array]) -> Array:
        return self._session.joined(parts)

    def rows(self, weight: str) -> Float:
        """All that the layer was fed: [rows, K]."""
        return np.concatenate(self._kept[self.layers[weight]])

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check(observed: Observed, rows: Float) -> None:
    """Figures of a layer against the rows it was fed."""
    magnitudes = np.abs(rows)
    absmax = float(magnitudes.max())
    assert observed.rows == len(rows)
    np.testing.assert_allclose(observed.channel_absmax, magnitudes.max(axis=0), rtol=1e-4, atol=1e-6)
    assert len(observed.sample) == min(SAMPLE_ROWS, len(rows))
    for row in observed.sample[::32]:
        assert np.abs(rows - row).max(axis=1).min() <= 1e-4 * absmax


def test_the_sample_is_spread_over_all_rows() -> None:
    rows = np.repeat(np.arange(1, 20_001, dtype=np.float32)[:, None], 3, axis=1)
    one, two = InputStatistics("x", 3), InputStatistics("x", 3)
    for start, end in pairwise([0, 7, 200, 300, 5000, 5001, 19_000, 20_000]):
        one.add(rows[start:end])
        two.add(rows[start:end])
    sample = one.observed().sample
    np.testing.assert_array_equal(sample, two.observed().sample)
    assert sample.shape == (SAMPLE_ROWS, 3) and len(np.unique(sample[:, 0])) == SAMPLE_ROWS
    tenths, _ = np.histogram(sample[:, 0], 10, (0, 20_000))
    expected, deviation = SAMPLE_ROWS / 10, np.sqrt(SAMPLE_ROWS * 0.1 * 0.9)
    assert np.abs(tenths - expected).max() <= 4 * deviation
    few = InputStatistics("x", 3)
    few.add(rows[:5])
    np.testing.assert_array_equal(few.observed().sample, rows[:5])


@kinds
def test_figures_are_those_of_a_run_with_all_outputs_fetched(
    bundles: dict[str, Path], calibrations: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles[kind], bundle)
    manifest = read_manifest(bundle)
    windows = read_windows(None, Text(bundle), manifest.target.vocab_size, WINDOW, MAX_TOKENS)
    assert list(map(len, windows)) == [WINDOW, MAX_TOKENS - WINDOW]
    specs = {name: model.graph for name, model in manifest.models.items()}
    found = read_calibration(calibrations[kind])
    with (
        Recorder(bundle / specs["target"].file, specs["target"]) as target,
        Recorder(bundle / specs["draft"].file, specs["draft"]) as head,
    ):
        counts = np.zeros(manifest.target.vocab_size, np.int64)
        tokens = decode_windows(manifest, target, head, windows, counts)
        for layers, recorder in ((found.target, target), (found.draft, head)):
            assert set(layers) == set(recorder.layers)
            for weight, observed in layers.items():
                check(observed, recorder.rows(weight))
    np.testing.assert_array_equal(found.token_counts, counts)
    text = np.bincount(np.concatenate(windows), minlength=len(counts))
    assert (counts >= text).all() and counts.sum() > text.sum()  # what was decoded counts too
    listed = json.loads((calibrations[kind] / "calibration.json").read_text())
    assert listed["tokens"] == {"prefilled": tokens.prefilled, "verified": tokens.verified}
    assert listed["bundle"] == file_sha256(bundles[kind] / MANIFEST_NAME)
    assert listed["tools"]["onnxruntime"] == ort.__version__


@kinds
def test_trees_were_seen_beside_prompts(calibrations: dict[str, Path], kind: str) -> None:
    found = read_calibration(calibrations[kind])
    tokens = json.loads((calibrations[kind] / "calibration.json").read_text())["tokens"]
    assert tokens["prefilled"] == MAX_TOKENS and tokens["verified"] >= 4 * 60
    down = found.target["model.layers.7.mlp.down_proj.weight"]
    assert down.rows == MAX_TOKENS + tokens["verified"]
    assert found.target["lm_head.weight"].rows == 2 + tokens["verified"]  # one row of each prompt
    committed = MAX_TOKENS + 2 * NEW_TOKENS  # no more than these
    trees = tokens["verified"] // 60
    grown = trees * 5 * 10  # five levels of ten
    for name, observed in found.draft.items():
        if name.endswith(("fc.weight", "k_proj.weight", "v_proj.weight")):  # of every row
            assert MAX_TOKENS + grown <= observed.rows <= committed + grown
        else:  # of those that children are wanted of
            assert observed.rows == trees + grown


@kinds
def test_layers_of_one_input_share_what_was_observed(calibrations: dict[str, Path], kind: str) -> None:
    target = read_calibration(calibrations[kind]).target
    q, k, v, o = (target[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkvo")
    assert q is k is v and o is not q
    gate, up, down = (target[f"model.layers.3.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert gate is up and down.sample.shape == (SAMPLE_ROWS, 160)


def test_the_graph_works_as_without_an_observer(bundles: dict[str, Path]) -> None:
    manifest = read_manifest(bundles["eagle1"])
    spec = manifest.target.graph
    feeds: dict[str, Array] = {
        "input_ids": np.arange(5, 25),
        "position_ids": np.arange(20),
        "tree_mask": np.triu(np.full((20, 20), np.finfo(np.float32).min, np.float32), 1),
        "logit_rows": np.arange(20),
    }
    path = bundles["eagle1"] / spec.file
    with OrtSession(path, spec, 1) as plain, ObservingSession(path, spec, 1) as watched:
        assert (plain.inputs, plain.outputs) == (watched.inputs, watched.outputs)
        caches = [plain.new_cache(20), plain.new_cache(20)]
        wanted, found = plain.run(feeds, caches[0]), watched.run(feeds, caches[1])
        assert wanted.keys() == found.keys()
        pairs: list[tuple[Any, Any]] = [(found[name], wanted[name]) for name in wanted]
        for one, other in [*pairs, (rows_of(caches[1]), rows_of(caches[0]))]:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_equal_input_gives_equal_bytes_and_leaves_the_bundle_alone(
    bundles: dict[str, Path], calibrations: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["eagle1"], bundle)
    before = {path: file_sha256(path) for path in bundle.rglob("*") if path.is_file()}
    assert main([str(bundle), "-o", str(tmp_path / "again"), *ARGUMENTS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path: file_sha256(path) for path in bundle.rglob("*") if path.is_file()} == before
    for name in ("calibration.json", "calibration.npz"):
        assert (tmp_path / "again" / name).read_bytes() == (calibrations["eagle1"] / name).read_bytes()
    with zipfile.ZipFile(tmp_path / "again" / "calibration.npz") as arrays:
        assert {item.date_time for item in arrays.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    found = read_calibration(tmp_path / "again")
    assert (report["target"]["layers"], report["target"]["inputs"]) == (len(found.target), 33)
    assert (report["draft"]["layers"], report["draft"]["inputs"]) == (len(found.draft), 7)
    assert report["draft"]["rows"] == found.draft["head.fc.weight"].rows
    assert report["tokens"]["prefilled"] == MAX_TOKENS


def test_report_names_tokens_layers_and_rows(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question_id": 1, "turns": ["Q: hi", "and?"]}\n{"text": "abc"}\n{"ids": [5, 6]}\n')
    out = tmp_path / "out"
    assert main([str(bundles["eagle3"]), "-o", str(out), "--data", str(data), "--threads", "1"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    verified = json.loads((out / "calibration.json").read_text())["tokens"]["verified"]
    assert lines[0] == f"{out}: 10 tokens of text, {verified} tree nodes verified"
    assert lines[1] == f"target 58 layers, 34 inputs, {10 + verified} rows"
    assert lines[2].startswith("draft  8 layers, 6 inputs, ") and printed.err == ""


def test_an_existing_calibration_is_replaced(bundles: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    for text in ("First text.", "Another one, longer."):
        data.write_text(text)
        out = tmp_path / "out"
        assert main([str(bundles["eagle1"]), "-o", str(out), "--data", str(data), "--threads", "1"]) == 0
        listed = json.loads((out / "calibration.json").read_text())
        assert listed["tokens"]["prefilled"] == len(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "out"]


# --- refusals ---


@pytest.fixture
def refused(bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, which must fail without a trace but one line, and returns that line."""

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
        ("a.txt", "Käse".encode("latin-1"), "not UTF-8 text (byte 1)"),
        ("a.txt", b"ab\0cd", "is not text (it holds zero bytes)"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": ""}\n', "holds no text"),
        ("a.jsonl", b'{"text": "abc"}\nabc\n', "line 2 is not readable JSON"),
        ("a.jsonl", b"[1, 2]\n", "line 1 holds no JSON object"),
        ("a.jsonl", b'{"prompt": "abc"}\n', "line 1 has no 'turns', 'text' or 'ids'"),
        ("a.jsonl", b'{"turns": []}\n', "line 1 has no 'turns', 'text' or 'ids'"),
        ("a.jsonl", b'{"text": "ab\\ud800"}\n', "line 1 holds half a character"),
        ("a.jsonl", b'{"ids": [1, 256]}\n', "line 1: 256 is no id of the vocabulary of 256"),
        ("a.jsonl", b'{"ids": [1, -1]}\n', "line 1: -1 is no id"),
        ("a.jsonl", b'{"ids": [1, "a"]}\n', "line 1: 'a' is no id"),
        ("a.jsonl", b'{"ids": [true]}\n', "line 1: True is no id"),
    ],
)
def test_bad_text(refused: Callable[..., str], tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in refused("--data", str(tmp_path / name))


def test_missing_data_and_wrong_numbers(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "none.txt cannot be read (No such file" in refused("--data", str(tmp_path / "none.txt"))
    assert f"{tmp_path} cannot be read (Is a directory)" in refused("--data", str(tmp_path))
    assert "max-tokens is 0" in refused("--max-tokens", "0")
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
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
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
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "holds other files" in refused(output=tmp_path / "full")
    assert "holds other files" in refused(output=tmp_path / "mixed")
    assert "exists and is no folder" in refused(output=tmp_path / "file")
    assert "exists and is no folder" in refused(output=tmp_path / "link")
    assert "none does not exist; create it first" in refused(output=tmp_path / "none" / "out")
    assert "lies in the bundle" in refused(output=bundles["eagle1"] / "calibration")
    assert "lies in the bundle" in refused(output=bundles["eagle1"])
    assert "is not a folder" in refused(bundle=tmp_path / "none")


def test_an_altered_bundle(refused: Callable[..., str], bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["eagle1"], bundle)
    with (bundle / "target" / "model.onnx.data").open("r+b") as file:
        file.write(b"1234")
    assert "model.onnx.data does not match its SHA-256" in refused(bundle=bundle)


def with_weight(bundle: Path, graph: str, weight: str, value: float) -> None:
    """Fill a weight of a bundle, and let the manifest agree."""
    data = bundle / graph / "model.onnx.data"
    model = onnx.load(str(bundle / graph / "model.onnx"), load_external_data=False)
    (tensor,) = (item for item in model.graph.initializer if item.name == weight)
    place = {entry.key: entry.value for entry in tensor.external_data}
    with data.open("r+b") as file:
        file.seek(int(place["offset"]))
        file.write(np.full(int(place["length"]) // 4, value, np.float32).tobytes())
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
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
    assert f"{graph}/model.onnx: the input of {words}" in refused("--max-tokens", "8", bundle=bundle)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to write files beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(refused: Callable[..., str], calibrations: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(calibrations["eagle1"], out)
    before = read_calibration(out).target
    with file_size_limit(100_000):
        said = refused("--max-tokens", "8", output=out)
    assert "could not be written" in said and "nothing was left behind" in said
    after = read_calibration(out).target
    assert {name: item.rows for name, item in after.items()} == {name: item.rows for name, item in before.items()}
