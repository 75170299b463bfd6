"""Changed copies of the golden pair to export, for the tests of what eagle-export refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.commands.cli import main
from trace_memory import TraceMemory

LAYERS = 2  # of make_target's targets


def make_target(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None) -> Path:
    """The golden target cut to LAYERS layers, its tensors changed, with a tokenizer."""
    folder.mkdir()
    config = {**json.loads((GOLDEN / "target/config.json").read_text()), "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(GOLDEN / "target/model.safetensors")
    layer = re.compile(r"\.layers\.(\d+)\.")
    tensors = {n: t.clone() for n, t in stored.items() if (index := layer.search(n)) is None or int(index[1]) < LAYERS}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
    return folder


class Workplace:
    """A copy of the golden pair, and an empty folder to export into. traces: counts the traces of this process."""

    def __init__(self, golden: Path, root: Path, traces: TraceMemory) -> None:
        self.root, self.traces = root, traces
        self.target, self.eagle1, self.eagle3 = root / "target", root / "eagle1", root / "eagle3"
        for name, folder in (("target", self.target), ("head_eagle1", self.eagle1), ("head_eagle3_dv44", self.eagle3)):
            shutil.copytree(golden / name, folder)
        self.bundle = root / "out" / "bundle"
        self.bundle.parent.mkdir()

    def arguments(self, head: str = "eagle1") -> list[str]:
        return [str(self.target), str(self.root / head), "-o", str(self.bundle)]

    def snapshot(self) -> dict[str, Any]:
        """Every path below the root with its content: equal snapshots mean that no file was added, changed or
        removed."""
        return {
            str(path.relative_to(self.root)): os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
            for path in self.root.rglob("*")
        }

    def make_shallow(self) -> None:
        """Keeps one layer of the target, for errors that come after the trace."""
        configure(self.target, num_hidden_layers=1)
        edit(
            self.target, lambda t: [t.pop(name) for name in list(t) if ".layers." in name and ".layers.0." not in name]
        )


def configure(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites model.safetensors after `change` was applied to its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[-1].fill_(value)


def write_index(folder: Path, weight_map: object) -> None:
    """Replaces the weights by an index."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shard(folder: Path) -> None:
    """Leaves one of two shards, as an interrupted download does."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    names = sorted(json.loads(index.read_text())["weight_map"])
    files = [f"model-0000{1 + (2 * i >= len(names))}-of-00002.safetensors" for i in range(len(names))]
    index.write_text(json.dumps({"weight_map": dict(zip(names, files, strict=True))}))


@contextmanager
def workplace(golden: Path, root: Path, monkeypatch: pytest.MonkeyPatch, traces: TraceMemory) -> Iterator[Workplace]:
    """A workplace; the variable that the command sets in its process is restored at the end."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield Workplace(golden, root, traces)


def refusal(work: Workplace, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that eagle-export prints; all files must be unchanged."""
    before = work.snapshot()
    try:
        status: object = main(argv)
    except SystemExit as stop:  # argparse exits
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("eagle-export: ") and err.index("\n") == len(err) - 1, err
    assert work.snapshot() == before
    return err


def early_refusal(work: Workplace, capsys: pytest.CaptureFixture[str]) -> str:
    """The refusal's line, given before the trace."""
    asked = work.traces.asked
    message = refusal(work, work.arguments(), capsys)
    assert work.traces.asked == asked
    return message
