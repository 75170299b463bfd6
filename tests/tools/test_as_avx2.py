"""The altered copy of ONNX Runtime: a release that is compiled otherwise is noticed, and the copy runs."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import numpy as np
import pytest

from eagle_runtime.base.errors import EagleError
from eagle_runtime.machine.host import processor_features
from eagle_tools import as_avx2
from eagle_tools.as_avx2 import ALTERATIONS, altered, beyond_avx2, describe, installed, main, prepare

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86-64")
VERSION = importlib.metadata.version("onnxruntime")


def test_the_installed_release_asks_the_processor_where_it_is_expected() -> None:
    before = installed().read_bytes()
    after = altered(before, VERSION)
    assert len(after) == len(before)
    changed = np.count_nonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    assert 0 < changed <= sum(each.sites * len(bytes.fromhex(each.before)) for each in ALTERATIONS)
    for each in ALTERATIONS:
        assert bytes.fromhex(each.before) not in after
        assert after.count(bytes.fromhex(each.after)) >= each.sites


def test_a_release_that_is_compiled_otherwise_is_an_error() -> None:
    known = b"..".join(bytes.fromhex(each.before) for each in ALTERATIONS for _ in range(each.sites))
    assert len(altered(known, "1.99")) == len(known)
    for each in ALTERATIONS:
        says = f"onnxruntime 1.99: {each.what} was found {{}} times instead of {each.sites}; .*extend ALTERATIONS"
        with pytest.raises(EagleError, match=says.format(each.sites + 1)):
            altered(known + bytes.fromhex(each.before), "1.99")
        with pytest.raises(EagleError, match=says.format(0)):
            altered(known.replace(bytes.fromhex(each.before), b""), "1.99")


def test_the_copy_is_imported_and_its_byte_products_saturate(tmp_path: Path) -> None:
    """As on every processor without VNNI; prepare() itself checks both in another process."""
    library = prepare(tmp_path)
    assert library.read_bytes() == altered(installed().read_bytes(), VERSION)
    assert library.parent.parent == tmp_path / "onnxruntime" and prepare(tmp_path) == library


def test_a_copy_that_computes_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_avx2, "PROBE", "print(False, 'elsewhere/onnxruntime/__init__.py')")
    with pytest.raises(EagleError, match=r"came from elsewhere.*saturate: False; expected True"):
        prepare(tmp_path)


def test_the_command_says_which_processor_this_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "copy").mkdir()
    assert main([str(tmp_path / "copy")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == describe() and f"onnxruntime {VERSION}" in first and "avx2" in first
    assert second.startswith("as on AVX2: ")
    assert (tmp_path / "copy/onnxruntime").exists() == bool(beyond_avx2(processor_features()))
    assert beyond_avx2({"avx2", "avx_vnni"}) == ["avx_vnni"] and beyond_avx2({"avx2", "fma"}) == []
