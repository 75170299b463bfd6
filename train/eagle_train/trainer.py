"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import reduce as reduce_over_processes  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from eagle_calib.folder import claimed
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.reading.families.target import open_target
from eagle_train.ahead import ahead_objective
from eagle_train.attention import FUSED
from eagle_train.batches import OnlineTeacher, Order, Teacher, gather, step_generator
from eagle_train.blocks import block_objective, draw_roots
from eagle_train.bundle_target import BundleTarget, check_bundle, opened_target
from eagle_train.cache import CachedTeacher
from eagle_train.checkpoint import Progress, load_checkpoint, save_checkpoint
from eagle_train.config import BETAS, CLIP, TrainConfig, TrainingJob
from eagle_train.data import TextReader, Windows, open_windows, special_ids, write_windows
from eagle_train.errors import TrainError
from eagle_train.examine import examine
from eagle_train.from_eagle import start_from_eagle1
from eagle_train.head import (
    choose_vocabulary,
    coverage,
    new_head,
    read_head,
    save_head,
    shape_of,
    trained,
    vocabulary_of,
)
from eagle_train.held import HeldTeacher
from eagle_train.metrics import Acceptance, Tally
from eagle_train.objective import Vocabulary, eagle1_objective, eagle3_objective
from eagle_train.output import CHECKPOINT, LOG, WORK, check_output
from eagle_train.precision import mixed, unhalved
from eagle_train.progress import say
from eagle_train.target import FrozenTarget, fingerprint
from eagle_train.taught import Batch, Taught

PROGRESS_EVERY_S = 5.0


def train_head(job: TrainingJob, config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> Acceptance | None:
    """Train a head until its budget is used up and save it. Returns the acceptance on the held-out data, if given.

    Raises TrainError, ExportError for a target that cannot be used, or FolderError while another process trains into
    the same folder. A checkpoint written before stays usable."""
    if job.layout not in config.of_kind.layouts:
        raise TrainError(
            "speculators has no layout for other heads than EAGLE-3's; leave layout out, or train an eagle3 head"
        )
    if job.target_bundle is not None and not config.of_kind.from_bundle:
        raise TrainError("block heads learn from TARGET alone; leave target_bundle out")
    processes = PartialState(cpu=job.device == "cpu")
    device = torch.device("cpu") if job.device == "cpu" else processes.device
    if device.type != (job.device or device.type):
        raise TrainError(f"device {job.device} is not available; leave it out to use what is")
    check_output(job)
    if job.target_bundle is not None:
        check_bundle(job.target_bundle, open_target(job.target), config.kind, config.seq_len, job.init)
    with claimed(job.output.absolute()) if processes.is_main_process else contextlib.nullcontext():
        return _train(job, config, processes, device, clock)


def _train(
    job: TrainingJob, config: TrainConfig, processes: PartialState, device: torch.device, clock: Callable[[], float]
) -> Acceptance | None:
    try:
        with _opened_bundle(job, config) as bundle:
            target = FrozenTarget(job.target, device)
            shape_of(config, target, target.vocab_size)  # raises for an unsuitable target before any long work
            given = None if job.init is None else read_head(job.init, target, config)
            if bundle is not None:
                bundle.check_features(target, given)
            with sdpa_kernel(FUSED):
                acceptance = _prepare(job, config, target, bundle, given, processes, clock).loop()
        processes.wait_for_everyone()
        if processes.is_main_process:  # made again from the data files when needed
            for name in ("data", "eval"):
                shutil.rmtree(job.output / WORK / name, ignore_errors=True)
        return acceptance
    except torch.OutOfMemoryError:
        raise TrainError(
            f"{device} is out of memory; give a smaller batch_size or seq_len, or recompute for EAGLE-3"
        ) from None
    except OSError as error:
        raise TrainError(
            f"{error.filename or job.output} could not be read or written ({error.strerror}); what was saved before "
            "is still there, so free space and resume the run"
        ) from None


def _opened_bundle(job: TrainingJob, config: TrainConfig) -> AbstractContextManager[BundleTarget | None]:
    """Returns a context with the bundle to learn from, if there is one."""
    return contextlib.nullcontext() if job.target_bundle is None else opened_target(job.target_bundle, config.seq_len)


def _prepare(
    job: TrainingJob,
    config: TrainConfig,
    target: FrozenTarget,
    bundle: BundleTarget | None,
    given: HeadPart | None,
    processes: PartialState,
    clock: Callable[[], float],
) -> Run:
    """Cut the data into windows, choose the draft vocabulary, build or reload the head."""
    work = job.output / WORK
    reader = TextReader(job.target, target.vocab_size, target.eos, job.pattern)
    if processes.is_main_process:
        fresh = not job.output.exists()
        try:
            written = write_windows(reader.read(job.data), work / "data", config.seq_len, _names(job.data))
            if np.diff(written.starts).max() > (context := target.context):
                raise TrainError(
                    f"seq_len is {config.seq_len}, but the context of {job.target} is {context}; give a smaller seq_len"
                )
            if job.eval_data:
                write_windows(reader.read(job.eval_data), work / "eval", config.seq_len, _names(job.eval_data))
        except TrainError:
            if fresh:
                shutil.rmtree(job.output, ignore_errors=True)
            raise
        if job.eval_data and config.steps != 0 and (repeated := _repeated(work)):
            say(f"{repeated} held-out windows are training text too; what is measured on those holds for no other text")
        if reader.skipped:
            say(f"{reader.skipped} rows left out, which cannot be used; the first: {reader.skip_reason}")
    processes.wait_for_everyone()
    windows = open_windows(work / "data")
    held_out = open_windows(work / "eval") if job.eval_data else None
    counts = windows.loss_counts(target.vocab_size)
    if not config.of_kind.own_vocabulary:
        vocabulary = None
    elif given is not None and given.config.kind == config.kind and config.draft_vocab is None:
        vocabulary = vocabulary_of(given)
    else:
        vocabulary = choose_vocabulary(counts, config.draft_vocab, (*target.eos, *special_ids(job.target)))
    size = target.vocab_size if vocabulary is None else len(vocabulary.ids)
    if given is None or given.config.kind != config.kind:
        shape = shape_of(config, target, size)
    else:
        shape = dataclasses.replace(given.config, draft_vocab_size=size)
    covered = coverage(counts, vocabulary)
    run = Run(job, config, target, bundle, shape, given, vocabulary, windows, held_out, processes, clock)
    if processes.is_main_process:
        say(
            f"{len(windows)} windows, {len(windows.ids)} tokens, {int(windows.mask.sum())} under loss"
            + (f"; draft vocabulary of {size} covers {covered:.2%} of them" if vocabulary is not None else "")
            + (f"; features and logits by {bundle.description}" if bundle is not None else "")
        )
        run.log({"event": "start", "windows": len(windows), "draft_vocab": size, "coverage": covered})
    return run


class Run:
    """One training run: the head, its optimizer and its data."""

    def __init__(
        self,
        job: TrainingJob,
        config: TrainConfig,
        target: FrozenTarget,
        bundle: BundleTarget | None,
        shape: HeadConfig,
        given: HeadPart | None,
        vocabulary: Vocabulary | None,
        windows: Windows,
        held_out: Windows | None,
        processes: PartialState,
        clock: Callable[[], float],
    ) -> None:
        self._job, self._config, self._target, self._shape = job, config, target, shape
        self._windows, self._held_out, self._processes, self._clock = windows, held_out, processes, clock
        self._device = target.device
        self._vocabulary = None if vocabulary is None else vocabulary.to(self._device)
        self._order = Order(
            np.diff(windows.starts), config.batch_size, config.seed, processes.process_index, processes.num_processes
        )
        self._teacher: Teacher = OnlineTeacher(target, shape.taps) if bundle is None else bundle
        self._examiner: Teacher = self._teacher  # of the held-out data
        if bundle is None and job.cache is None and HeldTeacher.fits(target, shape.taps, windows):
            self._teacher = HeldTeacher(target, shape.taps, windows)
        self._identity = {
            **config.fixed(),
            "data": windows.digest,
            "target": target.fingerprint(),
            "target_bundle": None if bundle is None else bundle.fingerprint(),
            "processes": processes.num_processes,
            "init": None if given is None else fingerprint(given.checkpoint),
        }
        if job.cache is not None:
            with processes.main_process_first():  # it fills the cache for all
                self._teacher = CachedTeacher(job.cache, target, shape.taps, windows, self._identity["target"])
                if held_out is not None:
                    self._examiner = CachedTeacher(job.cache, target, shape.taps, held_out, self._identity["target"])
        self._head = new_head(shape, target, vocabulary, config.inputs, config.seed, given)
        if given is not None and given.config.kind != shape.kind:
            assert isinstance(self._head, BlockHead)
            start_from_eagle1(self._head, shape, given, target, windows, config.seed)
        self._read: torch.nn.Module = torch.nn.Identity()  # from the target's features to those that the head reads
        if isinstance(self._head, Eagle3Head) and bundle is None:
            self._read = self._head.fc
        elif isinstance(self._head, Eagle3Head):  # the bundle's target has read the taps
            self._head.fc.requires_grad_(False)
        self._parameters = trained(self._head)
        self._peak = config.peak_lr(target.hidden_size)
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=self._peak, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._log, self._progress = job.output / WORK / LOG, Progress(0, 0.0)
        if self._checkpoint.is_file():
            self._resume()
        elif processes.is_main_process:
            self._log.unlink(missing_ok=True)
            if job.resume:
                say(f"{self._checkpoint} was not written before the run stopped; starting from the beginning")

    def loop(self) -> Acceptance | None:
        """Train to the end of the budget and save. Returns the acceptance on the held-out data, if given."""
        config, main = self._config, self._processes.is_main_process
        tally, reported = self._tally(), 0.0
        started, before, saved = self._clock(), self._progress.elapsed_s, self._progress.step
        while config.used(self._progress.step, self._progress.elapsed_s) < 1:
            loss, parts = self._step(tally)
            elapsed = self._mean_over_processes(before + self._clock() - started)
            self._progress = Progress(self._progress.step + 1, elapsed)
            step = self._progress.step
            if not main:
                continue
            if step == 1 or elapsed - reported >= PROGRESS_EVERY_S:
                self._print_progress(loss, tally.read())
                reported = elapsed
            if step % config.save_every == 0:
                self._save()
                saved = step
            if step % config.eval_every == 0 and config.used(step, elapsed) < 1:
                self._evaluate()
            if step % config.log_every == 0 or step == 1:
                self._log_step(loss, parts, tally.read())
                tally = self._tally()
        if not main:
            return None
        if saved != self._progress.step or not self._checkpoint.exists():
            self._save()
        if config.inputs == "feature+unshifted":
            say(
                "decoding feeds no head with unshifted tokens, so this one is not saved, only measured on held-out data"
            )
        else:
            layout = self._job.layout
            save_head(self._job.output, self._head, self._shape, self._target, self._vocabulary, layout)
        return self._evaluate()

    def log(self, row: dict[str, Any]) -> None:
        """Append a line to the training log."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def _checkpoint(self) -> Path:
        return self._job.output / WORK / CHECKPOINT

    def _mean_over_processes(self, elapsed_s: float) -> float:
        """Returns the same time in every process, so that all stop at the same step."""
        if self._processes.num_processes == 1:
            return elapsed_s
        seconds = torch.tensor(elapsed_s, dtype=torch.float64, device=self._device)
        return float(reduce_over_processes(seconds, "mean"))

    def _step(self, tally: Tally) -> tuple[Tensor, dict[str, Tensor]]:
        config, step = self._config, self._progress.step
        indices = self._order.windows(step)
        batch = gather(self._windows, indices, self._device)
        taught = self._teacher.teach(self._windows, indices, batch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._peak * config.lr_factor(step, self._progress.elapsed_s)
        with mixed(self._device):
            loss, parts = self._objective(batch, taught, step, tally)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self._parameters.values():
            if parameter.grad is None:  # of Medusa's heads that look beyond short windows: their loss is 0
                parameter.grad = torch.zeros_like(parameter)
            if self._processes.num_processes > 1:
                parameter.grad.copy_(reduce_over_processes(parameter.grad, "mean"))
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), parts

    def _objective(self, batch: Batch, taught: Taught, step: int, tally: Tally) -> tuple[Tensor, dict[str, Tensor]]:
        config, taught = self._config, self._as_read(taught)
        if isinstance(self._head, HeadsAhead):
            return ahead_objective(self._head, batch, taught, tally)
        if isinstance(self._head, Eagle1Head):
            generator = step_generator(config.seed, step, self._processes.process_index, self._device)
            noise = torch.rand(taught.features.shape, generator=generator, device=self._device)
            noise = (2 * noise - 1) * config.noise
            return eagle1_objective(self._head, self._shape, batch, taught, noise, config, tally)
        if isinstance(self._head, Eagle3Head):
            chosen = None
            if config.ttt_share < 1:
                generator = step_generator(config.seed, step, self._processes.process_index, self._device)
                chosen = torch.rand(batch.ids.shape, generator=generator, device=self._device) < config.ttt_share
            return eagle3_objective(self._head, self._shape, batch, taught, self._vocabulary, config, tally, chosen)
        cpu = step_generator(config.seed, step, self._processes.process_index, torch.device("cpu"))
        roots = [draw_roots(batch, count, cpu) for count in (config.anchors, config.singles) if count]
        return block_objective(self._head, self._shape, batch, taught, self._vocabulary, roots, tally)

    def _as_read(self, taught: Taught) -> Taught:
        return Taught(self._read(unhalved(taught.features)), taught.said, unhalved(taught.last))

    def _evaluate(self) -> Acceptance | None:
        """Returns the acceptance on the held-out data, if given, and logs it."""
        if self._held_out is None:
            return None
        acceptance, free = examine(
            self._head,
            self._shape,
            self._held_out,
            self._examiner,
            self._as_read,
            self._vocabulary,
            self._config,
            self._device,
        )
        row = {"event": "eval", "step": self._progress.step, **acceptance.to_json()}
        if self._shape.markov_rank:
            row["without_transitions"] = free.to_json()
        self.log(row)
        alphas = " ".join(f"{alpha:.3f}" for alpha in acceptance.n_alpha)
        say(f"held out: tau {acceptance.tau:.3f}, n-alpha {alphas}")
        return acceptance

    def _tally(self) -> Tally:
        """Returns an empty tally of the steps that training unrolls."""
        return Tally(self._config.trained_steps, self._device)

    def _log_step(self, loss: Tensor, parts: dict[str, Tensor], acceptance: Acceptance) -> None:
        row = {
            "event": "step",
            "step": self._progress.step,
            "seconds": round(self._progress.elapsed_s, 3),
            "lr": self._optimizer.param_groups[0]["lr"],
            "loss": float(loss),
            "parts": {name: float(value) for name, value in parts.items()},
        }
        self.log(row | acceptance.to_json())

    def _print_progress(self, loss: Tensor, acceptance: Acceptance) -> None:
        step, elapsed = self._progress.step, self._progress.elapsed_s
        budget = min(1.0, self._config.used(step, elapsed))
        accuracy, alphas = (
            " ".join(f"{x:.2f}" for x in values) for values in (acceptance.accuracy, acceptance.n_alpha)
        )
        say(
            f"{budget:4.0%} step {step} {elapsed:.0f} s loss {float(loss):.4f} accuracy {accuracy} "
            f"n-alpha {alphas} tau {acceptance.tau:.2f}"
        )

    def _save(self) -> None:
        """Write a checkpoint, unless weights are not finite, as after a loss that is not: then the one before stays."""
        if not all(bool(torch.isfinite(value).all()) for value in self._parameters.values()):
            raise TrainError(
                f"weights are not finite after step {self._progress.step}, so nothing was saved over the checkpoint "
                "before; start again with a lower lr"
            )
        save_checkpoint(self._checkpoint, self._parameters, self._optimizer, self._progress, self._identity)

    def _resume(self) -> None:
        self._progress = load_checkpoint(self._checkpoint, self._parameters, self._optimizer, self._identity)
        if self._log.is_file() and self._processes.is_main_process:  # steps after the checkpoint are repeated
            rows = self._log.read_text(encoding="utf-8").splitlines()
            kept = [row for row in rows if _logged_step(row) <= self._progress.step]
            self._log.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")


def _logged_step(row: str) -> int:
    try:
        return int(json.loads(row).get("step", 0))
    except (ValueError, RecursionError):  # a line cut off when the process was killed
        return sys.maxsize


def _repeated(work: Path) -> int:
    """Returns how many windows of held-out text are among those to train on."""
    learned, held_out = (open_windows(work / name).digests() for name in ("data", "eval"))
    known = set(learned)
    return sum(digest in known for digest in held_out)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
