"""Loading a second bundle whose target drafts for the first one's (drafting.draft_model)."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal

from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.drafting.cost_model import prior_costs
from eagle_runtime.drafting.cost_storage import file_name, open_costs
from eagle_runtime.drafting.draft_model import SCRATCH
from eagle_runtime.drafting.rank_acceptance import Ranks, file_of
from eagle_runtime.opening.backends import facts_of_times
from eagle_runtime.opening.loading import OpenBundle, default_budget, open_bundle


def with_draft_bundle(
    bundle: OpenBundle, folder: str | Path | None, check_hashes: bool | Literal["once"], kv_budget: int | None
) -> OpenBundle:
    """Open a draft bundle on the first one's backend; returns the first one with it. folder: None for no draft bundle.
    kv_budget: None for a new default.

    Raises RequestError for a bundle of another vocabulary, and the errors of `open_bundle`; the first one is closed
    then."""
    if folder is None:
        return bundle
    try:
        draft = _opened(bundle, Path(folder), check_hashes)
    except BaseException:
        bundle.engines.close()
        raise
    bundle.engines.take(draft.engines)
    ranks = Ranks(file_of([*bundle.manifest.files.values(), "with", *draft.manifest.files.values()]))
    both = dataclasses.replace(bundle, draft=draft, ranks=ranks, weight_bytes=bundle.weight_bytes + draft.weight_bytes)
    return dataclasses.replace(both, kv_budget=default_budget(both)) if kv_budget is None else both


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
