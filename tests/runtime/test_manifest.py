"""The manifest is checked field by field: whatever is wrong with it is one sentence naming the file and the field."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import put_listed
from eagle_runtime import EagleModel
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import BundleError, RequestError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle import listed_files
from eagle_runtime.bundle.graph import INT8_ROWS, OPERATORS, Shape, is_int8, pieces_of
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import (
    MANIFEST_NAME,
    Certificate,
    GoldenPrompt,
    GraphSpec,
    HeadSpec,
    Limits,
    Manifest,
    SamplingDefaults,
    TargetSpec,
    TensorSpec,
    TopTokens,
    TreeDefaults,
    read_manifest,
)
from systems import needs_links

FILES = ("target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "tokenizer.json")
SIZES = [  # and where the graphs contradict them first
    ("target", "vocab_size", "target: graph: outputs: 'logits'"),
    ("target", "num_layers", "target: graph: inputs: 'past_key_values."),
    ("target", "num_kv_heads", "target: graph: inputs: 'past_key_values.0.key'"),
    ("target", "head_dim", "target: graph: inputs: 'past_key_values.0.key'"),
    ("head", "hidden_size", "target: graph: outputs: 'features'"),
    ("head", "top_k", "head: graph: outputs: 'log_probs'"),
    ("head", "num_layers", "head: graph: inputs: 'past_key_values."),
    ("head", "num_kv_heads", "head: graph: inputs: 'past_key_values.0.key'"),
    ("head", "head_dim", "head: graph: inputs: 'past_key_values.0.key'"),
]
WRONG: list[Any] = [None, True, 7, 2.5, "seven", [[]], {"a": []}]
Steps = tuple[str | int, ...]  # of a place in parsed JSON


def tensors(shapes: dict[str, Shape], rows: str, letter: str, layers: int) -> dict[str, TensorSpec]:
    """Specs of a graph's ends, with `layers` pairs of key/value rows [1, letter, 2, 4]."""
    parts = (f"{rows}.{layer}.{part}" for layer in range(layers) for part in ("key", "value"))
    every = {**shapes, **dict.fromkeys(parts, (1, letter, 2, 4))}
    return {name: TensorSpec("int64" if "ids" in name else "float32", shape) for name, shape in every.items()}


def little_bundle(folder: Path) -> Manifest:
    """A folder that is a bundle as far as its manifest goes: 2 layers, 1 in the head, files of a few bytes."""
    ids: dict[str, Shape] = {"input_ids": (1, "T"), "position_ids": (1, "T"), "logit_rows": ("R",)}
    ids["tree_mask"] = (1, 1, "T", "L")
    weights = {"model.norm.weight": TensorSpec("float32", (8,))}
    target = GraphSpec(
        file=FILES[0],
        inputs=tensors(ids, "past_key_values", "P", layers=2),
        outputs=tensors({"logits": (1, "R", 50), "features": (1, "T", 8)}, "present", "T", layers=2),
        weights=weights,
        recipe={"model.layers.0.mlp.up_proj.weight": "int8"},
    )
    proposals: dict[str, Shape] = {"log_probs": (1, "R", 3), "token_ids": (1, "R", 3), "hidden": (1, "R", 8)}
    head = GraphSpec(
        file=FILES[2],
        inputs=tensors({**ids, "features": (1, "T", 8)}, "past_key_values", "P", layers=1),
        outputs=tensors(proposals, "present", "T", layers=1),
        weights={},
        recipe={},
    )
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    golden = GoldenPrompt((5, 6), (7, 1), (TopTokens((7, 8), (1.5, -0.25)), TopTokens((1,), (3.0,))))
    manifest = Manifest(
        schema_version=9,
        precision={"target": "fp32", "draft": "fp32"},
        target=TargetSpec("llama", 8, 50, 2, 2, 4, 64, (1, 2), target),
        head=HeadSpec("eagle3", 8, 20, 1, 2, 4, 3, (2, 4, 5), None, head),
        tree_defaults=TreeDefaults(draft_top_k=3),
        sampling=SamplingDefaults(temperature=0.6, top_p=0.9),
        tools={"torch": "2.13.0"},
        files={name: file_sha256(folder / name) for name in FILES},
        certificate=Certificate((golden, golden), 0.5, 1e-9, 2.0, Limits(0.7, 0.15)),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    little_bundle(folder)
    return folder


@pytest.fixture(scope="module")
def shared_bundle() -> Iterator[Path]:
    """For tests that only write the manifest, hundreds of times."""
    with tempfile.TemporaryDirectory() as name:
        little_bundle(Path(name))
        yield Path(name)


def stored(bundle: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((bundle / MANIFEST_NAME).read_text())
    return data


def refusal(bundle: Path, data: object) -> str:
    """What read_manifest says of this content: one line that begins with the file's path."""
    (bundle / MANIFEST_NAME).unlink()  # a file that is cut to nothing is written to the disk when it is closed
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError) as caught:
        read_manifest(bundle)
    message = str(caught.value)
    assert message.startswith(f"{bundle / MANIFEST_NAME}") and "\n" not in message
    return message


def places(kind: Any, value: Any, at: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """(place, annotation) of every value below an instance of the annotation `kind`; X | None is given as X."""
    if typing.get_origin(kind) is types.UnionType:
        kind = next((arg for arg in typing.get_args(kind) if dataclasses.is_dataclass(arg)), kind)
    if value is None:  # a part that this bundle does not have
        return
    yield at, kind
    if dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind).items():
            yield from places(hint, value[name], (*at, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from places(typing.get_args(kind)[1], item, (*at, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(typing.get_args(kind)[0], item, (*at, index))


def replaced(data: Any, at: Steps, *new: Any) -> Any:
    """A copy of parsed JSON with a new value at a place, or without the place."""
    if not at:
        return new[0]
    copy = data.copy()
    if len(at) > 1:
        copy[at[0]] = replaced(copy[at[0]], at[1:], *new)
    elif new:
        copy[at[0]] = new[0]
    else:
        del copy[at[0]]
    return copy


def test_what_is_written_is_what_is_read(bundle: Path) -> None:
    assert read_manifest(bundle) == little_bundle(bundle)
    assert read_manifest(bundle).to_json() == (bundle / MANIFEST_NAME).read_text()


@needs_links
def test_a_bundle_is_read_through_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle)
    verify_hashes(tmp_path / "link", read_manifest(tmp_path / "link"))


def test_every_missing_key_is_named(shared_bundle: Path) -> None:
    little_bundle(shared_bundle)
    data, tried = stored(shared_bundle), 0
    for at, kind in places(Manifest, data):
        if not dataclasses.is_dataclass(kind):
            continue
        for field in dataclasses.fields(kind):
            message = refusal(shared_bundle, replaced(data, (*at, field.name)))
            assert field.name in message
            assert all(str(step) in message for step in at)
            tried += 1
    assert tried > 60


def test_every_unknown_key_is_named(shared_bundle: Path) -> None:
    little_bundle(shared_bundle)
    data, tried = stored(shared_bundle), 0
    for at, kind in places(Manifest, data):
        if dataclasses.is_dataclass(kind):
            message = refusal(shared_bundle, replaced(data, (*at, "rope_theta"), 1e4))
            assert "unknown key 'rope_theta'" in message
            assert all(str(step) in message for step in at)
            tried += 1
    assert tried > 20


def test_every_value_of_another_type_is_named(shared_bundle: Path) -> None:
    """JSON's six types at every place, true and false not being numbers."""
    little_bundle(shared_bundle)
    data, tried = stored(shared_bundle), 0
    for at, kind in places(Manifest, data):
        if at in ((), ("schema_version",)):
            continue  # test_no_json and test_another_version
        fine = {int: (int,), str: (str,), int | str: (int, str), float: (int, float)}.get(kind, ())
        fine = (type(None),) if at == ("certificate",) else fine  # head: null contradicts the precisions
        for wrong in WRONG:
            if type(wrong) in fine:
                continue
            message = refusal(shared_bundle, replaced(data, at, wrong))
            assert all(str(step) in message for step in at[:-1])
            tried += 1
    assert tried > 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(draw=st.data())
def test_any_json_is_read_or_refused_in_one_line(shared_bundle: Path, draw: st.DataObject) -> None:
    """At any place, or under a new key of any object."""
    manifest = little_bundle(shared_bundle)
    data = stored(shared_bundle)
    at, kind = draw.draw(st.sampled_from(list(places(Manifest, data))))
    if typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        at += draw.draw(st.just(()) | st.tuples(st.text()))
    (shared_bundle / MANIFEST_NAME).write_text(json.dumps(replaced(data, at, draw.draw(JSON))))
    said = ""
    try:
        manifest_read = read_manifest(shared_bundle)
        assert manifest_read.target.graph.inputs == manifest.target.graph.inputs or at[-1] == "dtype"
    except BundleError as error:
        said = str(error)
    assert "\n" not in said
    assert said == "" or said.startswith(str(shared_bundle))


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1', "[1]", "null", "7", "[" * 100_000, "\ufeff{}"])
def test_no_json(bundle: Path, text: str) -> None:
    (bundle / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match="JSON") as caught:
        read_manifest(bundle)
    assert str(bundle / MANIFEST_NAME) in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, 4, "3", None, 2.5, [3]])
def test_another_version(bundle: Path, version: object) -> None:
    message = refusal(bundle, {**stored(bundle), "schema_version": version})
    assert f"schema_version is {version!r}" in message and "reads 9" in message


def test_a_bundle_without_a_certificate(bundle: Path) -> None:
    (bundle / MANIFEST_NAME).write_text(json.dumps({**stored(bundle), "certificate": None}))
    assert read_manifest(bundle).certificate is None


def test_a_bundle_without_a_head(bundle: Path) -> None:
    data = stored(bundle)
    alone = {**data, "head": None, "precision": {"target": "fp32"}}
    (bundle / MANIFEST_NAME).write_text(json.dumps(alone))
    manifest_read = read_manifest(bundle)
    assert manifest_read.head is None and list(manifest_read.models) == ["target"]
    for wrong, says in (
        ({**data, "head": None}, "precision is of draft, target, but the bundle holds target;"),
        ({**data, "precision": {"target": "fp32"}}, "precision is of target, but the bundle holds target and draft;"),
        ({**data, "precision": {}}, "precision is of nothing"),
        (replaced(alone, ("target", "hidden_size"), 9), "target: graph: outputs: 'features' is [1, 'T', 8], but"),
    ):
        assert says in refusal(bundle, wrong)


def test_numbers_that_json_wrote_without_a_point(bundle: Path) -> None:
    data = stored(bundle)
    data["certificate"].update(agreement=1, tau=3)
    data["certificate"]["prompts"][0]["top"][1]["logits"] = [-4]
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    certificate = read_manifest(bundle).certificate
    assert certificate is not None and repr((certificate.agreement, certificate.tau)) == "(1.0, 3.0)"
    assert repr(certificate.prompts[0].top[1].logits) == "(-4.0,)"


@pytest.mark.parametrize("wrong", [{"dtype": "i~t64"}, {"shape": ["T", 4]}, {"shape": [10**400]}, {"shape": [-1]}])
def test_impossible_weights_are_refused(bundle: Path, wrong: dict[str, Any]) -> None:
    """They would be errors without a sentence where costs are estimated from them."""
    data = stored(bundle)
    data["target"]["graph"]["weights"]["w"] = {"dtype": "float32", "shape": [4, 4], **wrong}
    message = refusal(bundle, data)
    assert "target: graph: 'w' is" in message and "which no tensor is" in message and len(message) < 400


def with_int8_cache(bundle: Path) -> dict[str, Any]:
    """The content of a manifest whose target keeps keys and values in bytes."""
    data = stored(bundle)
    graph = data["target"]["graph"]
    graph["inputs"]["tree_mask"]["shape"] = [1, 1, "T", "T"]
    for layer in range(2):
        past, new = f"past_key_values.{layer}", f"present.{layer}"
        graph["inputs"][f"{past}.key"] = {"dtype": "int8", "shape": [2, 4, "C"]}
        graph["inputs"][f"{past}.value"] = {"dtype": "int8", "shape": [2, 1, "C", 4]}
        for part in ("key", "value"):
            graph["inputs"][f"{past}.{part}_scale"] = {"dtype": "float32", "shape": [2, 1, "C"]}
            graph["outputs"][f"{new}.{part}"] = {"dtype": "int8", "shape": [1, "T", 2, 4]}
            graph["outputs"][f"{new}.{part}_scale"] = {"dtype": "float32", "shape": [1, "T", 2, 1]}
    return data


def test_an_int8_cache(bundle: Path) -> None:
    (bundle / MANIFEST_NAME).write_text(json.dumps(with_int8_cache(bundle)))
    graph = read_manifest(bundle).target.graph
    assert graph.past[:5] == (*(f"past_key_values.0.{row}" for row in INT8_ROWS), "past_key_values.1.key")
    assert [name.removeprefix("present") for name in graph.present] == [
        name.removeprefix("past_key_values") for name in graph.past
    ]
    assert graph.kv_row_bytes == 2 * (4 + 4)  # of 2 heads: 4 bytes and a scale
    assert is_int8(graph) and pieces_of(graph) == 1


def test_the_native_form_of_an_int8_cache_has_rows_of_bytes(bundle: Path) -> None:
    """Each holds its scale."""
    data = with_int8_cache(bundle)
    data["target"]["graph"]["native"] = {"file": "target/native.onnx", "operators": OPERATORS, "used": []}
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    put_listed(bundle, "target/native.onnx", b"")
    graph = read_manifest(bundle).target.graph
    form = graph.native_form()
    assert form.file == "target/native.onnx" and pieces_of(form) == 1 and not is_int8(form)
    assert form.past == tuple(f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value"))
    assert form.inputs["past_key_values.1.key"] == TensorSpec("uint8", (2, "C", 4 + 4))
    assert form.inputs["past_key_values.1.value"] == TensorSpec("uint8", (2, 1, "C", 4 + 4))
    assert form.outputs["present.1.value"] == TensorSpec("float32", (1, "T", 2, 1 + 1))  # words
    assert form.kv_row_bytes == graph.kv_row_bytes == 2 * (4 + 4)
    others = [{n: s for n, s in one.inputs.items() if not n.startswith("past")} for one in (graph, form)]
    assert others[0] == others[1]


@pytest.mark.parametrize(
    ("at", "new", "says"),
    [
        (
            ("inputs", "past_key_values.1.key", "dtype"),
            ["uint8"],
            ".1.key' is 'uint8', but must be int8",
        ),
        (("inputs", "past_key_values.0.value", "dtype"), ["float32"], "is 'float32', but must be int8"),
        (("inputs", "past_key_values.1.key_scale", "dtype"), ["float16"], "is 'float16', but must be float32"),
        (("outputs", "present.1.value", "dtype"), ["float32"], "'present.1.value' is 'float32', but must be int8"),
        (("outputs", "present.0.value_scale", "dtype"), ["i~t"], "is 'i~t', but must be float32"),
        (("inputs", "tree_mask", "dtype"), ["bool"], "'tree_mask' is 'bool', but must be float32 or float16"),
        (("inputs", "past_key_values.0.key", "shape"), [[2, "C", 4]], "'past_key_values.0.key' is [2, 'C', 4], but"),
        (("inputs", "past_key_values.0.value", "shape"), [[2, 2, "C", 2]], "is [2, 2, 'C', 2], but the sizes"),
        (("inputs", "past_key_values.1.key_scale", "shape"), [[2, "C"]], "make it [2, 1, 'C']"),
        (("outputs", "present.1.key_scale", "shape"), [[1, "T", 2]], "make it [1, 'T', 2, 1]"),
        (("inputs", "past_key_values.1.value_scale"), [], "'past_key_values.1.value_scale' is absent"),
        (("inputs", "past_key_values.0.key_scale"), [], "make it [2, 'C', 4]"),
        (("outputs", "present.0.key_scale"), [], "'present.0.key_scale' is absent"),
    ],
)
def test_damaged_int8_caches_are_refused(bundle: Path, at: Steps, new: list[Any], says: str) -> None:
    message = refusal(bundle, replaced(with_int8_cache(bundle), ("target", "graph", *at), *new))
    assert "target: graph: " in message and says in message and len(message) < 400


def test_caches_in_other_types_are_refused(bundle: Path) -> None:
    """Their size would be an error without a sentence where a session is opened."""
    data = stored(bundle)
    for part, name in (("inputs", "past_key_values.0.key"), ("outputs", "present.0.key")):
        message = refusal(bundle, replaced(data, ("head", "graph", part, name, "dtype"), "i~t64"))
        assert f"{name!r} is 'i~t64', but must be float32 or float16" in message


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1.0"])
def test_no_numbers(bundle: Path, number: object) -> None:
    message = refusal(bundle, replaced(stored(bundle), ("certificate", "kl"), number))
    assert f"certificate: kl is {short_repr(number)}" in message and "must be of type float" in message


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("prompt",), []),
        (("prompt", 0), -1),
        (("prompt",), [5] * 63),  # with its continuation longer than the context
        (("continuation", 1), 50),
        (("continuation",), [7]),
        (("continuation",), [7, 1, 1]),
        (("top", 0, "token_ids", 1), 50),
        (("top", 0, "token_ids"), [7]),
        (("top", 1, "logits"), []),
        (("top", 1), {"token_ids": [], "logits": []}),
    ],
)
def test_golden_prompts_that_cannot_be_replayed(bundle: Path, at: Steps, value: object) -> None:
    message = refusal(bundle, replaced(stored(bundle), ("certificate", "prompts", 1, *at), value))
    assert "certificate: prompts[1] does not fit" in message


@pytest.mark.parametrize(
    ("at", "value", "meant"),
    [
        (("agreement",), -0.001, "agreement is -0.001, but must be 0 to 1"),
        (("agreement",), 1.5, "agreement is 1.5, but must be 0 to 1"),
        (("kl",), -1e-9, "kl is -1e-09, but must be 0 or more"),
        (("tau",), 0.99, "tau is 0.99, but must be 1 to 32"),
        (("tau",), 33, "tau is 33.0, but must be 1 to 32"),
        (("limits", "agreement"), -1, "limits: agreement is -1.0, but must be 0 to 1"),
        (("limits", "agreement"), 1.01, "limits: agreement is 1.01, but must be 0 to 1"),
        (("limits", "kl"), -0.5, "limits: kl is -0.5, but must be 0 or more"),
    ],
)
def test_figures_of_a_certificate_that_cannot_be(bundle: Path, at: Steps, value: float, meant: str) -> None:
    message = refusal(bundle, replaced(stored(bundle), ("certificate", *at), value))
    assert f"certificate: {meant}; export the bundle again" in message


@pytest.mark.parametrize("agreement", [0, 1])
def test_figures_of_a_certificate_at_their_ends(bundle: Path, agreement: int) -> None:
    data = stored(bundle)
    data["certificate"].update(agreement=agreement, kl=0, tau=1)
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    certificate = read_manifest(bundle).certificate
    assert certificate is not None and certificate.within_limits == (agreement == 1)


def test_a_certificate_is_within_its_limits_or_not(bundle: Path) -> None:
    certificate = read_manifest(bundle).certificate
    assert certificate is not None
    for agreement, kl, within in ((0.7, 0.15, True), (0.69, 0.1, False), (0.8, 0.16, False), (0.5, 1.0, False)):
        assert dataclasses.replace(certificate, agreement=agreement, kl=kl).within_limits is within


def test_a_certificate_over_nothing(bundle: Path) -> None:
    message = refusal(bundle, replaced(stored(bundle), ("certificate", "prompts"), []))
    assert "certificate: prompts is empty" in message


@pytest.mark.parametrize(("part", "size", "named"), SIZES)
@pytest.mark.parametrize("value", [-1, 0, 7, 10**15])
def test_sizes_that_contradict_the_graphs(bundle: Path, part: str, size: str, named: str, value: int) -> None:
    data = stored(bundle)
    data[part][size] = value
    assert f"{MANIFEST_NAME}: {named}" in refusal(bundle, data)


def test_a_graph_that_is_not_listed(bundle: Path) -> None:
    data = stored(bundle)
    del data["files"]["draft/model.onnx"]
    assert "'draft/model.onnx' is not listed" in refusal(bundle, data)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "target/../tokenizer.json",
        "target/../../secret",
        "..",
        "/etc/hostname",
        "//etc/hostname",
        "..\\secret",
        "target\\model.onnx",
        "C:/secret",
        "C:secret",
        "file:secret",
        "nul\0byte",
        *(("half\ud800character", 1000 * "long") if os.name == "posix" else ()),  # Windows has such names
    ],
)
@pytest.mark.parametrize("listed_as", ["file", "target", "head"])
def test_paths_that_leave_the_bundle(bundle: Path, name: str, listed_as: str) -> None:
    (bundle.parent / "secret").write_text("not yours")
    data = stored(bundle)
    if listed_as == "file":
        data["files"][name] = "0" * 64
    else:
        data[listed_as]["graph"]["file"] = name
    assert f"file path {short_repr(name)} leaves the bundle" in refusal(bundle, data)


@pytest.mark.parametrize(
    "change",
    [
        lambda data, long: data.update(schema_version=long),
        lambda data, long: data.update({"x" * 100_000: 1}),
        lambda data, long: data["tools"].update({"x" * 100_000: 1}),
        lambda data, long: data["target"].update(model_type=long),
        lambda data, long: data["target"].update(context=10**4000),
        lambda data, long: data["target"]["graph"]["inputs"].update({"x" * 100_000: {"dtype": "x", "shape": []}}),
        lambda data, long: data["target"]["graph"].update(file="x" * 100_000),
    ],
)
def test_long_values_are_quoted_in_part(bundle: Path, change: Callable[[Any, Any], None]) -> None:
    data = stored(bundle)
    change(data, [["x" * 1000] * 1000] * 10)
    assert len(refusal(bundle, data)) < 500 + len(str(bundle))


def test_an_absolute_path_into_the_bundle(bundle: Path) -> None:
    """It would not survive a move."""
    data = stored(bundle)
    data["files"][str(bundle / "tokenizer.json")] = data["files"].pop("tokenizer.json")
    assert "leaves the bundle" in refusal(bundle, data)


@pytest.mark.parametrize("name", ["", ".", "target", "target/", "absent.bin", "target/model.onnx/x"])
def test_paths_that_are_no_files(bundle: Path, name: str) -> None:
    data = stored(bundle)
    data["files"][name] = "0" * 64
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError, match="is missing from the bundle") as caught:
        read_manifest(bundle)
    assert str(caught.value).startswith(str(bundle / name))


def link_file(bundle: Path) -> None:
    shutil.move(bundle / "tokenizer.json", bundle.parent / "tokenizer.json")
    (bundle / "tokenizer.json").symlink_to("../tokenizer.json")


def link_folder(bundle: Path) -> None:
    shutil.move(bundle / "target", bundle.parent / "target")
    (bundle / "target").symlink_to(bundle.parent / "target")


def link_chain(bundle: Path) -> None:
    """Out through a link inside the bundle, so that neither path looks foreign."""
    (bundle.parent / "away").write_text("not yours")
    (bundle / "inner").symlink_to("../away")
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").symlink_to("inner")


def link_loop(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").symlink_to("tokenizer.json")


@needs_links
@pytest.mark.parametrize(
    ("link", "named"),
    [
        (link_file, "tokenizer.json"),
        (link_folder, "target/model.onnx"),
        (link_chain, "tokenizer.json"),
        (link_loop, "tokenizer.json"),
    ],
)
def test_links_that_leave_the_bundle(bundle: Path, link: Callable[[Path], None], named: str) -> None:
    """The content is the right one, so only the path can tell."""
    link(bundle)
    assert f"file path {named!r} leaves the bundle" in refusal(bundle, stored(bundle))


@needs_links
def test_a_link_inside_the_bundle_is_fine(bundle: Path) -> None:
    (bundle / "tokenizer.json").rename(bundle / "kept.json")
    (bundle / "tokenizer.json").symlink_to("kept.json")
    verify_hashes(bundle, read_manifest(bundle))


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_in_any_file(bundle: Path, name: str) -> None:
    manifest = read_manifest(bundle)
    verify_hashes(bundle, manifest)
    content = bytearray((bundle / name).read_bytes())
    content[-1] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match="SHA-256") as caught:
        verify_hashes(bundle, manifest)
    assert str(caught.value).startswith(f"{bundle / name} does not match")


@pytest.mark.parametrize("once", [True, False])
def test_a_file_that_cannot_be_read_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    """As one without the right to read it, locked by another program, or on a disk that fails."""

    def failed(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listed_files, "file_sha256", failed)
    with pytest.raises(BundleError, match=r"cannot be read \(Permission denied\); copy the bundle again") as caught:
        verify_hashes(bundle, read_manifest(bundle), once=once)
    assert str(caught.value).startswith(str(bundle / FILES[0]))


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        ("0" * 64, r"tokenizer\.json does not match"),
        *((digest, "is no SHA-256 of") for digest in ("", "zz", "A" * 64, "0" * 64 + "\n", "\ud800" * 64)),
    ],
)
def test_a_changed_hash(bundle: Path, digest: str, said: str) -> None:
    data = stored(bundle)
    data["files"]["tokenizer.json"] = digest
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=said):
        verify_hashes(bundle, read_manifest(bundle))


def test_hashes_of_files_that_did_not_change_are_compared_once(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_of("eagle1"), bundle)
    manifest, read, sizes = read_manifest(bundle), list[Path](), list[tuple[int, int]]()

    def counted(path: Path) -> str:
        read.append(path)
        return file_sha256(path)

    monkeypatch.setattr(listed_files, "file_sha256", counted)
    for wanted in (len(manifest.files), 0):
        read.clear()
        verify_hashes(bundle, manifest, lambda *done: sizes.append(done), once=True)
        assert len(read) == wanted
    assert sizes[-1][0] == sizes[-1][1] == sum((bundle / name).stat().st_size for name in manifest.files)
    name = next(iter(manifest.files))
    content = bytearray((bundle / name).read_bytes())
    content[-1] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match="does not match its SHA-256"):
        verify_hashes(bundle, manifest, once=True)
    verify = [name for name in manifest.files if name != next(iter(manifest.files))]
    assert verify and len(read) == 1


def test_loading_reports_its_stages_and_can_be_given_up(bundle_of: Callable[..., Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    EagleModel.load(bundle_of("eagle1"), on_progress=lambda *stage: seen.append(stage)).close()
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["hash", "load", "warm"]
    assert all(0 <= done <= total for _, done, total in seen)

    def give_up(stage: str, done: int, total: int) -> None:
        if stage == "load":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EagleModel.load(bundle_of("eagle1"), on_progress=give_up)
    with pytest.raises(RequestError, match="check_hashes is 'twice', but must be True, False or 'once'"):
        EagleModel.load(bundle_of("eagle1"), check_hashes="twice")  # type: ignore[arg-type]
