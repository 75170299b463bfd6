"""An export closes its files before it removes or renames them: Windows refuses both while a file is open or mapped.

Where the system lists open and mapped files, they are looked at before each of these steps. On Windows the step itself
fails, and what is left says so."""

from __future__ import annotations

import contextlib
import os
import sys
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

STEPS = {"shutil.rmtree": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}  # audit event -> paths among its arguments
LISTED = Path("/proc/self/fd"), Path("/proc/self/maps")  # of Linux


class Watch:
    """Looks at all that is done in a folder. held: files that were open when they, or a folder with them, were to be
    removed or renamed. stop: opening a file of this name raises KeyboardInterrupt, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: set[str] = set()
        self.stop = ""
        self._looking = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._looking or not (event == "open" or event in STEPS):
            return
        paths = [Path(os.fspath(one)) for one in arguments[: STEPS.get(event, 1)] if isinstance(one, str | os.PathLike)]
        paths = [path for path in paths if path.is_relative_to(self.folder)]
        if event == "open":
            if any(path.name == self.stop for path in paths):
                self.stop = ""
                raise KeyboardInterrupt
            return
        self._looking = True
        for path in paths:
            if path.name != "lock":  # which is removed before it is released, but on Windows
                self.held |= {name for name in open_files() if Path(name).is_relative_to(path)}
        self._looking = False


def open_files() -> set[str]:
    """Names of the files that this process has open or mapped; of none where the system does not list them."""
    if sys.platform != "linux":
        return set()
    fields = [line.split(maxsplit=5) for line in LISTED[1].read_text(encoding="utf-8").splitlines()]
    names = {each[5] for each in fields if len(each) == 6}
    for file in LISTED[0].iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone
            names.add(os.readlink(file))
    return names


WATCHES: list[Watch] = []  # at most one; a hook stays until the process ends


def _look(event: str, arguments: tuple[object, ...]) -> None:
    for watch in WATCHES:
        watch(event, arguments)


sys.addaudithook(_look)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to export into."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def watch(out: Path) -> Iterator[Watch]:
    """Looks at this folder until the test ends, which no file was to be held for."""
    WATCHES.append(Watch(out))
    yield WATCHES[0]
    held = WATCHES.pop().held
    assert not held


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
