"""The paths of weight files in a graph: read without the onnx library, compared with what onnx reads, and checked
against the manifest before an engine opens anything."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from eagle_runtime import BundleError, EagleModel
from eagle_runtime.bundle.listed_files import at_places, external_files, read_graph
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from patience import PATIENCE_S
from systems import needs_links, posix_only

GRAPH = "target/model.onnx"
ONES = np.ones(1 << 18, np.float32).tobytes()  # more than any tensor of the golden pair takes


def named_by_onnx(model: Message) -> Iterator[str]:
    """Every location below a message, whatever it is, by the library's own description of it."""
    for field, value in model.ListFields():
        for item in value if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else [value]:
            if isinstance(item, Message):
                yield from named_by_onnx(item)
        if field.name == "external_data":
            yield from (entry.value for entry in value if entry.key == "location")


def outside(name: str, location: str) -> TensorProto:
    """A tensor whose numbers lie in a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"offset": "0", "location": location, "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def everywhere() -> onnx.ModelProto:
    """A model with a tensor at every place that may hold one; numbers of no use, as nobody runs it."""
    graph = helper.make_graph([], "inner", [], [], initializer=[outside("a", "subgraph")])
    sparse = onnx.SparseTensorProto(values=outside("b", "values"), indices=outside("c", "indices"), dims=[2])
    node = helper.make_node("Constant", [], ["y"], value=outside("d", "attribute"))
    node.attribute.append(helper.make_attribute("body", graph))
    node.attribute.append(helper.make_attribute("bodies", [graph]))
    node.attribute.append(helper.make_attribute("tensors", [outside("e", "first"), outside("f", "second")]))
    node.attribute.append(helper.make_attribute("sparse", sparse))
    node.attribute.append(helper.make_attribute("sparses", [sparse]))
    outer = helper.make_graph([node], "outer", [], [], initializer=[outside("g", "../up")], sparse_initializer=[sparse])
    function = helper.make_function("own", "Own", [], ["y"], [node], [helper.make_opsetid("", 21)])
    function.attribute_proto.append(helper.make_attribute("default", outside("h", "default")))
    model = helper.make_model(outer, functions=[function])
    model.training_info.add(initialization=graph, algorithm=outer)
    return model


def test_every_place_of_a_tensor_is_looked_at() -> None:
    model = everywhere()
    locations = sorted(external_files(model.SerializeToString()))
    assert locations == sorted(named_by_onnx(model))
    assert set(locations) == {
        "subgraph", "values", "indices", "attribute", "first", "second", "../up", "default"
    }  # fmt: skip


def test_a_location_without_a_text_is_the_empty_one() -> None:
    model = helper.make_model(helper.make_graph([], "empty", [], [], initializer=[outside("a", "")]))
    assert list(external_files(model.SerializeToString())) == list(named_by_onnx(model)) == [""]
    model.graph.initializer[0].external_data[1].ClearField("value")
    assert list(external_files(model.SerializeToString())) == list(named_by_onnx(model)) == [""]


@pytest.mark.parametrize("length", [1, 90, 127, 128, 20_000])
def test_initializers_are_read_from_other_places(length: int) -> None:
    """Whatever the new path's length does to those of the messages around it."""
    tensors = [outside("a", "old"), outside("b", "kept"), outside("c", "old"), helper.make_tensor("d", 1, [1], [2.5])]
    model = helper.make_model(helper.make_graph([], "small", [], [], initializer=tensors), producer_name="somebody")
    moved = onnx.load_model_from_string(at_places(model.SerializeToString(), {"old": "n" * length}))
    assert list(named_by_onnx(moved)) == ["n" * length, "kept", "n" * length]
    back = onnx.load_model_from_string(at_places(moved.SerializeToString(), {"n" * length: "old"}))
    assert back == model


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_exported_graphs_name_their_own_weights(bundle_of: Callable[..., Path], precision: str) -> None:
    bundle = bundle_of("eagle3", precision)
    manifest = read_manifest(bundle)
    for model in manifest.models.values():
        content = read_graph(bundle, manifest, model.graph.file)
        assert content == (bundle / model.graph.file).read_bytes()
        locations = list(external_files(content))
        assert sorted(locations) == sorted(named_by_onnx(onnx.load_model_from_string(content)))
        assert set(locations) == {"model.onnx.data"} and len(locations) > 1


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_whatever_onnx_can_read_is_read_alike(data: st.DataObject) -> None:
    """Bytes changed, cut out and put in: a location that the library sees is never missed."""
    content = bytearray(everywhere().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    model = onnx.ModelProto()
    try:
        seen = set(external_files(bytes(content)))
    except ValueError:
        return  # refused
    try:
        model.ParseFromString(bytes(content))
    except DecodeError:
        return
    assert set(named_by_onnx(model)) <= seen


@pytest.mark.parametrize(
    "content",
    [
        b"\x3a",  # a graph without a length
        b"\x3a\x05\x0a",  # longer than the file
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of more than 64 bits
        b"\x3b",  # a group
        b"\x3f",  # no kind at all
        b"\xba\x80\x80\x80\x90\x01\x00",  # the graph's number, and a bit that a reader of 32 drops
        b"\x0d\x00\x00",  # four bytes that are three
    ],
)
def test_no_protocol_buffer(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (what it says is the caller's)
        list(external_files(content))


@pytest.fixture
def bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"))


def point(bundle: Path, location: str) -> None:
    """Let one tensor of the target come from elsewhere, and the manifest list the graph that says so."""
    model = onnx.load(str(bundle / GRAPH), load_external_data=False)
    tensor = next(item for item in model.graph.initializer if item.external_data)
    entries = {entry.key: entry for entry in tensor.external_data}
    entries["location"].value = location
    entries["offset"].value = "0"
    (bundle / GRAPH).write_bytes(model.SerializeToString())
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    data["files"][GRAPH] = hashlib.sha256((bundle / GRAPH).read_bytes()).hexdigest()
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))


def next_to_it(bundle: Path) -> str:
    (bundle / "target" / "other.data").write_bytes(ONES)
    return "other.data"


def hard_link(bundle: Path) -> str:
    (bundle.parent / "secret").write_bytes(ONES)
    os.link(bundle.parent / "secret", bundle / "target" / "other.data")
    return "other.data"


def in_the_other_folder(bundle: Path) -> str:
    return "../draft/model.onnx.data"


def up(bundle: Path) -> str:
    (bundle.parent / "secret").write_bytes(ONES)
    return "../../secret"


def absolute(bundle: Path) -> str:
    return str(bundle.parent / up(bundle).rpartition("/")[2])


def there_and_back(bundle: Path) -> str:
    return "../target/model.onnx.data"


def link(bundle: Path) -> str:
    up(bundle)
    (bundle / "target" / "other.data").symlink_to("../../secret")
    return "other.data"


def pipe(bundle: Path) -> str:
    os.mkfifo(bundle / "target" / "other.data")
    return "other.data"


def address(bundle: Path) -> str:
    return "*/_ORT_MEM_ADDR_/*"


@pytest.mark.parametrize(
    "place",
    [
        *(next_to_it, hard_link, in_the_other_folder, up, absolute, there_and_back, address),
        pytest.param(link, marks=needs_links),
        pytest.param(pipe, marks=posix_only),
    ],
)
def test_weights_from_a_file_that_is_not_listed(bundle: Path, place: Callable[[Path], str]) -> None:
    """Refused before an engine sees the graph. In a process of its own, which would wait at a pipe."""
    location = place(bundle)
    point(bundle, location)
    command = [
        sys.executable,
        "-m",
        "eagle_runtime.commands.cli",
        str(bundle),
        "--prompt-ids",
        "5,6,7",
        "--max-new-tokens",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"eagle-run: {bundle / GRAPH} reads its weights from {location!r}, which {MANIFEST_NAME} does not list; "
        "export the bundle again\n"
    )


def test_weights_from_another_file_that_is_listed(bundle: Path) -> None:
    name = next_to_it(bundle)
    point(bundle, name)
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    data["files"][f"target/{name}"] = hashlib.sha256((bundle / "target" / name).read_bytes()).hexdigest()
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with EagleModel.load(bundle, threads=1) as model:
        assert len(model.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True).token_ids) == 2


def test_a_graph_is_hashed_even_where_hashes_are_not_asked_for(bundle: Path) -> None:
    """What is read whole is compared at no cost; only the weights are taken on trust."""
    model = onnx.load(str(bundle / GRAPH), load_external_data=False)
    model.doc_string = "another"
    (bundle / GRAPH).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"model\.onnx does not match its SHA-256"):
        EagleModel.load(bundle, check_hashes=False)
