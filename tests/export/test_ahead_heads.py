"""Medusa's and Hydra's heads: their authors' folders are read, and the graphs compute what the authors' modules do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ahead_writers import Hydra, embedding_of, fitted_medusa, medusa, seeded, vllm_names, write_hydra, write_medusa
from conftest import GOLDEN, load_trace
from eagle_calib.calibrate import calibrate
from eagle_calib.errors import CalibrationError
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import build_graphs, open_pair
from eagle_export.graphs.weights import save
from eagle_export.inspection.report import inspect
from eagle_export.reading.families.source import load_source
from eagle_export.recording.source_text import Written
from eagle_export.tensorrt.build import build_engines
from eagle_export.writing.settings import Settings
from greedy_texts import check_head
from systems import read_tensors

TARGET = GOLDEN / "target"
WIDTH, VOCAB, HEADS, TOP_K = 64, 256, 3, 8


def proposals(target: Path, head: Path, folder: Path, feeds: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """What the exported draft graph returns."""
    graph = build_graphs(open_pair(target, head), "fp32", TOP_K)["draft"]
    save(graph, folder / "draft.onnx")
    session = ort.InferenceSession(str(folder / "draft.onnx"), providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray[Any, Any]] = session.run(None, feeds)
    return outputs


def check_rows(log_probs: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], logits: Tensor) -> None:
    """log_probs, ids [R, k]: of a graph; logits [R, V]: of a reference."""
    wanted = logits.log_softmax(-1).topk(TOP_K)
    np.testing.assert_allclose(log_probs, wanted.values.detach().numpy(), atol=1e-5)
    np.testing.assert_array_equal(ids, wanted.indices.numpy())


def check_medusa(target: Path, head: Path, folder: Path, heads: nn.ModuleList) -> None:
    feature = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    log_probs, ids = proposals(target, head, folder, {"features": feature.numpy()})
    assert log_probs.shape == (1, HEADS, TOP_K)
    check_rows(log_probs[0], ids[0], torch.cat([head(feature[0]) for head in heads]))


@pytest.mark.parametrize(("pickled", "blocks"), [(True, 1), (False, 2)])
def test_medusas_graph_computes_what_its_authors_module_does(tmp_path: Path, pickled: bool, blocks: int) -> None:
    heads = seeded(medusa, WIDTH, VOCAB, HEADS, blocks)
    check_medusa(TARGET, write_medusa(tmp_path / "head", heads, pickled=pickled), tmp_path, heads)


def test_medusa_under_vllms_names(tmp_path: Path) -> None:
    heads = seeded(medusa, WIDTH, VOCAB, HEADS)
    folder = write_medusa(tmp_path / "head", heads)
    tensors = vllm_names(read_tensors(folder / "medusa_lm_head.safetensors"), 1)
    (folder / "medusa_lm_head.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 1, "architectures": ["MedusaModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_pair(TARGET, folder).head.layout.producer == "vLLM Medusa"  # type: ignore[union-attr]
    check_medusa(TARGET, folder, tmp_path, heads)


def test_medusa_in_its_targets_checkpoint(tmp_path: Path) -> None:
    heads = seeded(medusa, WIDTH, VOCAB, HEADS)
    folder = shutil.copytree(TARGET, tmp_path / "both")
    tensors = read_tensors(folder / "model.safetensors")
    save_file(
        tensors | {f"medusa_head.{name}": tensor.clone() for name, tensor in heads.state_dict().items()},
        folder / "model.safetensors",
    )
    check_medusa(folder, folder, tmp_path, heads)
    assert open_pair(folder, None).target.tensors.keys() == tensors.keys()


def test_heads_without_lm_heads_have_the_targets(tmp_path: Path) -> None:
    heads = seeded(medusa, WIDTH, VOCAB, HEADS)
    lm_head = load_file(TARGET / "model.safetensors")["lm_head.weight"].float()
    for head in heads:
        head[1].weight.data.copy_(lm_head)
    folder = write_medusa(tmp_path / "head", heads)
    kept = {n: t for n, t in read_tensors(folder / "medusa_lm_head.safetensors").items() if ".linear." in n}
    save_file(kept, folder / "medusa_lm_head.safetensors")
    check_medusa(TARGET, folder, tmp_path, heads)


@pytest.mark.parametrize("blocks", [1, 2])
def test_hydras_graph_computes_what_its_authors_module_does(tmp_path: Path, blocks: int) -> None:
    heads = seeded(Hydra, embedding_of(TARGET), VOCAB, HEADS, blocks)
    folder = write_hydra(tmp_path / "head", heads)
    random = torch.Generator().manual_seed(2)
    features, ids = torch.randn(1, 6, WIDTH, generator=random), torch.randint(VOCAB, (1, 6), generator=random)
    logits = heads(features, ids)
    at = 1  # a row after which there are tokens for all heads
    feeds = {"features": features[:, at : at + 1].numpy()}
    paths = [ids[:, None, at + 1 : at + 2 + depth].numpy() for depth in range(HEADS)]
    outputs = proposals(TARGET, folder, tmp_path, feeds | {f"paths.{d}": path for d, path in enumerate(paths)})
    for depth in range(HEADS):
        check_rows(outputs[depth][0], outputs[HEADS + depth][0], logits[depth][0, at : at + 1])
    session = ort.InferenceSession(str(tmp_path / "draft.onnx"), providers=["CPUExecutionProvider"])
    one_level = {f"paths.{d}": np.zeros((1, 5 * (d == 1), d + 1), np.int64) for d in range(HEADS)}
    assert [output.shape[1] for output in session.run(None, feeds | one_level)] == 2 * [0, 5, 0]


def test_the_head_check_reads_the_first_head(tmp_path: Path) -> None:
    texts = [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]][:3]
    heads = fitted_medusa(TARGET, texts, HEADS)
    part = open_pair(TARGET, write_medusa(tmp_path / "head", heads)).head
    assert part is not None
    model, text = load_source(TARGET), texts[0]
    check = check_head(part, model, [Written(text[:8], text[8:])])
    with torch.inference_mode():
        features = model.model(input_ids=torch.tensor([text])).last_hidden_state[0]
        right = heads[0](features[7:-2]).argmax(-1) == torch.tensor(text[9:])
    assert check.rows == len(text) - 9
    assert check.share == pytest.approx(float(right.float().mean()))
    assert check.best is None


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
MEDUSA_FAULTS: dict[str, tuple[Change, str]] = {
    "a missing bias": (lambda t, c: t.pop("1.0.linear.bias"), r"tensor 'heads\.1\.blocks\.0\.linear\.bias' is missing"),
    "a missing head": (
        lambda t, c: [t.pop(name) for name in list(t) if name.startswith("1.")],
        r"heads or blocks \[0, 2\], which must be numbered from 0",
    ),
    "another width": (
        lambda t, c: t.update({"0.0.linear.weight": torch.zeros(64, 32)}),
        r"has shape \[64, 32\], but this pair needs \[64, 64\]",
    ),
    "another vocabulary": (
        lambda t, c: t.update({"2.1.weight": torch.zeros(300, 64)}),
        r"has shape \[300, 64\], but this pair needs \[256, 64\]",
    ),
    "a stated vocabulary": (lambda t, c: c.update(vocab_size=300), "vocabulary has 300 tokens, the target's 256"),
    "more stated heads": (lambda t, c: c.update(medusa_num_heads=5), "medusa_num_heads is 5, but the tensors are of 3"),
    "more stated blocks": (lambda t, c: c.update(medusa_num_layers=2), "medusa_num_layers is 2, but the tensors are"),
    "a tensor too many": (lambda t, c: t.update(mystery=torch.zeros(3)), "tensor 'mystery' is not used"),
    "a shared LM head": (lambda t, c: c.update(original_lm_head=True), "original_lm_head is set"),
    "fewer tokens": (lambda t, c: c.update(truncated_vocab_size=100), "a vocabulary of their own are not supported"),
}


@pytest.mark.parametrize("fault", MEDUSA_FAULTS)
def test_a_fault_of_medusa_is_one_sentence(tmp_path: Path, fault: str) -> None:
    change, message = MEDUSA_FAULTS[fault]
    folder = write_medusa(tmp_path / "head", seeded(medusa, WIDTH, VOCAB, HEADS))
    check_fault(folder, "medusa_lm_head.safetensors", change, message)


HYDRA_FAULTS: dict[str, tuple[Change, str]] = {
    "another architecture": (
        lambda t, c: c.update(hydra_head_arch="prefix-mlp"),
        "hydra_head_arch is 'prefix-mlp', but only heads of architecture 'mlp' are read",
    ),
    "a prefix layer": (
        lambda t, c: t.update({"prefix_embeding_layer.norm.weight": torch.zeros(64)}),
        r"Hydra heads with a decoder layer \(prefix-mlp, cross-attn, eagle-attn\) are not supported",
    ),
    "heads that read no tokens": (lambda t, c: c.update(grounded_heads=False), "only grounded heads are read"),
    "another hidden state": (lambda t, c: c.update(hidden_state_offset=1), "hidden_state_offset is 1"),
    "no way around": (
        lambda t, c: t.pop("hydra_mlp.2.0.res_connection.weight"),
        r"tensor 'heads\.2\.blocks\.0\.res_connection\.weight' is missing",
    ),
}


@pytest.mark.parametrize("fault", HYDRA_FAULTS)
def test_a_fault_of_hydra_is_one_sentence(tmp_path: Path, fault: str) -> None:
    change, message = HYDRA_FAULTS[fault]
    folder = write_hydra(tmp_path / "head", seeded(Hydra, embedding_of(TARGET), VOCAB, HEADS))
    tensors = torch.load(folder / "hydra_lm_head.pt", weights_only=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    check_fault(folder, "model.safetensors", change, message)


def check_fault(folder: Path, file: str, change: Change, message: str) -> None:
    tensors, config = read_tensors(folder / file), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(tensors, config)
    save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=message) as caught:
        build_graphs(open_pair(TARGET, folder), "fp32", TOP_K)
    assert "\n" not in str(caught.value)


def test_a_pickled_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "head", seeded(medusa, WIDTH, VOCAB, HEADS), pickled=True)
    torch.save({"0.0.linear.weight": Path}, folder / "medusa_lm_head.pt")
    with pytest.raises(ExportError, match=r"medusa_lm_head\.pt is damaged, or holds more than tensors"):
        open_pair(TARGET, folder)


def test_inspect_names_producer_and_kind(tmp_path: Path) -> None:
    folders = [
        write_medusa(tmp_path / "medusa", seeded(medusa, WIDTH, VOCAB, HEADS), pickled=True),
        write_hydra(tmp_path / "hydra", seeded(Hydra, embedding_of(TARGET), VOCAB, HEADS)),
    ]
    for folder, kind in zip(folders, ("medusa", "hydra"), strict=True):
        report = inspect(str(TARGET), str(folder))
        assert report.head is not None and report.head.layout is not None and report.exportable
        assert (report.head.layout.producer, report.head.layout.kind) == (kind.capitalize(), kind)
        assert report.head.stated_target == "some/target"
        (need,) = [each for each in report.needs if (each.backend, each.precision) == ("cpu", "fp32")]
        exported = export(TARGET, folder, tmp_path / f"bundle-{kind}", Settings(certify=False)).manifest.head
        assert exported is not None and need.draft is not None
        weights = exported.graph.weights
        stored = sum(4 * prod(int(size) for size in spec.shape) for name, spec in weights.items() if "." in name)
        assert need.draft.stored == stored


def test_what_such_heads_cannot_have_is_refused(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "head", seeded(medusa, WIDTH, VOCAB, HEADS))
    with pytest.raises(ExportError, match="kind medusa, and such heads do not run on backend tensorrt"):
        export(TARGET, folder, tmp_path / "b", Settings(precision="fp16", backend="tensorrt-rtx", certify=False))
    bundle = export(TARGET, folder, tmp_path / "bundle", Settings(certify=False)).bundle
    with pytest.raises(CalibrationError, match="Medusa heads, whose inputs are not recorded"):
        calibrate(bundle, tmp_path / "calibration", threads=1)
    with pytest.raises(ExportError, match="kind medusa, and such heads do not run on TensorRT; export the target"):
        build_engines(bundle, "tensorrt-rtx")
