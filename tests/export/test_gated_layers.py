"""Qwen3.5's multi-token-prediction layer, whose attention is gated, in a checkpoint as it is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import needs_operators
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.eager import eager_head, eager_weights, read_rows
from eagle_export.graphs.pair import build_graphs, left_out_note, open_pair
from eagle_export.heads.eagle1 import PredictionHead
from eagle_export.inspection.report import inspect
from eagle_export.reading.families.source import load_source
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import DTYPE_BITS, read_manifest
from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.ort.operators import native_operators
from eagle_runtime.ort.session import OrtSession
from fakes import observed
from mtp_drafts import PROMPT, assert_drafts
from mtp_writers import read_folder, write_folder
from tiny_qwen35 import PredictionLayer, qwen35, qwen35_moe, with_layer


@dataclass(frozen=True)
class Model:
    """A checkpoint, and its layer. bundle: precision -> the bundle that drafts with it."""

    folder: Path
    layer: PredictionLayer
    bundle: Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("qwen35") / "model"
    qwen35().save_pretrained(folder)
    layer = with_layer(folder)

    def bundle(precision: str) -> Path:
        out = folder.with_name(precision)
        if not out.exists():
            export(folder, folder, out, Settings(precision=precision, certify=False, draft_top_k=10))
        return out

    return Model(folder, layer, bundle)


def test_its_drafts_equal_those_of_the_layer(model: Model) -> None:
    """Also where torch runs the head, as the check at export does."""
    source = load_source(model.folder)
    assert_drafts(model.bundle("fp32"), source, model.layer)
    part = open_pair(model.folder, model.folder).head
    assert part is not None and part.layout.producer == "Qwen MTP" and part.config.gated
    head = eager_head(part.config, eager_weights(part, source))
    assert isinstance(head, PredictionHead)
    tokens, features = torch.tensor([PROMPT]), torch.randn(1, len(PROMPT), 32)
    with torch.no_grad():
        rows = read_rows(head, part.config, tokens, features)
        torch.testing.assert_close(rows, model.layer(source.get_input_embeddings()(tokens), features))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_drafts_change_no_token(precision: str, model: Model) -> None:
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
    with EagleModel.load(model.bundle(precision), threads=1) as loaded:
        for settings in ways:
            plain = loaded.generate(PROMPT, method="vanilla", max_new_tokens=60, **settings)
            for tree in ("static", "dynamic", "chain"):
                drafted = loaded.generate(PROMPT, method="eagle", tree=tree, max_new_tokens=60, **settings)
                assert drafted.token_ids == plain.token_ids


@needs_operators
def test_its_native_form_proposes_the_same(model: Model) -> None:
    """Of a text, and of two rows after it, each with the text's last row before it."""
    features = np.random.default_rng(3).standard_normal((len(PROMPT), 32)).astype(np.float32)
    graph = read_manifest(model.bundle("int8")).models["draft"].graph
    assert graph.native is not None and "RowExactSteps" in graph.native.used
    found = []
    for file, operators in ((graph.native.file, native_operators()), (graph.file, None)):
        head = Head(OrtSession(model.bundle("int8") / file, graph, 1, operators=operators), 128, 32)
        first = observed(head, PROMPT, features)
        with Scratch(head) as scratch:
            level = scratch.feed(np.array([11, 12]), np.repeat(first.hidden, 2, 0), np.array([-1, -1]))
        found.append(np.concatenate([first.hidden, level.hidden]))
    # An input on the border of two levels may fall on either side.
    np.testing.assert_allclose(found[0], found[1], atol=0.02 * float(np.abs(found[1]).max()))


def test_inspect_knows_the_layer_and_its_size(model: Model) -> None:
    alone = open_pair(model.folder, None)
    assert alone.left_out == 1 and "has a multi-token-prediction layer, which the bundle" in (
        left_out_note(alone) or ""
    )
    report = inspect(str(model.folder), str(model.folder))
    assert report.head is not None and not report.target.problems and not report.head.problems
    assert report.target.notes[1].endswith("drafts with it")
    assert report.head.parameters == sum(each.numel() for each in model.layer.state_dict().values())
    (need,) = (each for each in report.needs if (each.backend, each.precision) == ("cpu", "int8"))
    assert need.draft is not None
    for part, counted in (("target", need.target.stored), ("draft", need.draft.stored)):
        weights = read_manifest(model.bundle("int8")).models[part].graph.weights
        bits = [prod(map(int, each.shape)) * DTYPE_BITS[each.dtype] for name, each in weights.items() if "." in name]
        assert counted == pytest.approx(sum(bits) / 8, rel=0.005)


QUERIES = "mtp.layers.0.self_attn.q_proj.weight"
REFUSALS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no gates": ({QUERIES: torch.ones(64, 32)}, "4 heads and 2 key/value heads of head_dim 16 do not fit projections"),
    "odd rows": ({QUERIES: torch.ones(129, 32)}, "has 129 rows, which are not 4 equal groups"),
    "odd groups": ({QUERIES: torch.ones(132, 32)}, r"has shape \[68, 32\], but the config asks for \[64, 32\]"),
    "no queries": ({QUERIES: None}, r"tensor 'layers\.0\.self_attn\.q_proj\.weight' is missing"),
    "no norm": ({"mtp.pre_fc_norm_hidden.weight": None}, r"tensor 'mtp\.pre_fc_norm_hidden\.weight' is missing"),
    "another width": ({"mtp.fc.weight": torch.ones(32, 32)}, r"fc\.weight has shape \[32, 32\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_shapes_are_refused_in_a_sentence(case: str, model: Model, tmp_path: Path) -> None:
    changes, message = REFUSALS[case]
    tensors, config = read_folder(model.folder)
    changed = {name: each for name, each in (tensors | changes).items() if each is not None}
    folder = write_folder(tmp_path / "model", changed, config)
    with pytest.raises(ExportError, match=message) as refusal:
        build_graphs(open_pair(folder, folder), "fp32", 8)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("experts", ["gate_up_proj", "0.up_proj.weight"])
def test_a_layer_with_experts_is_left_out_and_cannot_draft(experts: str, tmp_path: Path) -> None:
    qwen35_moe().save_pretrained(tmp_path)
    tensors, config = read_folder(tmp_path)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    tensors |= {f"mtp.{name}.weight": torch.ones(32) for name in norms}
    tensors |= {"mtp.layers.0.mlp.gate.weight": torch.ones(4, 32), "mtp.fc.weight": torch.ones(32, 64)}
    write_folder(tmp_path, tensors | {f"mtp.layers.0.mlp.experts.{experts}": torch.ones(4, 48, 32)}, config)
    assert load_source(tmp_path) and open_pair(tmp_path, None).left_out == 1
    with pytest.raises(ExportError, match=r"mlp\.(experts|gate)\..* it is a layer with a mixture of experts"):
        open_pair(tmp_path, tmp_path)
