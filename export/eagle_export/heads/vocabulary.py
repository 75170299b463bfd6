"""Which of the target's tokens a head drafts: the rows of its LM head, and the map from draft to target ids."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_export.base.errors import ExportError
from eagle_export.heads.kinds import Kind
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint
from eagle_export.reading.stored_tensors import StoredTensor


def draft_vocabulary(head: Checkpoint, kind: Kind, hidden: int, target_hidden: int, vocab: int) -> int:
    """Returns the width of the head's logits. hidden, target_hidden: its and the target's. Raises ExportError."""
    own = kind.has_lm_head(head, vocab)
    if kind.reads_taps and not own and hidden != target_hidden:
        raise ExportError(
            f"{head.folder}: tensor {LM_HEAD!r} is missing, and the target's is {target_hidden} wide where the head is "
            f"{hidden}; the checkpoint is incomplete"
        )
    draft_vocab = head.require(LM_HEAD, (None, hidden)).shape[0] if own else vocab
    check_stated(head, {"hidden_size": hidden, "draft_vocab_size": draft_vocab if own else None})
    return draft_vocab


def stored_map(head: Checkpoint, kind: Kind, size: int, vocab: int) -> StoredTensor | None:
    """Returns d2t [Vd], the offsets from draft to target ids, of a head of `size` draft tokens; None if the ids are the
    same. Raises ExportError."""
    if not kind.reads_taps:
        return None
    if "d2t" not in head.tensors:
        if size != vocab:
            raise ExportError(
                f"{head.folder}: lm_head has {size} rows for a vocabulary of {vocab}, but tensor 'd2t' is missing; "
                "the checkpoint is incomplete"
            )
        return None
    stored = head.require("d2t", (size,))
    if stored.dtype not in ("I32", "I64"):
        raise ExportError(f"{stored.file}: tensor 'd2t' is stored as {stored.dtype}, but must hold whole numbers")
    if "t2d" in head.tensors:
        head.require("t2d", (vocab,))
    return stored


def check_stated(head: Checkpoint, sizes: Mapping[str, int | None]) -> None:
    """Raises ExportError if the config states another size than the tensors have (None: not looked at)."""
    for key, size in sizes.items():
        if size is not None and head.integer(key, size) != size:
            raise ExportError(
                f"{head.folder / 'config.json'}: {key} is {head.config[key]}, but the tensors have {size}; config and "
                "weights do not belong together"
            )
