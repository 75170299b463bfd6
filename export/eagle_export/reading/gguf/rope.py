"""The rotary settings of a config from a GGUF file's metadata, and from the tensors in which it keeps factors.

Shapes: d width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import ADVICE, GgufFile, shortest

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
YARN = {"yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attention_factor"}
YARN |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
TOLERANCE = 1e-5  # of factors that were computed in fp32
STILL = 1e30  # factor by which frequencies that shall rotate nothing are slower
SHARES = 1 << 20  # steps of a share that floats multiply without rounding
Floats = npt.NDArray[np.float64]


def rope_parameters(file: GgufFile, width: int) -> dict[str, Any]:
    """width: d. Returns the rope_parameters of a config: what the metadata states, with the scaling of Llama 3.1.

    The converter computes the factors from the config and leaves the config out. They depend on its numbers in two ways
    alone, orig / (high - low) and low / (high - low), apart from the largest factor; so they are compared with those of
    the published models, and solved with low_freq_factor 1 if they differ. Raises ExportError for a kind that is not
    known, and for factors that no such scaling gives."""
    rope = _stated(file)
    if FACTORS not in file.tensors:
        return rope
    factors = _numbers(file, FACTORS)
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)  # positions per turn, [d/2]
    if factors.shape != waves.shape:
        raise ExportError(f"{file.path}: {FACTORS!r} has {len(factors)} factors for {len(waves)} frequencies; {ADVICE}")
    if (factors == 1).all():
        return rope
    factor = shortest(factors.max())
    for high, original in ((4.0, 8192), _solved(factors, waves, factor)):
        if np.allclose(llama_factors(waves, factor, 1.0, high, original), factors, rtol=TOLERANCE):
            return {
                **rope,
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ExportError(f"{file.path}: the factors of {FACTORS!r} are not of a Llama 3.1 scaling, and not supported")


def default_rope(file: GgufFile, base: str) -> dict[str, Any]:
    """base: key of the metadata, which must be there. Returns the rotation of whole heads, without scaling. Raises
    ExportError if the metadata has a scaling."""
    if (kind := _stated(file)["rope_type"]) != "default":
        raise ExportError(f"{file.path}: rotation of type {kind!r} is not supported in this architecture")
    return {"rope_type": "default", "rope_theta": file.number(base)}


def proportional_rope(file: GgufFile, base: str, width: int) -> dict[str, Any]:
    """base: as in default_rope. width: d. Returns a rotation by a head's higher frequencies alone, which the converter
    keeps as the factors of all. Raises ExportError for other factors."""
    factors = _numbers(file, FACTORS)
    turning = int((factors == 1).sum())
    expected = np.where(np.arange(width // 2) < turning, 1.0, np.float64(np.float32(STILL)))
    if not np.array_equal(factors, expected):
        raise ExportError(f"{file.path}: the factors of {FACTORS!r} do not leave a part of {width} unrotated; {ADVICE}")
    share = math.ceil(turning / len(factors) * SHARES) / SHARES  # of which transformers makes `turning` again
    return {**default_rope(file, base), "rope_type": "proportional", "partial_rotary_factor": share}


def _stated(file: GgufFile) -> dict[str, Any]:
    """What the metadata states, and longrope's factors."""
    rope: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = file.optional("rope.scaling.type")
    if LONG in file.tensors or SHORT in file.tensors:
        original = file.integer("rope.scaling.original_context_length")
        tables = {"long_factor": _numbers(file, LONG), "short_factor": _numbers(file, SHORT)}
        lists = {key: [shortest(value) for value in table] for key, table in tables.items()}
        return {**rope, "rope_type": "longrope", "original_max_position_embeddings": original, **lists}
    factor = file.optional("rope.scaling.factor") or file.optional("rope.scale_linear")
    if kind in (None, "none", "linear") and factor in (None, 0, 1):
        return rope
    if kind in (None, "linear"):
        return {**rope, "rope_type": "linear", "factor": shortest(factor)}
    if kind != "yarn":
        raise ExportError(f"{file.path}: rotation of type {kind!r} is not supported, or its factors are missing")
    original = file.integer("rope.scaling.original_context_length")
    rope |= {"rope_type": "yarn", "factor": shortest(factor), "original_max_position_embeddings": original}
    stated = {name: file.optional(f"rope.scaling.{key}") for key, name in YARN.items()}
    return {**rope, **{name: shortest(value) for name, value in stated.items() if value is not None}}


def llama_factors(waves: Floats, factor: float, low: float, high: float, original: float) -> Floats:
    """waves: positions per turn, [d/2]. Returns by which factor each frequency is slower, [d/2].

    Formula of Llama 3.1, as in transformers' modeling_rope_utils.py: long waves turn slower by `factor`, short waves as
    before, and those between by an interpolated factor."""
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _solved(factors: Floats, waves: Floats, factor: float) -> tuple[float, int]:
    """high_freq_factor and the original context, for low_freq_factor 1; from the waves between long and short."""
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.zeros(len(factors))
    between = (smooth > TOLERANCE) & (smooth < 1 - TOLERANCE)
    if between.sum() < 2:
        return 4.0, 8192
    slope, start = np.polyfit(1 / waves[between], smooth[between], 1)
    high = 1 - 1 / start
    return float(round(high, 3)), round(slope * (high - 1))


def _numbers(file: GgufFile, name: str) -> Floats:
    entry = file.tensors.get(name)
    if entry is None or entry.kind != "F32" or len(entry.shape) != 1:
        raise ExportError(f"{file.path}: tensor {name!r} is missing, or no list of fp32 numbers; {ADVICE}")
    return np.array(np.memmap(entry.file, np.float32, "r", entry.offset, entry.shape), dtype=np.float64)
