"""calibration.json and calibration.npz: what was written is read again, and broken files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eagle_calib.calibration import Input, Observed, Source, Tokens, read_calibration, write_calibration
from eagle_calib.errors import CalibrationError
from eagle_runtime import EagleError
from eagle_runtime.base.files import file_sha256

Edit = Callable[[dict[str, Any], dict[str, npt.NDArray[Any]]], object]


def observed(channels: int, rows: int) -> Observed:
    values = np.random.default_rng(channels).standard_normal((rows, channels)).astype(np.float32)
    return Observed(rows, np.abs(values).max(axis=0), values[:3].copy())


TARGET = [Input("x", ("q", "k"), observed(4, 9)), Input("y", ("down",), observed(6, 9))]
DRAFT = [Input("x", ("fc",), observed(8, 5))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = Source({"numpy": "2"}, "ab" * 32, Tokens(7, 2))
    write_calibration(tmp_path, source, {"target": TARGET, "draft": DRAFT}, np.arange(5, dtype=np.float32))
    return tmp_path


def edit(folder: Path, change: Edit) -> None:
    """Changes both files, and the hash that links them."""
    path, arrays_path = folder / "calibration.json", folder / "calibration.npz"
    data = json.loads(path.read_text(encoding="utf-8"))
    with np.load(arrays_path) as file:
        arrays = dict(file)
    change(data, arrays)
    np.savez(arrays_path, allow_pickle=False, **arrays)
    data["arrays"] = file_sha256(arrays_path)
    path.write_text(json.dumps(data))


def same(one: Observed, other: Observed) -> bool:
    arrays = (one.channel_absmax, other.channel_absmax), (one.sample, other.sample)
    equal = all(a.dtype == b.dtype == np.float32 and np.array_equal(a, b) for a, b in arrays)
    return equal and one.rows == other.rows


def test_a_written_calibration_is_read_again(folder: Path) -> None:
    calibration = read_calibration(folder)
    assert list(calibration.target) == ["q", "k", "down"] and list(calibration.draft) == ["fc"]
    assert calibration.target["q"] is calibration.target["k"]
    assert same(calibration.target["q"], TARGET[0].observed) and same(calibration.target["down"], TARGET[1].observed)
    assert same(calibration.draft["fc"], DRAFT[0].observed)
    edit(folder, lambda data, arrays: None)
    assert same(read_calibration(folder).draft["fc"], DRAFT[0].observed)


def item(key: str, value: Any) -> Edit:
    return lambda data, arrays: data["target"][1].update({key: value})


def array(name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Edit:
    return lambda data, arrays: arrays.update({name: change(arrays[name])})


def put(value: float) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    """Returns a change that sets the first value."""
    return lambda array: np.concatenate([[value], array.ravel()[1:]]).reshape(array.shape).astype(np.float32)


ABSMAX, SAMPLE = "target.1.channel_absmax", "target.1.sample"
BROKEN: dict[str, tuple[Edit, str]] = {
    "version": (lambda d, a: d.update(schema_version=1), "schema_version is 1"),
    "no version": (lambda d, a: d.pop("schema_version"), "schema_version is None"),
    "unknown key": (lambda d, a: d.update(more=1), "unknown key 'more'"),
    "missing key": (lambda d, a: d.pop("draft"), "key 'draft' is missing"),
    "tools": (lambda d, a: d.update(tools={"numpy": 2}), "tools is not a table of versions"),
    "tokens": (lambda d, a: d.update(tokens=3), "tokens is 3, which is not a JSON object"),
    "prefilled": (lambda d, a: d["tokens"].update(prefilled=-1), "tokens: prefilled is -1"),
    "bundle": (lambda d, a: d.update(bundle=None), "bundle is None"),
    "no inputs": (lambda d, a: d.update(target=[]), "target lists no inputs"),
    "inputs": (lambda d, a: d.update(target={}), "target lists no inputs"),
    "input": (lambda d, a: d["target"].append(3), r"target\[2\] is 3, which is not a JSON object"),
    "input key": (item("scale", 1), r"target\[1\]: unknown key 'scale'"),
    "no input key": (lambda d, a: d["target"][1].pop("rows"), r"target\[1\]: key 'rows' is missing"),
    "tensor": (item("tensor", 3), "tensor is 3"),
    "no weights": (item("weights", []), "weights is not a list of names"),
    "weights": (item("weights", ["a", 3]), "weights is not a list of names"),
    "weight twice": (item("weights", ["q"]), "weight 'q' is listed twice"),
    "rows": (item("rows", 0), "rows is 0"),
    "rows of another kind": (item("rows", 9.0), r"rows is 9\.0"),
    "fewer rows than sampled": (item("rows", 2), "the sample does not come from the rows"),
    "channels": (item("channels", 5), r"channel_absmax is float32 \[6\], which does not fit"),
    "no array": (lambda d, a: a.pop(SAMPLE), f"has no '{SAMPLE}'"),
    "array too many": (lambda d, a: a.update(more=a[ABSMAX]), "'more' belongs to no layer"),
    "type": (array(ABSMAX, lambda x: x.astype(np.float64)), "channel_absmax is float64"),
    "shape": (array(SAMPLE, lambda x: x[0]), r"sample is float32 \[6\], which does not fit"),
    "width": (array(SAMPLE, lambda x: x[:, :5]), r"sample is float32 \[3, 5\], which does not fit"),
    "empty sample": (array(SAMPLE, lambda x: x[:0]), "the sample does not come from the rows"),
    "NaN in a channel": (array(ABSMAX, put(np.nan)), "channel_absmax holds values that are not numbers"),
    "NaN in a row": (array(SAMPLE, put(np.nan)), "sample holds values that are not numbers"),
    "negative channel": (array(ABSMAX, put(-1)), "channel_absmax must hold magnitudes"),
    "channels of zeros": (array(ABSMAX, np.zeros_like), "channel_absmax must hold magnitudes"),
    "row beyond its channel": (array(SAMPLE, put(50)), "the sample does not come from the rows"),
    "objects": (array(SAMPLE, lambda x: x.astype("S4")), r"sample is \|S4"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_contents_are_refused(folder: Path, change: Edit, words: str) -> None:
    edit(folder, change)
    with pytest.raises(CalibrationError, match=words) as caught:
        read_calibration(folder)
    assert isinstance(caught.value, EagleError) and "\n" not in str(caught.value)
    assert "calibration.json" in str(caught.value) or "calibration.npz" in str(caught.value)


def test_broken_files_are_refused(folder: Path) -> None:
    json_path, arrays_path = folder / "calibration.json", folder / "calibration.npz"
    text, arrays = json_path.read_text(encoding="utf-8"), arrays_path.read_bytes()

    def error() -> str:
        with pytest.raises(CalibrationError) as caught:
            read_calibration(folder)
        json_path.write_text(text)
        arrays_path.write_bytes(arrays)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    arrays_path.write_bytes(arrays[:-10])
    assert "does not match its SHA-256 in calibration.json" in error()
    arrays_path.unlink()
    assert "calibration.npz cannot be read (" in error()
    arrays_path.write_bytes(b"PK\x03\x04 no archive")
    json_path.write_text(text.replace(json.loads(text)["arrays"], file_sha256(arrays_path)))
    assert "calibration.npz cannot be read (" in error()
    json_path.write_text("{")
    assert "is not readable JSON" in error()
    json_path.write_bytes(b"\xff")
    assert "is not readable JSON" in error()
    json_path.write_text("[" * 100_000)
    assert "is not readable JSON" in error()
    json_path.write_text("[1]")
    assert "does not hold a JSON object" in error()
    json_path.unlink()
    assert "calibration.json is missing; give the folder that eagle-calib wrote" in error()
    with pytest.raises(CalibrationError, match="is not a folder"):
        read_calibration(folder / "none")
