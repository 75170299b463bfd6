"""A calibration on disk: calibration.json lists the observed tensors, calibration.npz holds their arrays.

Only `write_calibration` and `read_calibration` know the format. K channels, n sampled rows.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eagle_calib.errors import CalibrationError
from eagle_runtime.base.files import MANIFEST_BYTES, file_sha256, read_json

Graph = Literal["target", "draft"]
Float = npt.NDArray[np.float32]

JSON_NAME, ARRAYS_NAME = "calibration.json", "calibration.npz"
SCHEMA_VERSION = 2
COUNTS = "token_counts"  # name of an array
GRAPHS: tuple[Graph, ...] = ("target", "draft")
# Rows of an expert below which its inputs are left out, so that its weights are rounded to nearest. Compensation with
# fewer rows fits the rows: at 128 the error on other rows is between 0.46 and 1.01 of that of rounding, at 32 up to
# 1.14, at 8 up to 1.4 (docs/dev/families.md).
LEAST_ROWS = 128
AGAIN = "run eagle-calib again"


@dataclass(frozen=True, slots=True)
class Observed:
    """The inputs x of a linear layer. rows: their number. channel_absmax [K]: largest |x| of each channel. sample [n,
    K]: rows that were drawn uniformly from all, in fp32 or fp16."""

    rows: int
    channel_absmax: Float
    sample: npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """target, draft: weight name -> inputs of its layer; layers that read one tensor share one object. draft is empty
    without a head. token_counts [V]: how often each token of the target's vocabulary was read or decoded."""

    target: dict[str, Observed]
    draft: dict[str, Observed]
    token_counts: Float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rows that the target computed. prefilled: rows of prompts. verified: rows of trees, with their roots."""

    prefilled: int
    verified: int


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a calibration. bundle: SHA-256 of the bundle's manifest, which lists the hashes of all its
    files."""

    tools: dict[str, str]
    bundle: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that linear layers read: its name in the graph and the weights of those layers."""

    tensor: str
    weights: tuple[str, ...]
    observed: Observed


def is_expert(weight: str) -> bool:
    """Whether a weight is one of an expert, by its name."""
    return ".experts." in weight


def write_calibration(
    folder: Path, source: Source, graphs: Mapping[Graph, Sequence[Input]], token_counts: Float
) -> None:
    """Writes both files into a folder; equal arguments give equal bytes. graphs: "draft" only if there is a head."""
    arrays: dict[str, Float] = {COUNTS: token_counts}
    listed: dict[str, list[dict[str, Any]]] = {}
    for graph in GRAPHS:
        listed[graph] = []
        for index, item in enumerate(graphs.get(graph, ())):
            seen = item.observed
            arrays[f"{graph}.{index}.channel_absmax"] = seen.channel_absmax
            arrays[f"{graph}.{index}.sample"] = seen.sample
            listed[graph].append(
                {
                    "tensor": item.tensor,
                    "weights": list(item.weights),
                    "channels": len(seen.channel_absmax),
                    "rows": seen.rows,
                }
            )
    np.savez(folder / ARRAYS_NAME, allow_pickle=False, **arrays)  # NumPy gives all members the same date
    data = {
        "schema_version": SCHEMA_VERSION,
        "tools": source.tools,
        "bundle": source.bundle,
        "tokens": {"prefilled": source.tokens.prefilled, "verified": source.tokens.verified},
        "arrays": file_sha256(folder / ARRAYS_NAME),
        **listed,
    }
    (folder / JSON_NAME).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_calibration(folder: Path) -> Calibration:
    """Reads and checks a folder that eagle-calib wrote. Raises CalibrationError."""
    path = folder / JSON_NAME
    if not folder.is_dir():
        raise CalibrationError(f"{folder} is not a folder; give the folder that eagle-calib wrote")
    data = read_json(path, MANIFEST_BYTES, CalibrationError, AGAIN, missing="give the folder that eagle-calib wrote")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CalibrationError(f"{path}: schema_version is {version!r}, but must be {SCHEMA_VERSION}; {AGAIN}")
    where = str(path)
    _check_keys(data, {"schema_version", "tools", "bundle", "tokens", "arrays", *GRAPHS}, where)
    _check_source(data, where)
    arrays = _read_arrays(folder / ARRAYS_NAME, data["arrays"])
    counts = _array(arrays, COUNTS, (None,), where)
    layers = {graph: _layers(graph, data[graph], arrays, where) for graph in GRAPHS}
    if arrays:
        raise CalibrationError(f"{folder / ARRAYS_NAME}: {min(arrays)!r} belongs to no layer; {AGAIN}")
    return Calibration(layers["target"], layers["draft"], counts)


def _check_source(data: Mapping[str, Any], where: str) -> None:
    tools, tokens = data["tools"], data["tokens"]
    if not isinstance(tools, dict) or not all(isinstance(version, str) for version in tools.values()):
        raise CalibrationError(f"{where}: tools is not a table of versions; {AGAIN}")
    _check_keys(tokens, {"prefilled", "verified"}, f"{where}: tokens")
    for name, value in tokens.items():
        _check_count(value, f"{where}: tokens: {name}")
    for name in ("bundle", "arrays"):
        if not isinstance(data[name], str):
            raise CalibrationError(f"{where}: {name} is {data[name]!r}, but must be a SHA-256; {AGAIN}")


def _read_arrays(path: Path, expected: str) -> dict[str, Float]:
    try:
        if file_sha256(path) != expected:
            raise CalibrationError(f"{path} does not match its SHA-256 in {JSON_NAME}; copy the folder or {AGAIN}")
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CalibrationError(f"{path} cannot be read ({error}); copy the folder or {AGAIN}") from None


def _layers(graph: Graph, items: Any, arrays: dict[str, Float], where: str) -> dict[str, Observed]:
    """Returns weight name -> Observed, and removes the arrays that it uses from `arrays`."""
    if not isinstance(items, list) or not (items or graph == "draft"):
        raise CalibrationError(f"{where}: {graph} lists no inputs; {AGAIN}")
    layers: dict[str, Observed] = {}
    for index, item in enumerate(items):
        here = f"{where}: {graph}[{index}]"
        _check_keys(item, {"tensor", "weights", "channels", "rows"}, here)
        weights = item["weights"]
        if not isinstance(weights, list) or not weights or not all(isinstance(name, str) for name in weights):
            raise CalibrationError(f"{here}: weights is not a list of names; {AGAIN}")
        if not isinstance(item["tensor"], str):
            raise CalibrationError(f"{here}: tensor is {item['tensor']!r}, but must be a name; {AGAIN}")
        observed = _observed(item, arrays, f"{graph}.{index}", here)
        for name in weights:
            if name in layers:
                raise CalibrationError(f"{here}: weight {name!r} is listed twice; {AGAIN}")
            layers[name] = observed
    return layers


def _observed(item: Mapping[str, Any], arrays: dict[str, Float], prefix: str, here: str) -> Observed:
    rows = _check_count(item["rows"], f"{here}: rows")
    channels = _check_count(item["channels"], f"{here}: channels")
    absmax = _array(arrays, f"{prefix}.channel_absmax", (channels,), here)
    sample = _array(arrays, f"{prefix}.sample", (None, channels), here)
    if np.any(absmax < 0) or not np.any(absmax):
        raise CalibrationError(f"{here}: channel_absmax must hold magnitudes that are not all 0; {AGAIN}")
    if not 1 <= len(sample) <= rows or np.any(np.abs(sample) > absmax):
        raise CalibrationError(f"{here}: the sample does not come from the rows that were measured; {AGAIN}")
    return Observed(rows, absmax, sample)


def _array(arrays: dict[str, Float], name: str, shape: tuple[int | None, ...], here: str) -> Float:
    if name not in arrays:
        raise CalibrationError(f"{here}: {ARRAYS_NAME} has no {name!r}; {AGAIN}")
    array = arrays.pop(name)
    fits = array.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != np.float32:
        raise CalibrationError(f"{here}: {name} is {array.dtype} {list(array.shape)}, which does not fit; {AGAIN}")
    if not np.isfinite(array).all():
        raise CalibrationError(f"{here}: {name} holds values that are not numbers; {AGAIN}")
    return array


def _check_keys(value: Any, wanted: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise CalibrationError(f"{where} is {value!r}, which is not a JSON object; {AGAIN}")
    if unknown := sorted(set(value) - wanted):
        raise CalibrationError(f"{where}: unknown key {unknown[0]!r}; {AGAIN} with this version")
    if missing := sorted(wanted - set(value)):
        raise CalibrationError(f"{where}: key {missing[0]!r} is missing; {AGAIN} with this version")


def _check_count(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise CalibrationError(f"{where} is {value!r}, but must be a whole number above 0; {AGAIN}")
    return value
