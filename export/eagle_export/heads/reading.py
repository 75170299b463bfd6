"""Reads the sizes of a head from its tensors and their shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from eagle_export.base.errors import ExportError
from eagle_export.heads.config import HeadConfig, TapNorm
from eagle_export.heads.kinds import KINDS, Kind
from eagle_export.heads.layout import HeadLayout, OutputNorm
from eagle_export.heads.prediction import GATE
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint
from eagle_export.reading.families.family import rope_settings
from eagle_export.reading.stored_tensors import StoredTensor

Result = TypeVar("Result")


def read_head_config(
    head: Checkpoint, layout: HeadLayout, target_hidden: int, target_layers: int, vocab: int
) -> HeadConfig:
    """Reads the sizes from the shapes of a head's tensors, and what shapes do not say from its config. head: with the
    official names, as layouts.official returns it. Raises ExportError where the two contradict each other or do not
    fit the target."""
    where, kind = head.folder / "config.json", KINDS[layout.kind]
    if kind.read_ahead is not None:
        sizes = kind.read_ahead(head, target_hidden, vocab)
        return HeadConfig(layout.kind, target_hidden, target_hidden, vocab, vocab, sizes.count, ahead=sizes)
    if kind.read_assistant is not None:
        own = kind.read_assistant(head, target_hidden, vocab)
        heads, width = own.rows[0]
        return HeadConfig(
            layout.kind, target_hidden, target_hidden, vocab, vocab, own.num_layers,
            num_kv_heads=heads, head_dim=width, assistant=own,
        )  # fmt: skip
    _check_vocabulary(head, vocab)
    _check_target_width(head, target_hidden)
    for problem in _unknown_settings(head, layout):
        raise ExportError(problem)
    layer = kind.layer
    block = None if kind.read_block is None else kind.read_block(head, vocab, target_layers, target_hidden)
    hidden, fed = head.require("fc.weight", (None, None)).shape
    _check_fc(head, kind, hidden, fed, target_hidden)
    num_heads, kv_heads, head_dim = _attention_sizes(head, layer)
    draft_vocab = draft_vocabulary(head, kind, hidden, target_hidden, vocab)
    return HeadConfig(
        kind=layout.kind,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        num_layers=_num_layers(head, kind),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=head.require(f"{layer}.mlp.gate_proj.weight", (None, hidden)).shape[0],
        rms_norm_eps=head.number("rms_norm_eps", 1e-6),
        rope=rope_settings(head.config, str(where)),
        qkv_bias=_stated(head, f"{layer}.self_attn.q_proj.bias", "qkv_bias", "attention_bias"),
        fc_bias=_fc_bias(head, layout),
        taps=_taps(head, layout, fed // target_hidden, target_layers) if kind.reads_taps else (),
        o_bias=f"{layer}.self_attn.o_proj.bias" in head.tensors,
        qk_norm=f"{layer}.self_attn.q_norm.weight" in head.tensors,
        gated=f"{layer}.{GATE}" in head.tensors,
        normed_residual=bool(_setting(head, "norm_before_residual") or layout.normed_residual),
        tap_norm=_tap_norm(head),
        output_norm=_output_norm(head, layout),
        hidden_first=layout.hidden_first,
        masks_first=layout.masks_first,
        block=block,
        own_lm_head=kind.has_lm_head(head, vocab),
    )


def head_problems(
    head: Checkpoint, layout: HeadLayout, target_hidden: int, target_layers: int, vocab: int
) -> list[str]:
    """Returns every reason why a head does not fit a target, a sentence each; none if read_head_config takes it. Values
    of tensors are not looked at."""
    kind, problems = KINDS[layout.kind], list(_unknown_settings(head, layout))

    def try_to(read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except ExportError as error:
            problems.append(str(error))
            return None

    if kind.read_ahead is not None or kind.read_assistant is not None:
        problems.clear()
        try_to(lambda: read_head_config(head, layout, target_hidden, target_layers, vocab))
        return problems
    try_to(lambda: _check_vocabulary(head, vocab))
    try_to(lambda: _check_target_width(head, target_hidden))
    try_to(lambda: _attention_sizes(head, kind.layer))
    try_to(lambda: _num_layers(head, kind))
    try_to(lambda: _tap_norm(head))
    try_to(lambda: _fc_bias(head, layout))
    try_to(lambda: rope_settings(head.config, str(head.folder / "config.json")))
    fc = try_to(lambda: head.require("fc.weight", (None, None)).shape)
    if fc is not None:
        before = len(problems)
        hidden, fed = fc
        try_to(lambda: _check_fc(head, kind, hidden, fed, target_hidden))
        if kind.reads_taps and len(problems) == before:
            try_to(lambda: _taps(head, layout, fed // target_hidden, target_layers))
        size = try_to(lambda: draft_vocabulary(head, kind, hidden, target_hidden, vocab))
        if size is not None:
            try_to(lambda: stored_map(head, kind, size, vocab))
        if "embed_tokens.weight" in head.tensors:
            try_to(lambda: head.require("embed_tokens.weight", (vocab, hidden)))
    if not problems:
        try_to(lambda: read_head_config(head, layout, target_hidden, target_layers, vocab))
    return list(dict.fromkeys(problems))


def _setting(head: Checkpoint, key: str) -> Any:
    """A setting of eagle_config, else of the config itself; None if neither has it."""
    settings = head.config.get("eagle_config")
    value = settings.get(key) if isinstance(settings, Mapping) else None
    return head.config.get(key) if value is None else value


def _check_vocabulary(head: Checkpoint, vocab: int) -> None:
    if head.integer("vocab_size", vocab) != vocab:
        raise ExportError(
            f"{head.folder / 'config.json'}: the head's vocabulary has {head.config['vocab_size']} tokens, the "
            f"target's {vocab}; target and head do not belong together"
        )


def _check_target_width(head: Checkpoint, target_hidden: int) -> None:
    if head.integer("target_hidden_size", target_hidden) != target_hidden:
        raise ExportError(
            f"{head.folder / 'config.json'}: target_hidden_size is {head.config['target_hidden_size']}, but the "
            f"target's is {target_hidden}; target and head do not belong together"
        )


def _unknown_settings(head: Checkpoint, layout: HeadLayout) -> Iterator[str]:
    """Settings of variants that are not known, a sentence for each."""
    where, config = head.folder / "config.json", head.config
    if config.get("hidden_act", "silu") != "silu":
        yield f"{where}: hidden_act is {config['hidden_act']!r}, but only silu heads are known"
    if config.get("logit_scale") not in (None, 1, 1.0):
        yield f"{where}: logit_scale is {config['logit_scale']!r}, but only heads without one are known"
    windowed = config.get("layer_types")
    if isinstance(windowed, list) and any(each != "full_attention" for each in windowed):
        yield f"{where}: layer_types is {windowed}, but only full attention is known in a head"
    if layout.norm_output is None and _setting(head, "norm_output") is not None:
        yield (
            f"{where}: norm_output has two meanings, and {layout.producer} is not known to write it; remove it, or "
            "give the head in the layout of SpecForge or speculators"
        )


def _attention_sizes(head: Checkpoint, layer: str) -> tuple[int, int, int]:
    """Returns heads, key/value heads and head_dim."""
    num_heads = head.integer("num_attention_heads")
    q_rows = head.require(f"{layer}.self_attn.q_proj.weight", (None, None)).shape[0]
    k_rows = head.require(f"{layer}.self_attn.k_proj.weight", (None, None)).shape[0]
    head_dim = max(q_rows // num_heads, 1)
    kv_heads = head.integer("num_key_value_heads", max(k_rows // head_dim, 1))
    fits = (q_rows, k_rows) == (num_heads * head_dim, kv_heads * head_dim) and num_heads % kv_heads == 0
    if not fits or head.config.get("head_dim") not in (None, head_dim):
        raise ExportError(
            f"{head.folder / 'config.json'}: {num_heads} heads and {kv_heads} key/value heads of head_dim "
            f"{head.config.get('head_dim')} do not fit projections of {q_rows} and {k_rows} rows; the config is of "
            "another head"
        )
    return num_heads, kv_heads, head_dim


def _num_layers(head: Checkpoint, kind: Kind) -> int:
    """Layers of the head, as numbered in its tensors and stated in its config."""
    numbered = {int(m[1]) for name in head.tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    count = len(numbered) + kind.unnumbered
    if kind.unnumbered and count > 1:
        raise ExportError(f"{head.folder}: an {kind.title} head of {count} layers is not supported, only of one")
    if not kind.in_target and head.integer("num_hidden_layers", count) != count:
        raise ExportError(
            f"{head.folder / 'config.json'}: num_hidden_layers is {head.config['num_hidden_layers']}, but the tensors "
            f"are of {count}; the checkpoint is incomplete"
        )
    return count


def _stated(head: Checkpoint, name: str, *keys: str) -> bool:
    """Whether the head has a tensor. Raises ExportError if a key of the config says otherwise."""
    present = name in head.tensors
    if (key := next((key for key in keys if head.config.get(key) is not None), None)) is not None:
        _check_agrees(head, key, head.config[key], name, present)
    return present


def _check_agrees(head: Checkpoint, key: str, value: Any, name: str, present: bool) -> None:
    """Raises ExportError if a setting says otherwise than the tensors. present: whether the tensor is there."""
    if bool(value) != present:
        raise ExportError(
            f"{head.folder}: {key} is {value!r} in config.json, but tensor {name!r} is "
            f"{'there' if present else 'missing'}; config and weights do not belong together"
        )


def _fc_bias(head: Checkpoint, layout: HeadLayout) -> bool:
    """Whether fc has a bias. SafeAILab reads an EAGLE-1 config without `bias` as one with a bias."""
    present = _stated(head, "fc.bias", *KINDS[layout.kind].bias_keys)
    if layout.default_fc_bias and not present and head.config.get("bias") is None:
        raise ExportError(
            f"{head.folder}: tensor 'fc.bias' is missing, and a config without `bias` stands for a head with one "
            "(SafeAILab/EAGLE, eagle/model/cnets1.py); if it was trained without, write 'bias: false' into config.json"
        )
    return present


def _tap_norm(head: Checkpoint) -> TapNorm:
    each = any(name.startswith("fc_norm.") for name in head.tensors)
    together = "input_norm.weight" in head.tensors
    _check_agrees(head, "fc_norm", _setting(head, "fc_norm"), "fc_norm.0.weight", each)
    _check_agrees(head, "norm_before_fc", _setting(head, "norm_before_fc"), "input_norm.weight", together)
    if each and together:
        raise ExportError(f"{head.folder}: the head has both fc_norm and input_norm, which exclude each other")
    return "each" if each else "all" if together else "none"


def _output_norm(head: Checkpoint, layout: HeadLayout) -> OutputNorm:
    if KINDS[layout.kind].recurrent:
        return "recurrent"
    stated = _setting(head, "norm_output")
    if layout.norm_output is None or stated is None:
        return "logits"
    return layout.norm_output[0 if stated else 1]


def _check_fc(head: Checkpoint, kind: Kind, hidden: int, fed: int, target_hidden: int) -> None:
    fits = fed % target_hidden == 0 if kind.reads_taps else (hidden, fed) == (target_hidden, 2 * target_hidden)
    if not fits:
        wanted = f"[any, 3 x {target_hidden}]" if kind.reads_taps else f"[{target_hidden}, 2 x {target_hidden}]"
        raise ExportError(
            f"{head.folder}: fc.weight has shape [{hidden}, {fed}], but a target of hidden size {target_hidden} "
            f"needs {wanted}; target and head do not belong together"
        )


def _taps(head: Checkpoint, layout: HeadLayout, count: int, target_layers: int) -> tuple[int, ...]:
    """The head's taps as indices into hidden_states."""
    where, key = head.folder / "config.json", layout.id_key
    ids = _setting(head, key)
    if ids is None:
        if count != 3 or KINDS[layout.kind].names_taps:
            raise ExportError(f"{head.folder}: fc takes {count} taps, but config.json does not say which; add {key}")
        return default_taps(target_layers)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ExportError(f"{where}: {key} is {ids!r}, but must be a list of layer ids")
    outputs = layout.ids == "output" or (layout.ids == "first" and ids[0] != 2)
    taps = tuple(i + 1 if outputs else i for i in ids)
    if len(taps) != count or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= target_layers:
        raise ExportError(f"{where}: {key} {ids} do not name {count} ascending layers of a target of {target_layers}")
    if taps[0] == 0:
        raise ExportError(f"{where}: {key} {ids} names the target's embedding, which is not supported as a tap")
    if taps[-1] == target_layers:
        raise ExportError(
            f"{where}: {key} {ids} names the output of the last layer, which some programs take before the target's "
            "last norm and some after it; such a head is not supported"
        )
    return taps


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default taps: the inputs of target layers 2, N//2 and N-3, as indices into hidden_states.

    Raises ExportError below 7 layers, where they are not three ascending layers."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ExportError(
            f"the target has {num_layers} layers, but EAGLE-3's three taps need 7 or more; use an EAGLE-1 head"
        )
    return taps


def draft_vocabulary(head: Checkpoint, kind: Kind, hidden: int, target_hidden: int, vocab: int) -> int:
    """Returns the width of the head's logits. hidden, target_hidden: its and the target's. Raises ExportError."""
    own = kind.has_lm_head(head, vocab)
    if kind.reads_taps and not own and hidden != target_hidden:
        raise ExportError(
            f"{head.folder}: tensor {LM_HEAD!r} is missing, and the target's is {target_hidden} wide where the head is "
            f"{hidden}; the checkpoint is incomplete"
        )
    draft_vocab = head.require(LM_HEAD, (None, hidden)).shape[0] if own else vocab
    for key, size in (("hidden_size", hidden), ("draft_vocab_size", draft_vocab if own else None)):
        if size is not None and head.integer(key, size) != size:
            raise ExportError(
                f"{head.folder / 'config.json'}: {key} is {head.config[key]}, but the tensors have {size}; config and "
                "weights do not belong together"
            )
    return draft_vocab


def stored_map(head: Checkpoint, kind: Kind, size: int, vocab: int) -> StoredTensor | None:
    """Returns d2t [Vd], offsets from draft to target ids, of `size` tokens; None for equal ids. Raises ExportError."""
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
