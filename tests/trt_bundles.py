"""Fixtures of the TensorRT tests: engines and quantised bundles of the golden pair, made once for all workers. A test
file loads them with pytest_plugins."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from conftest import GOLDEN, HEADS, put_tokenizer, write_block

if TYPE_CHECKING:
    from eagle_export.tensorrt.build import Built

CAPABILITIES = ["12.0", "8.6", "8.9", "8.6"]  # in no order, and one of them twice


@pytest.fixture(scope="session")
def made_once(shared: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """Returns a function: name, make -> the folder of that name, which the first worker that asks for it fills with
    `make(folder)`. Tests leave it as it is."""

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        made, finished = shared / name, shared / f"{name}.finished"
        with FileLock(f"{made}.lock"):
            if not finished.exists():
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                make(made)
                finished.touch()
        return made

    return folder


@pytest.fixture(scope="session")
def engines_of(
    bundle_of: Callable[..., Path], made_once: Callable[[str, Callable[[Path], object]], Path]
) -> Callable[[str], tuple[Path, Built]]:
    """Returns a function: kind of head -> a bundle of the golden pair in fp16, and the engines that were built in it
    for three compute capabilities at once."""

    def engines(kind: str) -> tuple[Path, Built]:
        def make(folder: Path) -> None:
            from eagle_export.tensorrt.build import build_engines

            shutil.copytree(bundle_of(kind, "fp16"), folder / "bundle")
            built = build_engines(folder / "bundle", "tensorrt-rtx", CAPABILITIES, context=1000)
            (folder / "built.pickle").write_bytes(pickle.dumps(built))

        folder = made_once(f"engines_{kind}", make)
        built: Built = pickle.loads((folder / "built.pickle").read_bytes())
        return folder / "bundle", built

    return engines


@pytest.fixture(scope="session")
def quantised_bundle_of(
    bundle_of: Callable[..., Path], made_once: Callable[[str, Callable[[Path], object]], Path]
) -> Callable[[str, str], Path]:
    """Returns a function: kind of head, precision -> a calibrated bundle of the golden pair for TensorRT for RTX."""

    def calibration(kind: str) -> Path:
        def make(folder: Path) -> None:
            from eagle_calib.calibrate import calibrate

            shutil.copytree(bundle_of(kind), folder / "bundle")
            put_tokenizer(folder / "bundle")
            calibrate(folder / "bundle", folder / "calibration", threads=1, max_tokens=300)

        return made_once(f"tensorrt_calibration_{kind}", make) / "calibration"

    def bundle(kind: str, precision: str) -> Path:
        def make(folder: Path) -> None:
            from eagle_export.bundle import export
            from eagle_export.writing.settings import Settings

            export(
                GOLDEN / "target",
                GOLDEN / HEADS[kind] if kind in HEADS else write_block(kind, folder / "head"),
                folder / "bundle",
                Settings(precision=precision, backend="tensorrt-rtx", calibration=calibration(kind), certify=False),
            )

        return made_once(f"tensorrt_{kind}_{precision}", make) / "bundle"

    return bundle
