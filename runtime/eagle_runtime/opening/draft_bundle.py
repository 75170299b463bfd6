"""Loading further bundles whose targets draft for the first one's (drafting.draft_model, drafting.specinfer)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.drafting.cost_prior import prior_costs
from eagle_runtime.drafting.cost_storage import file_name, open_costs
from eagle_runtime.drafting.head import SCRATCH
from eagle_runtime.drafting.rank_acceptance import Ranks, file_of
from eagle_runtime.opening.backends import facts_of_times
from eagle_runtime.opening.loading import default_budget, open_bundle
from eagle_runtime.opening.opened import OpenBundle

MOST = 8  # draft bundles; each reads the text and drafts before every verification


def folders_of(draft_bundle: object) -> list[Path]:
    """What `EagleModel.load` was given -> the folders of the draft bundles. Raises RequestError."""
    if draft_bundle is None:
        return []
    given = [draft_bundle] if isinstance(draft_bundle, str | Path) else draft_bundle
    if not isinstance(given, Sequence) or not all(isinstance(one, str | Path) for one in given):
        raise RequestError(f"draft_bundle is {short_repr(draft_bundle)}, but must be a folder or a list of folders")
    if len(given) > MOST:
        raise RequestError(f"there are {len(given)} draft bundles, but at most {MOST} can draft; leave some out")
    return [Path(one) for one in given]


def with_draft_bundles(
    bundle: OpenBundle, folders: Sequence[Path], check_hashes: bool | Literal["once"], kv_budget: int | None
) -> OpenBundle:
    """Open draft bundles on the first one's backend; returns the first one with them. kv_budget: None for a new
    default.

    Raises RequestError for a bundle of another vocabulary and for two that are the same, and the errors of
    `open_bundle`; all are closed then."""
    if not folders:
        return bundle
    with contextlib.ExitStack() as freed:
        freed.callback(bundle.engines.close)
        drafts: list[OpenBundle] = []
        for folder in folders:
            draft = _opened(bundle, folder, check_hashes)
            bundle.engines.take(draft.engines)  # closes them too
            for before, other in zip(folders, drafts, strict=False):
                if other.manifest.files == draft.manifest.files:
                    raise RequestError(
                        f"the draft bundles {before} and {folder} are the same, so their trees would be too; give each "
                        "once"
                    )
            drafts.append(draft)
        files = [name for one in drafts for name in ("with", *one.manifest.files.values())]
        both = dataclasses.replace(
            bundle,
            drafts=tuple(drafts),
            ranks=Ranks(file_of([*bundle.manifest.files.values(), *files])),
            weight_bytes=bundle.weight_bytes + sum(draft.weight_bytes for draft in drafts),
        )
        both = dataclasses.replace(both, kv_budget=default_budget(both)) if kv_budget is None else both
        freed.pop_all()
    return both


def _opened(bundle: OpenBundle, folder: Path, check_hashes: bool | Literal["once"]) -> OpenBundle:
    """The draft bundle, its context as long as it can be of use."""
    manifest = read_manifest(folder)
    wanted, given = bundle.manifest.target.vocab_size, manifest.target.vocab_size
    if given != wanted:
        raise RequestError(
            f"the draft bundle {folder} has a vocabulary of {given} tokens, but the bundle it is to draft for has one "
            f"of {wanted}; take a smaller model of the same family"
        )
    context = min(manifest.target.context, bundle.context + SCRATCH)
    draft = open_bundle(folder, bundle.backend, context, bundle.threads, check_hashes)
    with contextlib.ExitStack() as freed:
        freed.callback(draft.engines.close)
        ours, theirs = bundle.text.ids_of_tokens(), draft.text.ids_of_tokens()
        if ours is not None and theirs is None:
            raise RequestError(
                f"the draft bundle {folder} has no tokenizer, so nothing says that its tokens are those of the bundle "
                "that it is to draft for; export it from a checkpoint with a tokenizer"
            )
        if ours is not None and theirs is not None and ours != theirs:
            token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
            raise RequestError(
                f"the draft bundle {folder} has another tokenizer: the token {token!r} has the id {theirs.get(token)}, "
                f"but {ours.get(token)} in the bundle that it drafts for; take a smaller model of the same family"
            )
        sessions = (*bundle.engines.sessions, *draft.engines.sessions)
        times = facts_of_times(bundle.backend, sessions)
        files = [*bundle.manifest.files.values(), "with", *manifest.files.values()]
        facts = [*files, bundle.backend, *times, str(bundle.threads), str(bundle.context)]
        prior = partial(prior_costs, bundle.manifest, bundle.backend, manifest.target)
        with_costs = dataclasses.replace(draft, costs=open_costs(file_name(facts), prior))
        freed.pop_all()
    return with_costs
