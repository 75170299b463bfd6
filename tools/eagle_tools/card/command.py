"""eagle-doctor --card: runs the check of a kit on this machine's card and writes its report, a JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_runtime import BackendError, EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.machine.nvidia import first_gpu
from eagle_tools.card.check import BACKEND, CONTEXT, Machine, Step, check_card
from eagle_tools.card.kit import Kit, read_kit

SCHEMA = 2  # of the report
CONTENTS = (
    "the GPU: name, compute capability, memory, driver",
    "the system: its kind, release and processor type, Python's version, versions of the libraries used",
    "each step of the check: its outcome, times, differences of logits, counts of tokens, an error's text",
    "no names of users, computers or folders, no text but the kit's own, nothing of other programs",
)
LIBRARIES = ("eagle-edge", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "cuda-bindings", "numpy")


def report_card(args: argparse.Namespace) -> bool:
    """Check, print a line for each step, and write the report; returns whether all is well. Raises BackendError without
    a GPU, after the steps that need none; RequestError for a folder that is not a kit."""
    folder = Path(args.card)
    kit = read_kit(folder)
    output = Path(args.output or "card.json")
    if output.exists() and not output.is_file():
        raise RequestError(f"--output {output} is a folder; name a file")
    return run_check(folder, kit, Machine(first_gpu, _open, _build), output, as_json=args.json)


def run_check(folder: Path, kit: Kit, machine: Machine, output: Path, *, as_json: bool) -> bool:
    """As report_card, on a given machine."""
    steps = []
    for step in check_card(folder, kit, machine):
        steps.append(step)
        if not as_json:
            word = {True: "ok", False: "FAILS", None: "-"}[step.ok]
            print(f"{step.name:34}  {word:5}  {step.says}", flush=True)
        report = report_of(folder, kit, steps)  # written after each step, so that one that ends the process is seen
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{output} has the figures; docs/backends.md says what it holds and where to send it")
    if steps[0].ok is None:
        raise BackendError(f"this machine has no GPU to check: {steps[0].says}")
    return all(step.ok is not False for step in steps)


def report_of(folder: Path, kit: Kit, steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the report as JSON. Folders of this machine in errors are replaced."""
    report = {
        "schema": SCHEMA,
        "contains": CONTENTS,
        "kit": {key: value for key, value in dataclasses.asdict(kit).items() if key != "files"},
        "system": {
            "os": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "libraries": {name: version for name in LIBRARIES if (version := _version(name)) is not None},
        },
        "ok": all(step.ok is not False for step in steps) and steps[0].ok is True,
        "steps": [dataclasses.asdict(step) for step in steps],
    }
    return _without_folders(report, folder)  # type: ignore[no-any-return]


def _without_folders(value: Any, kit: Path) -> Any:
    """Returns JSON in which no text names a folder of this machine."""
    if isinstance(value, dict):
        return {key: _without_folders(item, kit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item, kit) for item in value]
    if isinstance(value, str):
        for place, name in ((kit.absolute(), "KIT"), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
            for form in (str(place), place.as_posix()):
                value = value.replace(form, name) if len(form) > 1 else value
        if not kit.is_absolute():
            value = value.replace(f"{kit}{os.sep}", "KIT/")
    return value


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _open(bundle: Path, backend: str) -> EagleModel:
    return EagleModel.load(bundle, backend=backend, context=CONTEXT)


def _build(bundle: Path, capability: str) -> None:
    from eagle_export.tensorrt.build import build_engines

    build_engines(bundle, BACKEND, [capability], context=CONTEXT)
