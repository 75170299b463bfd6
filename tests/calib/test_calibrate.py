"""eagle-calib on the golden pair: what it writes, compared with a plain run that fetches all tensors."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from block_writers import deepspec
from conftest import GOLDEN, load_trace, put_tokenizer
from eagle_calib.calibrate import NEW_TOKENS, WINDOW, decode_windows
from eagle_calib.calibration import Float, Observed, read_calibration
from eagle_calib.cli import main
from eagle_calib.observe import SAMPLE_ROWS, InputStatistics, ObservingSession, SampleFile
from eagle_calib.texts import read_windows
from eagle_export.bundle import export
from eagle_export.recipes.graph import linears
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import MANIFEST_NAME, GraphSpec, read_manifest
from eagle_runtime.core.cache import Cache, KVCache
from eagle_runtime.core.session import Array, Session
from eagle_runtime.ort.session import OrtSession
from eagle_runtime.text.tokenizer import Text
from fakes import rows_of
from onnx_session import open_model

MAX_TOKENS = WINDOW + 64
ARGUMENTS = ("--threads", "1", "--tokens", str(MAX_TOKENS))
KINDS = ("eagle1", "eagle3")
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def bundles(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of head -> bundle with a tokenizer."""
    base = tmp_path_factory.mktemp("bundles")
    for kind in KINDS:
        shutil.copytree(bundle_of(kind), base / kind)
        put_tokenizer(base / kind)
    return {kind: base / kind for kind in KINDS}


@pytest.fixture(scope="module")
def calibrations(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of head -> calibration on the package's text, made by the command."""
    base = tmp_path_factory.mktemp("calibrations")
    for kind, bundle in bundles.items():
        assert main([str(bundle), "-o", str(base / kind), *ARGUMENTS]) == 0
    return {kind: base / kind for kind in bundles}


class Recorder(Session):
    """A Session that runs the bundle's own graph, and keeps the inputs of its linear layers from a plain engine."""

    def __init__(self, path: Path, spec: GraphSpec) -> None:
        self._session = OrtSession(path, spec, threads=1)
        self.inputs, self.outputs = self._session.inputs, self._session.outputs
        model = ir.load(path)
        self.layers = {linear.name: str(linear.x.name) for linear in linears(model)}
        for linear in linears(model):
            if linear.x not in model.graph.outputs:
                model.graph.outputs.append(linear.x)
        ir.save(model, path.with_name("all.onnx"))
        self._all = open_model(path.with_name("all.onnx"))
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

    def rows(self, weight: str) -> Float:
        """All inputs of the layer: [rows, K]."""
        return np.concatenate(self._kept[self.layers[weight]])

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(observed: Observed, rows: Float) -> None:
    """Compares the statistics of a layer with all rows of its input."""
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


@pytest.mark.parametrize("largest", [1.0, 1e6])
def test_a_sample_in_a_file_is_that_in_memory(largest: float, tmp_path: Path) -> None:
    """Also where rows go on in fp32, because one is beyond fp16."""
    rows = np.random.default_rng(3).normal(size=(400, 5)).astype(np.float32)
    rows[150] *= largest
    with SampleFile(tmp_path) as file:
        pairs = [
            (InputStatistics("x", 5, 300, half=True), InputStatistics("x", 5, 300, half=True, file=file))
            for _ in range(2)
        ]
        for start, end in pairwise([0, 100, 110, 290, 400]):
            for index, pair in enumerate(pairs):
                for each in pair:
                    each.add(rows[start:end] * (index + 1))
        for memory, filed in pairs:
            one, two = memory.observed(), filed.observed()
            np.testing.assert_array_equal(one.sample, two.sample)
            assert one.sample.dtype == two.sample.dtype == (np.float32 if largest > 1e5 else np.float16)
            assert one.rows == two.rows == 400 and len(two.sample) == 300
    assert not list(tmp_path.iterdir())


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
    calibration = read_calibration(calibrations[kind])
    with (
        Recorder(bundle / specs["target"].file, specs["target"]) as target,
        Recorder(bundle / specs["draft"].file, specs["draft"]) as head,
    ):
        counts = np.zeros(manifest.target.vocab_size, np.int64)
        tokens = decode_windows(manifest, target, head, windows, counts)
        for layers, recorder in ((calibration.target, target), (calibration.draft, head)):
            assert set(layers) == set(recorder.layers)
            for weight, observed in layers.items():
                check(observed, recorder.rows(weight))
    np.testing.assert_array_equal(calibration.token_counts, counts)
    text = np.bincount(np.concatenate(windows), minlength=len(counts))
    assert (counts >= text).all() and counts.sum() > text.sum()  # decoded tokens count too
    listed = json.loads((calibrations[kind] / "calibration.json").read_text(encoding="utf-8"))
    assert listed["tokens"] == {"prefilled": tokens.prefilled, "verified": tokens.verified}
    assert listed["bundle"] == file_sha256(bundles[kind] / MANIFEST_NAME)
    assert listed["tools"]["onnxruntime"] == ort.__version__


@kinds
def test_prompts_and_trees_were_observed(calibrations: dict[str, Path], kind: str) -> None:
    calibration = read_calibration(calibrations[kind])
    tokens = json.loads((calibrations[kind] / "calibration.json").read_text(encoding="utf-8"))["tokens"]
    assert tokens["prefilled"] == MAX_TOKENS and tokens["verified"] >= 4 * 60
    down = calibration.target["model.layers.7.mlp.down_proj.weight"]
    assert down.rows == MAX_TOKENS + tokens["verified"]
    assert calibration.target["lm_head.weight"].rows == 2 + tokens["verified"]  # one row of each prompt
    committed = MAX_TOKENS + 2 * NEW_TOKENS  # at most
    trees = tokens["verified"] // 60
    grown = trees * 5 * 10  # five levels of ten
    for name, observed in calibration.draft.items():
        if name.endswith(("fc.weight", "k_proj.weight", "v_proj.weight")):  # computed for every row
            assert MAX_TOKENS + grown <= observed.rows <= committed + grown
        else:  # computed for rows whose children are needed
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
        expected, outputs = plain.run(feeds, caches[0]), watched.run(feeds, caches[1])
        assert expected.keys() == outputs.keys()
        pairs: list[tuple[Any, Any]] = [(outputs[name], expected[name]) for name in expected]
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
    calibration = read_calibration(tmp_path / "again")
    assert (report["target"]["layers"], report["target"]["inputs"]) == (len(calibration.target), 33)
    assert (report["draft"]["layers"], report["draft"]["inputs"]) == (len(calibration.draft), 7)
    assert report["draft"]["rows"] == calibration.draft["head.fc.weight"].rows
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
    verified = json.loads((out / "calibration.json").read_text(encoding="utf-8"))["tokens"]["verified"]
    assert lines[0] == f"{out}: 10 tokens of text, {verified} tree nodes verified"
    assert lines[1] == f"target 58 layers, 34 inputs, {10 + verified} rows"
    assert lines[2].startswith("draft  8 layers, 6 inputs, ") and printed.err == ""


def test_an_existing_calibration_is_replaced(bundles: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    for text in ("First text.", "Another one, longer."):
        data.write_text(text)
        out = tmp_path / "out"
        assert main([str(bundles["eagle1"]), "-o", str(out), "--data", str(data), "--threads", "1"]) == 0
        listed = json.loads((out / "calibration.json").read_text(encoding="utf-8"))
        assert listed["tokens"]["prefilled"] == len(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "out"]


def test_a_block_head_is_recorded_and_exported_in_static_int8(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    rows = load_trace("eagle2_tt16_d3_k4")["prompts"][:3]
    data.write_text("".join(json.dumps({"ids": row["prompt_ids"] + row["first_64"]}) + "\n" for row in rows))
    assert main([str(bundle_of("deepspec")), "-o", str(tmp_path / "c"), "--data", str(data), "--threads", "1"]) == 0
    head = read_calibration(tmp_path / "c").draft
    of_a_layer = {f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.split(".")[-2] + ".weight" for name in head} == of_a_layer | {"lm_head.weight"}
    written = deepspec().write(tmp_path / "head")
    export(
        GOLDEN / "target",
        written,
        tmp_path / "static",
        Settings(precision="int8-static", calibration=tmp_path / "c", certify=False),
    )
    with EagleModel.load(tmp_path / "static", threads=1) as model:
        assert model.manifest.precision == {"target": "int8-static", "draft": "int8-static"}
        for temperature in (0, 1):
            plain, drafted = (
                model.generate(rows[0]["prompt_ids"], max_new_tokens=24, temperature=temperature, method=method)
                for method in ("vanilla", "eagle")
            )
            assert drafted.token_ids == plain.token_ids
