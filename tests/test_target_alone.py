"""A bundle of the golden target without a head: decodes by lookup, and every command works on it or says why not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import GOLDEN, HEADS, put_tokenizer
from eagle_calib.calibration import Calibration, read_calibration
from eagle_calib.cli import main as calib_main
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking.certificate import compare_with_source
from eagle_export.commands.cli import main as export_main
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.commands.cli import main as run_main
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.cost_model import Costs
from eagle_runtime.drafting.cost_storage import LearnedCosts
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.drafting.methods import default_method
from eagle_runtime.drafting.shapes import DynamicTree
from eagle_runtime.opening.opened import HABITS_PAY_S
from eagle_runtime.ort.buffers import OrtMemory
from eagle_runtime.ort.device_session import OrtDeviceSession
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.session import OrtSession
from eagle_tools.compare_engines import compare_sessions
from eagle_tools.doctor import main as doctor_main
from eagle_tools.precision.speed import NODES, BundleAnswers, time_models
from eagle_tools.questions import Question
from insides import bundle_in, sessions_of

TARGET = GOLDEN / "target"


@pytest.fixture(autouse=True)
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of earlier runs."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "no costs yet"))


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes text."""
    folder = tmp_path_factory.mktemp("alone") / "bundle"
    shutil.copytree(bundle_of("alone"), folder)
    put_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def calibration(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration") / "alone"
    assert calib_main([str(bundle), "-o", str(folder), "--threads", "1", "--tokens", "300"]) == 0
    return folder


def forbid_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at(costs: LearnedCosts) -> Costs:
        raise AssertionError("trees were sized by costs")

    monkeypatch.setattr(LearnedCosts, "now", property(looked_at))


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("tree", [None, "chain"])
def test_lookup_says_what_the_target_says(
    tree: str | None, precision: str, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    model = model_of("alone", precision)
    cycles: list[Cycle] = []
    for prompt in [*prompts[5:7], [5, 6, 7, 8] * 4]:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
            settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
            drafted = model.generate(prompt, tree=tree, on_cycle=cycles.append, **settings)
            assert drafted.token_ids == model.generate(prompt, method="vanilla", **settings).token_ids
            assert drafted.usage.method == "lookup"
    assert sum(cycle.step.num_accepted for cycle in cycles) > 20


def test_it_has_no_part_of_a_head(bundle: Path, model_of: Callable[..., EagleModel]) -> None:
    manifest = read_manifest(bundle)
    assert manifest.head is None and manifest.precision == {"target": "fp32"} and list(manifest.models) == ["target"]
    assert manifest.target.graph.outputs["features"].shape == (1, "T", manifest.target.hidden_size)
    assert not (bundle / "draft").exists() and all(not name.startswith("draft/") for name in manifest.files)
    model = model_of("alone")
    assert len(sessions_of(model)) == 1 and model.default_method == "lookup"
    assert model_of("eagle1").default_method == "eagle+lookup"


def test_habits_are_the_default_where_passes_take_long(model_of: Callable[..., EagleModel]) -> None:
    def default(name: str, **changed: Any) -> str:
        return default_method(dataclasses.replace(bundle_in(model_of(name)), **changed).loaded).name

    assert default("alone", pass_s=HABITS_PAY_S) == "recycling" and default("alone", pass_s=0.009) == "lookup"
    assert default("alone", pass_s=1.0, datastore=Datastore([[1, 2, 3]])) == "lookup"
    assert default("eagle1", pass_s=1.0) == "eagle+lookup"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "eagle"}, "the bundle has no draft head; use method .* or vanilla, or export"),
        ({"method": "eagle+lookup"}, "the bundle has no draft head"),
        ({"tree": DynamicTree()}, "the bundle has no draft head"),
        ({"tree": "dynamic"}, "method lookup does not draft a dynamic tree"),
        ({"method": "lookup", "tree": "static"}, "method lookup does not draft a static tree"),
        ({"method": "eagle3"}, "method is 'eagle3', but must be one of"),
    ],
)
def test_what_needs_a_head_is_refused(settings: dict[str, Any], says: str, model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match=says):
        model_of("alone").stream([5, 6, 7], **settings)


def test_the_command_decodes_and_refuses(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(bundle), "--prompt", "one two one two one", "--max-new-tokens", "8", "--threads", "1"]
    assert run_main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["method"] == "lookup"
    assert run_main([*argv, "--method", "eagle"]) == 2
    assert "the bundle has no draft head" in only_line(capsys)


@pytest.mark.parametrize("option", ["--draft-precision=int8", "--draft-vocab=40", "--head-top-k=4"])
def test_options_of_a_head_are_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export_main([str(TARGET), "-o", str(tmp_path / "b"), option]) == 2
    assert "draft precision, vocabulary and top-k are settings of a head" in only_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_and_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither looks at what passes cost: what they say must not depend on the machine."""
    forbid_costs(monkeypatch)
    assert export_main([str(TARGET), "-o", str(tmp_path / "b"), "-p", "int8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["head"] is report["taps"] is report["draft_vocab_size"] is None and report["shared_weights"] == []
    assert report["warnings"] and all("certificate" not in warning for warning in report["warnings"])
    assert report["certificate"]["tau"] >= 1 and report["certificate"]["agreement"] > 0.9
    assert doctor_main([str(tmp_path / "b"), "--backend", "cpu", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["lossless"]["ok"] and checks["tau"]["ok"] and checks["tau"]["measured"] >= 1
    assert checks["engine"]["says"].startswith("cpu: no draft head, int8, loaded")


def test_tau_with_a_head_does_not_depend_on_costs(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the bundle's own trees are sized by them."""
    folder = Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "b"))
    data = json.loads((folder / MANIFEST_NAME).read_text())
    data["tree_defaults"]["tree"] = "cost-aware"
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    forbid_costs(monkeypatch)
    assert compare_with_source(open_checkpoint(TARGET), folder, read_manifest(folder)).certificate.tau > 1.5


def test_calibration_sees_prompts_and_looked_up_chains(bundle: Path, calibration: Path) -> None:
    stored: Calibration = read_calibration(calibration)
    listed = json.loads((calibration / "calibration.json").read_text())
    assert stored.draft == {} and listed["draft"] == []
    layers = {name for name, spec in read_manifest(bundle).target.graph.weights.items() if len(spec.shape) == 2}
    assert {name.rpartition(".")[0] for name in stored.target} <= {name.rpartition(".")[0] for name in layers}
    assert len(stored.target) >= 7 * 8 + 1
    tokens = listed["tokens"]
    assert tokens["prefilled"] == 300
    decoded = int(np.sum(stored.token_counts)) - tokens["prefilled"]
    assert tokens["verified"] > decoded, "a chain that was rejected has more nodes than it brought tokens"


@pytest.mark.parametrize("precision", ["int8-static", "int4"])
def test_calibrated_precisions(precision: str, calibration: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    done = export(TARGET, None, tmp_path / "b", Settings(precision=precision, calibration=calibration, certify=False))
    assert done.shared == () and done.manifest.precision == {"target": precision}
    with EagleModel.load(done.bundle, threads=1) as model:
        nodes: list[int] = []
        for prompt in prompts[5:7]:
            settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
            drafted = model.generate(
                prompt, tree="chain", on_cycle=lambda cycle: nodes.append(cycle.tree.num_nodes), **settings
            )
            assert drafted.token_ids == model.generate(prompt, method="vanilla", **settings).token_ids
        assert max(nodes) == 7


def test_a_calibration_of_the_target_alone_is_none_of_a_pair(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="the calibration lacks layer"):
        export(
            TARGET, GOLDEN / HEADS["eagle1"], tmp_path / "b", Settings(precision="int8-static", calibration=calibration)
        )


def test_engines_are_compared_without_a_head(bundle: Path) -> None:
    graph = read_manifest(bundle).target.graph
    with OrtSession(bundle / graph.file, graph, 1) as host:
        device = OrtDeviceSession(open_graph(bundle / graph.file, threads=1), bundle / graph.file, graph, OrtMemory())
        differences = compare_sessions((host,), (device,), 256, [[5, 17, 3, 60]])
    assert [(each.graph, each.output) for each in differences] == [("target", "logits"), ("target", "features")]
    assert all(each.largest <= 1e-4 * each.scale for each in differences)


def test_its_speed_is_measured(bundle: Path) -> None:
    text = "one two three, one two three, one two three, one two"
    with EagleModel.load(bundle, threads=1) as model:
        (speed,) = time_models([BundleAnswers(model)], [Question(0, (text,))], 24)
    assert speed.target_passes <= speed.new_tokens and speed.passes[NODES] and speed.passes[1]
