"""Opening a bundle folder: check the arguments and the files, choose a backend, start its engines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from eagle_runtime.base.arguments import checked_int, short_repr
from eagle_runtime.base.backend_names import AUTO, BACKENDS, on_cpu
from eagle_runtime.base.errors import BackendError, BundleError, RequestError
from eagle_runtime.bundle.fidelity import FidelityWarning, shortfall
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.drafting.cost_prior import prior_costs
from eagle_runtime.drafting.cost_storage import file_name, open_costs
from eagle_runtime.drafting.head import SCRATCH
from eagle_runtime.drafting.rank_acceptance import Ranks, file_of
from eagle_runtime.machine.host import free_memory, threads_allowed
from eagle_runtime.opening.backends import (
    check_name,
    choose,
    default_context,
    facts_of_times,
    files_read,
    notice,
    open_sessions,
)
from eagle_runtime.opening.exact_rows import check_rows
from eagle_runtime.opening.joined_heads import check_head
from eagle_runtime.opening.opened import OpenBundle, bundle_of_sessions

if TYPE_CHECKING:
    from eagle_runtime.ort.session import OrtSession

Progress = Callable[[str, int, int], None]  # stage ("hash", "load", "warm"), done, total
MAX_THREADS = 256  # beyond the cores they only wait for each other; thousands take minutes to start


def open_bundle(
    folder: Path,
    backend: str,
    context: int | None,
    threads: int | None,
    check_hashes: bool | Literal["once"],
    kv_budget: int | None = None,
    on_progress: Progress | None = None,
) -> OpenBundle:
    """Open a bundle folder; the arguments are those of `EagleModel.load`.

    Of the result, passed_over gives (backend, reason) for each backend that was tried before the one in use, notice
    is a warning of what "auto" chose (backends.notice), and row_check the outcome of exact_rows. Raises
    BundleError, BackendError, RequestError; gives a FidelityWarning."""
    manifest = read_manifest(folder)
    longest = manifest.target.context
    if context is not None and not 2 <= checked_int("context", context, 0) <= longest:
        raise RequestError(f"context is {context}, but this model serves 2 to {longest} tokens")
    threads = threads_allowed() if threads is None else checked_int("threads", threads, 1, MAX_THREADS)
    if kv_budget is not None:
        kv_budget = checked_int("kv_budget", kv_budget, 1)
    check_name(backend)
    if check_hashes not in (True, False, "once"):
        raise RequestError(f"check_hashes is {short_repr(check_hashes)}, but must be True, False or 'once'")
    opening = Opening(
        folder, manifest, context, threads, check_hashes, on_progress or (lambda stage, done, total: None)
    )
    opening.verify(BACKENDS[0])  # small files, which all backends read: where one differs, no backend is tried
    try:
        chosen = choose(backend, folder, manifest, opening.on)
    except BackendError as error:
        raise (opening.damage[0] if opening.damage else error) from None  # whatever else was tried
    with contextlib.ExitStack() as freed:
        freed.callback(chosen.opened.engines.close)
        if (problem := shortfall(manifest)) is not None:
            warnings.warn(f"{folder}: {problem}", FidelityWarning, stacklevel=3)
        warning = notice(chosen, folder, manifest) if backend == AUTO else None
        if warning is not None:
            logging.getLogger(__name__).warning("%s", warning)
        opened = dataclasses.replace(
            chosen.opened,
            kv_budget=default_budget(chosen.opened) if kv_budget is None else kv_budget,
            passed_over=chosen.passed_over,
            notice=warning,
        )
        freed.pop_all()
    return opened


@dataclass(frozen=True, slots=True)
class Opening:
    """A bundle whose engines are being started. context: None for what suits a backend. damage: errors of files that
    are not what the manifest lists; verified: names of those that are."""

    folder: Path
    manifest: Manifest
    context: int | None
    threads: int | None
    check_hashes: bool | Literal["once"]
    progress: Progress
    damage: list[BundleError] = field(default_factory=list)
    verified: set[str] = field(default_factory=set)

    def verify(self, backend: str, report: Callable[[int, int], None] | None = None) -> None:
        """Compare the files that a backend reads with the manifest. Raises BundleError."""
        wanted = files_read(backend, self.manifest) - self.verified if self.check_hashes else set()
        try:
            if wanted:
                verify_hashes(self.folder, self.manifest, report, once=self.check_hashes == "once", names=wanted)
        except BundleError as error:
            self.damage.append(error)
            raise
        self.verified.update(wanted)

    def on(self, backend: str) -> OpenBundle:
        """Returns the bundle on a backend. Raises BundleError, BackendError; then nothing stays open."""
        folder, manifest, progress = self.folder, self.manifest, self.progress
        self.verify(backend, partial(progress, "hash"))
        progress("hash", 1, 1)
        progress("load", 0, 1)
        context = default_context(manifest, backend, free_memory()) if self.context is None else self.context
        with contextlib.ExitStack() as freed:  # if anything raises, such as a cache that does not fit
            sessions = open_sessions(backend, folder, manifest, context, SCRATCH, self.threads)
            for session in sessions:
                freed.callback(session.close)
            if len(sessions) > 1:
                check_head(sessions[1])
            opened = bundle_of_sessions(folder, manifest, sessions, context, backend=backend, threads=self.threads)
            progress("load", 1, 1)
            progress("warm", 0, 1)
            _warm(opened, partial(progress, "warm"))
            check = check_rows(cast("OrtSession", sessions[0]), manifest, self.threads) if on_cpu(backend) else None
            times = facts_of_times(backend, sessions)
            facts = [*manifest.files.values(), backend, *times, str(self.threads), str(context)]
            files = [folder / name for name in manifest.files]
            opened = dataclasses.replace(
                opened,
                row_check=check,
                weight_bytes=sum(path.stat().st_size for path in files if path.suffix != ".json"),
                costs=open_costs(file_name(facts), partial(prior_costs, manifest, backend)),
                ranks=Ranks(file_of(manifest.files.values())),
            )
            progress("warm", 1, 1)
            freed.pop_all()
        return opened


def _warm(bundle: OpenBundle, report: Callable[[int, int], None]) -> None:
    """Let sessions prepare their forward passes. report: called with what is done, and all of it."""
    caches = [bundle.target.cache, *([] if bundle.head is None else [bundle.head.cache])]
    for part, (session, cache) in enumerate(zip(bundle.engines.sessions, caches, strict=True)):
        session.warm(cache, lambda done, total, part=part: report(part * total + done, len(caches) * total))  # type: ignore[misc]


def default_budget(bundle: OpenBundle) -> int:
    """A quarter of the memory that is free, and one full context at least."""
    return max((free_memory() or 0) // 4, (bundle.context + SCRATCH) * bundle.state().token_bytes)
