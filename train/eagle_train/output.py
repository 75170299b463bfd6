"""The folder of a training run: the files that a run writes, and which folders suit one."""

from __future__ import annotations

from eagle_train.config import TrainingJob
from eagle_train.data import WINDOW_FILES
from eagle_train.errors import TrainError

WORK, CHECKPOINT, LOG = "training", "checkpoint.safetensors", "log.jsonl"
WINDOWS = {f"{name}/{file}" for name in ("data", "eval") for file in WINDOW_FILES}
OWN_FILES = {CHECKPOINT, f".{CHECKPOINT}.new", LOG, "data", "eval", *WINDOWS}  # all that a run writes to WORK


def check_output(job: TrainingJob) -> None:
    """Raises TrainError unless the output folder suits the run. A new run needs a folder without files, or one of a run
    that stopped before its first checkpoint. training/ in it may contain only a run's own files, since they are
    overwritten and deleted."""
    output, checkpoint = job.output, job.output / WORK / CHECKPOINT
    if not output.absolute().parent.is_dir():
        raise TrainError(f"{output.absolute().parent} does not exist; create it first")
    if output.exists() and not output.is_dir():
        raise TrainError(f"{output} exists and is not a folder; choose another name")
    if job.resume and not checkpoint.parent.is_dir():
        raise TrainError(f"{checkpoint} is missing, so there is nothing to resume; start a new run")
    if not job.resume and checkpoint.is_file():
        raise TrainError(f"{output} holds a training run; resume it, or choose another folder")
    if not job.resume and output.is_dir() and {path.name for path in output.iterdir()} - {WORK}:
        raise TrainError(f"{output} is not empty; choose another folder")
    work = output / WORK
    if foreign := sorted(path for path in work.rglob("*") if path.relative_to(work).as_posix() not in OWN_FILES):
        raise TrainError(f"{foreign[0]} is not a file of a training run; move it, or choose another folder")
