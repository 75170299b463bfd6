"""What `eagle-export inspect` says of local folders: sizes are those of real exports, and every mismatch is named."""

from __future__ import annotations

import collections
import json
import re
import shutil
import sys
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from block_writers import jetspec, speculators_dspark
from conftest import GOLDEN, HEADS
from eagle_export.base.errors import ExportError
from eagle_export.commands import cli
from eagle_export.inspection.facts import head_facts, target_facts
from eagle_export.inspection.report import GB, Need, Place, inspect
from eagle_export.reading.checkpoint import Checkpoint, open_checkpoint
from eagle_export.reading.pickled import pickled_tensors
from eagle_runtime.bundle.manifest import DTYPE_BITS, read_manifest
from eagle_runtime.drafting.cost_prior import pass_bytes
from test_imports import in_new_process
from tiny_families import ROWS, VOCAB, save_source

TARGET = GOLDEN / "target"
DEMO = Path(__file__).parents[2] / "tools" / "demo_pair"


def need_of(target: Path, head: Path | None, precision: str, backend: str = "cpu") -> Need:
    report = inspect(str(target), None if head is None else str(head))
    (need,) = (each for each in report.needs if (each.precision, each.backend) == (precision, backend))
    return need


def stored(bundle: Path, graph: str) -> float:
    """Bytes of a graph's weights; the constants of recipes have names without a dot."""
    weights = read_manifest(bundle).models[graph].graph.weights
    return sum(
        prod(map(int, each.shape)) * DTYPE_BITS[each.dtype] / 8
        for name, each in weights.items()
        if "." in name or name == "d2t"
    )


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *product(["eagle1", "eagle3", "alone"], ["fp32", "int8", "int4"]),
        *product(["eagle1", "eagle3"], ["int8-static"]),  # whose calibration is of a pair
    ],
)
def test_sizes_are_those_of_exports(bundle_of: Callable[..., Path], kind: str, precision: str) -> None:
    need = need_of(TARGET, None if kind == "alone" else GOLDEN / HEADS[kind], precision)
    bundle = bundle_of(kind, precision)
    assert need.target.stored == pytest.approx(stored(bundle, "target"), rel=0.01)
    if need.draft is not None:
        assert need.draft.stored == pytest.approx(stored(bundle, "draft"), rel=0.01)


@pytest.mark.parametrize(
    ("backend", "precision"), [("cpu", "int4"), ("cpu", "int4-int8"), ("tensorrt-rtx", "int4"), ("cpu", "int8-token")]
)
def test_sizes_of_the_demo_pair(backend: str, precision: str, tmp_path: Path) -> None:
    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    pair = DEMO / "target", DEMO / "eagle3", tmp_path / "pair"
    export(*pair, Settings(precision=precision, backend=backend, certify=False, record=False))
    need = need_of(DEMO / "target", DEMO / "eagle3", precision, backend)
    assert need.draft is not None
    assert need.target.stored == pytest.approx(stored(tmp_path / "pair", "target"), rel=0.005)
    assert need.draft.stored == pytest.approx(stored(tmp_path / "pair", "draft"), rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_sizes_of_a_target_with_a_table_for_its_layers(precision: str, tmp_path: Path) -> None:
    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    save_source(ROWS["Gemma-4, with layers that use others' keys"], tmp_path / "source")
    export(tmp_path / "source", None, tmp_path / "bundle", Settings(precision=precision, certify=False, record=False))
    inspected = inspect(str(tmp_path / "source"), None, context=100)
    need = next(each for each in inspected.needs if each.precision == precision)
    graph = read_manifest(tmp_path / "bundle").target.graph
    assert need.target.stored == pytest.approx(stored(tmp_path / "bundle", "target"), rel=0.01)
    assert need.target.read == pytest.approx(pass_bytes(graph), rel=0.06)  # small tensors have other types
    assert need.target.stored - need.target.read > VOCAB * 4 * 8  # the table, which a pass does not read
    assert need.cache == 100 * graph.kv_token_bytes
    assert {each.backend for each in inspected.needs} == {"cpu"}


def test_keys_of_as_many_numbers_may_differ_in_shape(tmp_path: Path) -> None:
    save_source(ROWS["Gemma-4, with values that are keys"], tmp_path / "source")
    inspected = inspect(str(tmp_path / "source"), None)
    assert set(inspected.target.key_shapes) == {(2, 16), (1, 32)}
    assert {each.backend for each in inspected.needs} == {"cpu"}


def test_what_a_token_reads_leaves_out_a_table_of_its_own() -> None:
    tied, own = need_of(DEMO / "target", None, "int8"), need_of(DEMO / "target", None, "int8-token")
    assert tied.target.read == tied.target.stored  # the table is the LM head
    assert own.target.stored - own.target.read == 2 * 4096 * 256  # a table in fp16 next to an LM head in int8
    assert own.seconds(1e9) == own.target.read / 1e9


def test_memory_is_weights_caches_and_the_process() -> None:
    short, long = (inspect(str(DEMO / "target"), str(DEMO / "eagle1"), context=n).needs[0] for n in (100, 300))
    layers, kv_heads, width, fp32 = 8 + 1, 2, 64, 4
    assert long.cache - short.cache == 200 * 2 * layers * kv_heads * width * fp32
    assert long.memory == long.stored + long.cache + long.activations + 150 * 10**6


def test_torch_is_not_imported() -> None:
    """So that it answers at once: importing torch takes longer than all the rest."""
    code = f"""
import contextlib, io, json, sys
from eagle_export.commands import cli
with contextlib.redirect_stdout(io.StringIO()):
    status = cli.main(["inspect", {str(DEMO / "target")!r}, {str(DEMO / "eagle3")!r}])
print(json.dumps({{"status": status, "modules": sorted(sys.modules)}}))
"""
    result: Any = in_new_process(code)
    assert result["status"] == 0 and not {"torch", "transformers", "onnxruntime"} & set(result["modules"])


def test_a_pair_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(DEMO / "target"), str(DEMO / "eagle3")]) == 0
    out = capsys.readouterr().out
    assert "Llama, model_type llama, 5.6 M parameters in F16" in out and "can be exported" in out
    assert "EAGLE-3 in the layout of SpecForge" in out and "taps hidden_states [2, 4, 5]" in out
    assert "fits the target" in out and re.search(r"│ int8, head int4 +│ +6.1 MB │ 2.2 MB", out)


def test_the_report_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(TARGET), str(GOLDEN / "head_eagle1"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exportable"] and report["head"]["matches"] and report["head"]["kind"] == "eagle1"
    assert report["target"]["family"] == "Llama" and report["target"]["commit"] is None
    (int4,) = (each for each in report["needs"] if (each["backend"], each["precision"]) == ("cpu", "int4"))
    (here,) = int4["places"]
    assert here["fits"] and here["ms_per_token"] > 0 and int4["least_memory_gb"] == 8


def changed(source: Path, folder: Path, **config: object) -> Path:
    shutil.copytree(source, folder)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**stated, **config}), encoding="utf-8")
    return folder


def test_every_mismatch_is_named() -> None:
    head = inspect(str(DEMO / "target"), str(GOLDEN / "head_eagle1")).head
    assert head is not None and head.config is None
    vocabulary, width, embedding = head.problems
    assert "the head's vocabulary has 256 tokens, the target's 4096" in vocabulary
    assert "fc.weight has shape [64, 128], but a target of hidden size 256 needs [256, 2 x 256]" in width
    assert "'embed_tokens.weight' has shape [256, 64]" in embedding


def test_settings_that_contradict_the_tensors_are_all_named(tmp_path: Path) -> None:
    folder = changed(
        GOLDEN / "head_eagle3_dv44", tmp_path / "head", hidden_act="gelu", draft_vocab_size=50, num_attention_heads=3
    )
    head = inspect(str(TARGET), str(folder)).head
    assert head is not None
    assert [re.sub(r".*config.json: ", "", each).split(",")[0].split(" do ")[0] for each in head.problems] == [
        "hidden_act is 'gelu'",
        "3 heads and 2 key/value heads of head_dim None",
        "draft_vocab_size is 50",
    ]


def test_a_target_of_another_shape_than_it_says(tmp_path: Path) -> None:
    facts = inspect(str(changed(TARGET, tmp_path / "target", vocab_size=300, intermediate_size=99)), None).target
    assert len(facts.problems) == 4 and "needs [300, 64]" in facts.problems[0]
    assert "lm_head.weight" in facts.problems[1] and all("gate_proj" in each for each in facts.problems[2:])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', but only"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "depends on the text's length"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised already"),
    ],
)
def test_targets_that_cannot_be_exported(tmp_path: Path, config: dict[str, object], why: str) -> None:
    report = inspect(str(changed(TARGET, tmp_path / "target", **config)), None)
    assert why in report.target.problems[0] and not report.needs and not report.exportable


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, "model_type is 'gpt2', but only"),
        ({"model_type": "idefics3", "text_config": {"model_type": "llama", "hidden_size": 64}}, "reads more than text"),
    ],
)
def test_a_family_with_other_names_of_sizes_is_refused_as_unknown(
    tmp_path: Path, config: dict[str, object], why: str
) -> None:
    shutil.copytree(TARGET, tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=why):
        inspect(str(tmp_path / "target"), None)


def test_pickled_heads_are_read_without_torch(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(GOLDEN / "head_eagle1" / "config.json", head)
    tensors = load_file(GOLDEN / "head_eagle1" / "model.safetensors")
    torch.save(collections.OrderedDict(tensors), head / "pytorch_model.bin")
    assert inspect(str(TARGET), str(head)).exportable
    mine = pickled_tensors((head / "pytorch_model.bin").open("rb"), head / "pytorch_model.bin")
    theirs = open_checkpoint(head, pickled=True).tensors
    assert {name: (each.shape, each.dtype) for name, each in mine.items()} == {
        name: (each.shape, each.dtype) for name, each in theirs.items()
    }


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return sys.exit, ("code of the file was run",)


@pytest.mark.parametrize("content", [Evil(), {"fc.weight": 3}, [torch.zeros(2)], {"a": {"b": torch.zeros(2)}}])
def test_pickled_files_with_more_than_tensors_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with (tmp_path / "pytorch_model.bin").open("rb") as file, pytest.raises(ExportError, match="more than named tens"):
        pickled_tensors(file, tmp_path / "pytorch_model.bin")


def test_a_context_beyond_the_target_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(DEMO / "target"), "--context", "5000"]) == 2
    assert "the context is 5000 tokens, but" in capsys.readouterr().err


def test_where_an_eight_b_model_fits() -> None:
    from eagle_export.inspection.report import fits, least_class

    need = need_of(DEMO / "target", None, "int4")
    large = Need("cpu", "int4", None, need.target, None, 0, 0, 10 * GB)
    assert least_class(large) == 12 and not fits(large, Place("", 10 * GB, 1)) and fits(large, Place("", 11 * GB, 1))
    assert least_class(Need("tensorrt-rtx", "fp16", None, need.target, None, 0, 0, 33 * GB)) is None


JUNK: tuple[object, ...] = (None, "x", -1, 0.5, [1], [[1]], {"x": 1}, 10**30)


@pytest.mark.parametrize("which", ["target", "head_eagle1", "head_eagle3_dv44"])
def test_any_value_in_a_config_gives_a_report_or_an_error_of_one_sentence(tmp_path: Path, which: str) -> None:
    folder = changed(GOLDEN / which, tmp_path / which)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keys = {*stated, "rope_scaling", "rope_parameters", "text_config", "eagle_config", "norm_output", "architectures"}
    keys |= {"attn_logit_softcapping", "sliding_window", "layer_types", "head_dim", "bias", "speculators_config"}
    said: list[str] = []
    target = open_checkpoint(TARGET)
    facts = target_facts(target)
    for key in sorted(keys):
        for value in JUNK:
            one = Checkpoint(folder, {**stated, key: value}, open_checkpoint(folder).tensors)
            try:
                said += target_facts(one).problems if which == "target" else head_facts(one, facts, target).problems
            except ExportError as error:
                said.append(str(error))
    assert len(said) > 40 and all("\n" not in each and len(each) > 20 for each in said)


def test_of_a_block_head_it_says_how_it_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = speculators_dspark().write(tmp_path / "head")
    assert cli.main(["inspect", str(TARGET), str(folder)]) == 0
    said = capsys.readouterr().out
    for words in (
        "Block head in the layout of speculators DSpark",
        "draft vocabulary 44 of 256, taps hidden_states [1, 4, 7]",
        "blocks of 4 rows draft 4 tokens, the first from the root's row; each row sees all rows",
        "mask: token 2; transitions of rank 6",
        "note: its confidence head is left out",
        "fits the target",
    ):
        assert words in said
    jetspec().write(tmp_path / "other")
    assert cli.main(["inspect", "--json", str(TARGET), str(tmp_path / "other")]) == 0
    head = json.loads(capsys.readouterr().out)["head"]
    assert (head["kind"], head["producer"], head["taps"], head["notes"]) == ("block", "JetSpec", [2, 6], [])
    assert head["block"] == {
        "size": 5,
        "anchor": False,
        "causal": True,
        "mask_id": 2,
        "markov_rank": 0,
        "own_lm_head": False,
        "reads_state": False,
    }


def test_of_heads_that_read_the_targets_state_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of eagle-train do."""
    assert cli.main(["inspect", str(DEMO / "target"), str(DEMO / "block")]) == 0
    said = capsys.readouterr().out
    assert "each row sees the rows before it and the target's last state before the root" in said
