"""An export closes its files before it removes or renames them: Windows refuses both while a file is open or mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from conftest import GOLDEN
from eagle_calib.folder import work_folder
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking.limits import FidelityError
from eagle_export.writing.settings import Settings
from eagle_runtime.bundle.manifest import MANIFEST_NAME
from export_workplace import make_target
from open_files import Watch, watched


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to export into."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def watch(out: Path) -> Iterator[Watch]:
    """Looks at this folder until the test ends."""
    with watched(out) as watch:
        yield watch


def test_a_bundle_is_written_and_written_again(watch: Watch, out: Path) -> None:
    settings = Settings(precision="int4")
    for _ in range(2):  # the second takes the older one's place
        export(GOLDEN / "target", GOLDEN / "head_eagle1", out / "bundle", settings)
        assert [path.name for path in out.iterdir()] == ["bundle"]


def test_a_refused_bundle_is_kept_and_accepted(watch: Watch, out: Path) -> None:
    bundle = out / "bundle"
    with pytest.raises(FidelityError):
        export(GOLDEN / "target", None, bundle, precision="int4", max_kl=1e-9)
    assert {path.name for path in work_folder(bundle).iterdir()} == {"kept"}
    export(GOLDEN / "target", None, bundle, precision="int4", max_kl=9.0, min_agreement=0.0)
    assert [path.name for path in out.iterdir()] == ["bundle"]


def test_an_error_after_the_recording_leaves_nothing(watch: Watch, out: Path) -> None:
    with pytest.raises(ExportError, match="no layer is left"):
        export(GOLDEN / "target", None, out / "bundle", precision="int8", keep=["*"])
    assert not list(out.iterdir())


def test_logits_that_are_not_finite_leave_nothing(watch: Watch, out: Path, tmp_path: Path) -> None:
    """The engine is open when they are found."""

    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e5
        tensors["model.layers.1.self_attn.o_proj.weight"] /= 1e5

    target = make_target(tmp_path / "target", overflow)
    with pytest.raises(FidelityError, match="not finite"):
        export(target, None, out / "bundle", precision="fp16", max_kl=1000.0, min_agreement=0.0)
    assert not list(out.iterdir())


@pytest.mark.parametrize("file", ["target.journal", "draft.journal", "model.onnx", MANIFEST_NAME])
def test_an_interrupt_keeps_finished_work_alone(watch: Watch, out: Path, file: str) -> None:
    """While weights are rounded by recorded inputs, and when a graph or the manifest is to be written."""
    work, watch.stop = work_folder(out / "bundle"), file
    pair = GOLDEN / "target", GOLDEN / "head_eagle1", out / "bundle"
    with pytest.raises(KeyboardInterrupt):
        export(*pair, precision="int4")
    assert not watch.stop, "it was interrupted"
    finished = set() if file == "target.journal" else {"kept"}
    assert {path.name for path in out.rglob(f"{work.name}/*")} == finished
    export(*pair, precision="int4")
    assert [path.name for path in out.iterdir()] == ["bundle"]
