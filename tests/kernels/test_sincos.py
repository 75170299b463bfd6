"""Cosines and sines of rotations: rounded from what fp64 gives, and the same bits wherever they are computed."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from onnx import TensorProto, helper

from conftest import needs_operators
from eagle_runtime.base.errors import BackendError
from operator_graphs import Array, opened, sincos

pytestmark = needs_operators


def angles_of_positions(count: int) -> Array:
    """[1, count, 32], as Llama's of heads of 64."""
    angles: Array = (np.arange(count)[:, None] * 10000 ** (-np.arange(32) / 32)).astype(np.float32)[None]
    return angles


@pytest.mark.parametrize(
    "angles",
    [
        angles_of_positions(9000),
        -angles_of_positions(300),
        np.arange(2**20 - 5000, 2**20, dtype=np.float32)[None, None],  # positions of the longest contexts
        (np.arange(4001) * np.pi / 4).astype(np.float32)[None, None],  # where one of both is nearly 0
        np.array([[[0.0, 1e-30, -1e-30]]], np.float32),
    ],
    ids=["positions", "negative", "far", "quarters", "small"],
)
def test_they_are_those_of_fp64_rounded(angles: Array) -> None:
    exact = angles.astype(np.float64)
    for computed, expected in zip(sincos().run(None, {"x": angles}), (np.cos(exact), np.sin(exact)), strict=True):
        assert computed.shape == angles.shape
        # 1e-13 away from fp64's, which changes one of some 10^5 roundings
        apart = computed != expected.astype(np.float32)
        assert apart.mean() < 1e-4
        np.testing.assert_array_max_ulp(computed, expected.astype(np.float32), 1)


def test_a_factor_multiplies_both() -> None:
    angles = angles_of_positions(50)
    for plain, multiplied in zip(
        sincos().run(None, {"x": angles}), sincos(factor=1.25).run(None, {"x": angles}), strict=True
    ):
        np.testing.assert_array_equal(plain * np.float32(1.25), multiplied)


def test_bits_are_those_of_other_processors() -> None:
    """Recorded on x86-64; ARM64 gives the same (tools/kernels_elsewhere.sh)."""
    angles = np.arange(-(2**17), 2**17, dtype=np.float32).reshape(1, 512, 512) * np.float32(0.37)
    digest = hashlib.sha256(b"".join(part.tobytes() for part in sincos().run(None, {"x": angles})))
    assert digest.hexdigest()[:16] == "860ed1de94040ed2"


def test_angles_without_meaning_end_nothing() -> None:
    angles = np.array([[[np.inf, -np.inf, np.nan, 3e38, -3e38]]], np.float32)
    cosines, sines = sincos().run(None, {"x": angles})
    for part in (cosines, sines):
        assert np.isnan(part[0, 0, :3]).all()


def test_angles_in_fp16_are_refused() -> None:
    node = helper.make_node("ExactSinCos", ["x"], ["y0", "y1"], domain="eagle")
    with pytest.raises(BackendError, match="float16"):
        opened([node], {"x": (TensorProto.FLOAT16, 3)}, 2, {})
