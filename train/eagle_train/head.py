"""Creates a head for a target, and writes its folder in the layout of SafeAILab's heads or of speculators', and that of
a block head in DeepSpec's.

SafeAILab's EAGLE-1: fc.weight, layers.0.*. EAGLE-3: fc.weight, midlayer.*, norm.weight, lm_head.weight, d2t, t2d (both
only if the draft vocabulary is smaller than the target's). Block heads: fc, hidden_norm, layers.i.*, norm, lm_head,
mask_embedding, markov_head.*, d2t and t2d. The embedding, and EAGLE-1's LM head, are the target's and stay in its
checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle_export.graphs.head_modules import build_any_head
from eagle_export.graphs.pair import HeadPart, open_pair
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_runtime.base.files import replacing
from eagle_runtime.bundle.head import FORMS, HeadKind
from eagle_train.ahead import FILES, ahead_json, ahead_shape, new_heads, stored_ahead
from eagle_train.blocks import block_shape, start_block
from eagle_train.config import DRAFT_VOCAB, Inputs, TrainConfig
from eagle_train.errors import TrainError
from eagle_train.kinds import TRAINED, Layout
from eagle_train.layouts import config_json, stored_name
from eagle_train.objective import Vocabulary
from eagle_train.target import FrozenTarget
from eagle_train.ttt import Head

AnyHead = Head | BlockHead | HeadsAhead


def read_head(folder: Path, target: FrozenTarget, config: TrainConfig) -> HeadPart:
    """Open a head of this target (or of one it was fine-tuned from) to train it further.

    Raises ExportError if it does not fit the target or is incomplete, TrainError if it is of another kind than asked
    for or has parts that save_head would lose."""
    part = open_pair(target.checkpoint.folder, folder).head
    assert part is not None
    shape = part.config
    if shape.kind == "eagle1" and config.kind == "block":
        return part  # from_eagle.py compares the sizes
    if shape.kind not in TRAINED:
        title = FORMS[shape.kind].title
        raise TrainError(f"{folder} holds a {title}, which is not trained here; give an EAGLE or block head")
    if shape.ahead is not None:
        raise TrainError(f"{folder} holds {shape.kind.capitalize()} heads, which start untrained; leave init out")
    if shape.kind != config.kind:
        raise TrainError(f"{folder} has a head of kind {shape.kind}, not {config.kind}; train it as what it is")
    new = shape_of(config, target, shape.draft_vocab_size)
    same: tuple[str, ...] = ("num_layers", "hidden_size", "target_hidden_size", "qkv_bias", "o_bias", "taps")
    if shape.block is not None and shape.block.causal:  # its rows are the same whatever the number of them
        shape = dataclasses.replace(shape, block=dataclasses.replace(shape.block, size=config.block))
        part = dataclasses.replace(part, config=shape)
    if config.mlp is not None:
        same = (*same, "intermediate_size")
    if config.kv_heads is not None:
        same = (*same, "num_kv_heads")
    for name in (*same, "block", "qk_norm", "normed_residual", "tap_norm", "output_norm"):
        if getattr(shape, name) != getattr(new, name):
            raise TrainError(
                f"{folder} has {name} {getattr(shape, name)}, but heads trained here have {getattr(new, name)}; start "
                "from an untrained head"
            )
    if part.own_embedding or shape.rope["rope_parameters"]["rope_type"] != "default":
        what = "an embedding of its own" if part.own_embedding else "scaled rotation"
        raise TrainError(f"{folder} has {what}, which heads trained here do not have; start from an untrained head")
    with torch.device("meta"):
        parameters = stored(build_any_head(shape))
    for name, parameter in parameters.items():
        part.checkpoint.require(name, tuple(parameter.shape))
    return part


def vocabulary_of(part: HeadPart) -> Vocabulary | None:
    """Returns the draft vocabulary of a head; None if it is the target's vocabulary."""
    if part.d2t is None:
        return None
    return Vocabulary.of(part.d2t + torch.arange(len(part.d2t)), part.config.vocab_size)


def choose_vocabulary(counts: npt.NDArray[np.int64], size: int | None, always: Sequence[int]) -> Vocabulary | None:
    """Returns the draft vocabulary of `size` tokens; None if it is the whole vocabulary. Raises TrainError.

    counts [V]: how often each id carries loss. The ids in `always` (stop and special tokens) are kept, then the most
    frequent ones; of equally frequent ids the lower one."""
    vocab = len(counts)
    size = min(DRAFT_VOCAB, vocab) if size is None else size
    always = sorted({i for i in always if 0 <= i < vocab})
    if not max(1, len(always)) <= size <= vocab:
        raise TrainError(
            f"the draft vocabulary has {size} tokens, but must have {max(1, len(always))} (the special tokens) to "
            f"{vocab} (the target's vocabulary); change draft_vocab"
        )
    if size == vocab:
        return None
    rank = counts.copy()
    rank[always] = counts.sum() + 1
    kept = np.sort(np.argsort(-rank, kind="stable")[:size])
    return Vocabulary.of(torch.from_numpy(kept), vocab)


def coverage(counts: npt.NDArray[np.int64], vocabulary: Vocabulary | None) -> float:
    """Returns the share, 0 to 1, of the tokens that carry loss (counts [V]) that are in the draft vocabulary."""
    return 1.0 if vocabulary is None else float(counts[vocabulary.ids.numpy()].sum() / max(1, counts.sum()))


def shape_of(config: TrainConfig, target: FrozenTarget, size: int) -> HeadConfig:
    """Returns the shape of a new head of the config's kind. size: of its vocabulary. Raises ExportError for a target
    that cannot have one."""
    shape = OTHER_SHAPES.get(config.kind)
    return target.head_config(config.kind, size) if shape is None else shape(config, target, size)


# Of heads that are not a layer of the target's widths.
OTHER_SHAPES: Mapping[HeadKind, Callable[[TrainConfig, FrozenTarget, int], HeadConfig]] = {
    "medusa": lambda config, target, size: ahead_shape("medusa", config.heads, target),
    "hydra": lambda config, target, size: ahead_shape("hydra", config.heads, target),
    "block": lambda config, target, size: block_shape(target, config, size),
}


def new_head(
    shape: HeadConfig,
    target: FrozenTarget,
    vocabulary: Vocabulary | None,
    inputs: Inputs,
    seed: int,
    given: HeadPart | None = None,
) -> AnyHead:
    """Returns a head on the target's device with the target's frozen embedding (EAGLE-1: and LM head). It is untrained,
    or has the weights of `given`, as read_head returns it, if that is of its kind.

    The LM head and last norm of an untrained EAGLE-3 or block head start as the target's (its rows of the draft
    vocabulary). So do the rows of tokens that the given head does not know."""
    if shape.ahead is not None:
        return new_heads(shape, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build_any_head(shape)
        assert not isinstance(head, HeadsAhead)
        cast(torch.nn.Module, head).to(target.device)
        if isinstance(head, BlockHead):
            start_block(head, target)
    head.embed_tokens = target.embedding
    if isinstance(head, Eagle1Head):
        head.lm_head = target.lm_head
    else:
        with torch.no_grad():
            head.lm_head.weight.copy_(_lm_head_rows(target.own_lm_head, vocabulary, given))
            cast(Tensor, head.norm.weight).copy_(target.last_gain)
    if given is not None and given.config.kind == shape.kind:
        with torch.no_grad():
            for name, parameter in stored(head).items():
                if name != "lm_head.weight":
                    parameter.copy_(given.checkpoint.tensors[name].read())
    if isinstance(head, Eagle1Head):
        _cut_inputs(head, shape.hidden_size, inputs)
    return head


def _lm_head_rows(target_rows: Tensor, vocabulary: Vocabulary | None, given: HeadPart | None) -> Tensor:
    """Returns the LM head's rows [V', H] of the draft vocabulary: the given head's where it has them, else the
    target's."""
    rows = target_rows.clone()
    if given is not None and not given.config.borrows_lm_head:
        known = vocabulary_of(given)
        ids = slice(None) if known is None else known.ids
        rows[ids] = given.checkpoint.tensors["lm_head.weight"].read().to(rows)
    return rows if vocabulary is None else rows[vocabulary.ids]


def stored(head: AnyHead) -> dict[str, Tensor]:
    """Returns name -> parameter of all that a head's folder holds: all but what is the target's."""
    borrowed = {"embed_tokens.weight"} | ({"lm_head.weight"} if isinstance(head, Eagle1Head) else set())
    return {name: parameter for name, parameter in head.named_parameters() if name not in borrowed}


def trained(head: AnyHead) -> dict[str, Tensor]:
    """Returns name -> parameter of all that is trained, in a fixed order."""
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}


def save_head(
    folder: Path,
    head: AnyHead,
    shape: HeadConfig,
    target: FrozenTarget,
    vocabulary: Vocabulary | None,
    layout: Layout = "safeailab",
) -> None:
    """Write the weights and config.json; each replaces its old file at once. Tensors get the type of the target's
    checkpoint, which engines run them in. Raises TrainError on a full disk."""
    dtype = target.stored_dtype
    if isinstance(head, HeadsAhead):
        tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in stored_ahead(head).items()}
        write_tensors(folder / FILES[shape.kind], tensors, {"format": "pt"})
        write_text(folder / "config.json", json.dumps(ahead_json(shape, target), indent=2) + "\n")
        return
    own = {stored_name(layout, name): value for name, value in stored(head).items()}
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in own.items()}
    if vocabulary is not None:
        ids = vocabulary.ids.cpu()
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": vocabulary.member.cpu()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_text(folder / "config.json", json.dumps(config_json(layout, shape, target, dtype), indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a file that is the old one or the complete new one at any time. Raises TrainError."""
    with _replacing(path) as new:
        save_file(tensors, new, metadata)
        new.chmod(0o644)  # safetensors makes files that only their owner can read


def write_text(path: Path, text: str) -> None:
    """As write_tensors, for text."""
    with _replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """As files.replacing, with the new file flushed to the disk before it is renamed. Its name is the same each time,
    so that a killed training leaves at most one. Raises TrainError."""
    try:
        with replacing(path, path.with_name(f".{path.name}.new")) as new:
            yield new
            with new.open("r+b") as file:  # Windows flushes no file that is open for reading alone
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        kept = "the one written before is still there" if path.exists() else "no file was left"
        raise TrainError(f"{path} could not be written ({error}); {kept}; free space and resume the run") from None


def _cut_inputs(head: Eagle1Head, hidden_size: int, inputs: Inputs) -> None:
    """Input ablation: set fc's columns of the left-out input to zero and keep them so. Decoding needs no special
    case."""
    if inputs not in ("feature", "token"):
        return
    cut = slice(0, hidden_size) if inputs == "feature" else slice(hidden_size, None)
    open_columns = torch.ones(2 * hidden_size, device=head.fc.weight.device)
    open_columns[cut] = 0
    with torch.no_grad():
        head.fc.weight *= open_columns
    head.fc.weight.register_hook(lambda gradient: gradient * open_columns)  # type: ignore[no-untyped-call]
