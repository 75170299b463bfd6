"""Saves and loads what a run needs to continue as if it had never stopped.

A checkpoint is one safetensors file: the head's weights, AdamW's two moments, and a JSON note with the step, the
seconds used and the run's settings. Batches and noise are functions of (seed, step), so the step stands for both the
random state and the position in the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle_train.errors import TrainError
from eagle_train.head import write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. step: finished steps. elapsed_s: seconds of training that they took."""

    step: int
    elapsed_s: float


def save_checkpoint(
    path: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    run: Mapping[str, Any],
) -> None:
    """Write a checkpoint. run: what a resumed run must share (settings, data, target), as JSON. Raises TrainError on a
    full disk, which leaves an older checkpoint untouched."""
    tensors = {f"weight.{name}": value.detach().cpu() for name, value in parameters.items()}
    for name, value in parameters.items():
        state = optimizer.state.get(value)
        if state:
            tensors |= {f"{moment}.{name}": state[moment].cpu() for moment in MOMENTS}
    note = {"step": progress.step, "elapsed_s": progress.elapsed_s, "run": dict(run)}
    write_tensors(path, tensors, {"training": json.dumps(note)})


def load_checkpoint(
    path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, run: Mapping[str, Any]
) -> Progress:
    """Fill parameters and optimizer; returns the progress. Raises TrainError if the file is damaged or of another
    run."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["training"])
            _check_same(path, note["run"], run)
            step = int(note["step"])
            with torch.no_grad():
                for name, value in parameters.items():
                    value.copy_(file.get_tensor(f"weight.{name}"))
                    if step:
                        # Copies, since the file's own are mapped: Windows would not let the next one replace it.
                        moments = {m: file.get_tensor(f"{m}.{name}").to(value.device, copy=True) for m in MOMENTS}
                        optimizer.state[value] = {"step": torch.tensor(float(step), device=value.device), **moments}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{path} is not a checkpoint of such a run ({error}); start again in another folder") from None
    return Progress(step, float(note["elapsed_s"]))


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        name = changed[0]
        raise TrainError(
            f"{path} was made with another {name} ({_short(before.get(name))}, now "
            f"{_short(now.get(name))}); resume with the same settings, data and target, or start in another folder"
        )


def _short(value: Any) -> str:
    return "left out" if value is None else value[:12] if isinstance(value, str) else str(value)
