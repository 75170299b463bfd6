"""The kind and sizes of the head in a checkpoint, read from its tensors and their shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from eagle_export.checkpoint import Checkpoint
from eagle_export.errors import ExportError
from eagle_runtime.bundle.manifest import HeadKind


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes of a head. hidden_size: its own width; target_hidden_size: width of the features or taps that it reads.

    taps: for EAGLE-3 indices into the target's hidden_states (0: embeddings), else empty. rope: as in a Llama config
    (rope_theta, rope_scaling). draft_vocab_size: width of its logits."""

    kind: HeadKind
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    qkv_bias: bool
    fc_bias: bool
    taps: tuple[int, ...]

    def llama(self) -> LlamaConfig:
        """The config with which transformers builds this head's norm, MLP and rotary tables."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            vocab_size=self.vocab_size,
            **self.rope,
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default taps: the inputs of target layers 2, N//2 and N-3, as indices into hidden_states.

    Raises ExportError below 7 layers, where they are not three ascending layers."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ExportError(
            f"the target has {num_layers} layers, but EAGLE-3's three taps need 7 or more; use an EAGLE-1 head"
        )
    return taps


def read_head_config(head: Checkpoint, target_hidden: int, target_layers: int, vocab: int) -> HeadConfig:
    """Reads the kind from the names of the tensors and the sizes from their shapes. Raises ExportError if they do not
    fit the target."""
    where = head.folder / "config.json"
    kind = _kind(head)
    if head.integer("vocab_size", vocab) != vocab:
        raise ExportError(
            f"{where}: the head's vocabulary has {head.config['vocab_size']} tokens, the target's {vocab}; "
            "target and head do not belong together"
        )
    if head.config.get("hidden_act", "silu") != "silu":
        raise ExportError(f"{where}: hidden_act is {head.config['hidden_act']!r}, but only silu heads are known")
    for key in ("norm_before_residual", "norm_before_fc"):
        if head.config.get(key):
            raise ExportError(f"{where}: {key} is set, but this variant of EAGLE-3 is not supported")
    if kind == "eagle1" and "lm_head.weight" in head.tensors:
        raise ExportError(
            f"{head.folder}: tensor 'lm_head.weight' is not used by an EAGLE-1 head, which borrows the target's; the "
            "checkpoint is of a variant that is not supported"
        )
    layer = "midlayer" if kind == "eagle3" else "layers.0"
    hidden, fed = head.require("fc.weight", (None, None)).shape
    _check_fc(head, kind, hidden, fed, target_hidden)
    num_heads = head.integer("num_attention_heads")
    q_rows = head.require(f"{layer}.self_attn.q_proj.weight", (None, None)).shape[0]
    k_rows = head.require(f"{layer}.self_attn.k_proj.weight", (None, None)).shape[0]
    head_dim = max(q_rows // num_heads, 1)
    kv_heads = head.integer("num_key_value_heads", max(k_rows // head_dim, 1))
    fits = (q_rows, k_rows) == (num_heads * head_dim, kv_heads * head_dim) and num_heads % kv_heads == 0
    if not fits or head.config.get("head_dim") not in (None, head_dim):
        raise ExportError(
            f"{where}: {num_heads} heads and {kv_heads} key/value heads of head_dim {head.config.get('head_dim')} do "
            f"not fit projections of {q_rows} and {k_rows} rows; the config is of another head"
        )
    numbered = {int(m[1]) for name in head.tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    draft_vocab = head.require("lm_head.weight", (None, hidden)).shape[0] if kind == "eagle3" else vocab
    return HeadConfig(
        kind=kind,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        num_layers=len(numbered) if kind == "eagle1" else 1,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=head.require(f"{layer}.mlp.gate_proj.weight", (None, hidden)).shape[0],
        rms_norm_eps=head.number("rms_norm_eps", 1e-6),
        rope=rope_settings(head.config, str(where)),
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in head.tensors,
        fc_bias="fc.bias" in head.tensors,
        taps=_taps(head, fed // target_hidden, target_layers) if kind == "eagle3" else (),
    )


def rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_theta (default 10000, for any target) and scaling of a Llama-like config, as arguments of LlamaConfig.

    Raises ExportError for scalings whose table depends on the length of the current call: rows that are cached already
    would have been rotated with another table."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ExportError(f"{where}: {key} is {config[key]!r}, but must be an object")
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", parameters.get("rope_type", "default")))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ExportError(f"{where}: rope scaling {kind!r} depends on the text's length; it is not supported")
    theta = config.get("rope_theta", parameters.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ExportError(f"{where}: rope_theta is {theta!r}, but must be a number above 0")
    merged = {**parameters, **{k: v for k, v in scaling.items() if k != "type"}}
    settings: dict[str, Any] = {"rope_parameters": {**merged, "rope_type": kind, "rope_theta": float(theta)}}
    if config.get("max_position_embeddings") is not None:
        settings["max_position_embeddings"] = config["max_position_embeddings"]
    return settings


def _kind(head: Checkpoint) -> HeadKind:
    if any(name.startswith("midlayer.") for name in head.tensors):
        return "eagle3"
    if "fc.weight" in head.tensors and any(name.startswith("layers.0.") for name in head.tensors):
        return "eagle1"
    some = ", ".join(sorted(head.tensors)[:3]) or "nothing"
    raise ExportError(
        f"{head.folder} is neither an EAGLE-1/2 head (fc, layers.0) nor an EAGLE-3 head (fc, midlayer): it holds {some}"
    )


def _check_fc(head: Checkpoint, kind: HeadKind, hidden: int, fed: int, target_hidden: int) -> None:
    fits = fed % target_hidden == 0 if kind == "eagle3" else (hidden, fed) == (target_hidden, 2 * target_hidden)
    if not fits:
        wanted = f"[any, 3 x {target_hidden}]" if kind == "eagle3" else f"[{target_hidden}, 2 x {target_hidden}]"
        raise ExportError(
            f"{head.folder}: fc.weight has shape [{hidden}, {fed}], but a target of hidden size {target_hidden} "
            f"needs {wanted}; target and head do not belong together"
        )


def _taps(head: Checkpoint, count: int, target_layers: int) -> tuple[int, ...]:
    """The head's taps as indices into hidden_states. Published configs list layer ids in two ways: if the first id is
    1, they are outputs of layers; else inputs, which are such indices already."""
    where = head.folder / "config.json"
    settings = head.config.get("eagle_config") or {}
    if not isinstance(settings, Mapping):
        raise ExportError(f"{where}: eagle_config is {settings!r}, but must be an object")
    ids = settings.get("eagle_aux_hidden_state_layer_ids", head.config.get("eagle_aux_hidden_state_layer_ids"))
    if ids is None:
        if count != 3:
            raise ExportError(
                f"{head.folder}: fc takes {count} taps, but config.json does not say which; "
                "add eagle_config.eagle_aux_hidden_state_layer_ids"
            )
        return default_taps(target_layers)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ExportError(f"{where}: eagle_aux_hidden_state_layer_ids is {ids!r}, but must be a list of layer ids")
    taps = tuple(i + 1 if ids[0] == 1 else i for i in ids)
    if len(taps) != count or list(taps) != sorted(set(taps)) or not 0 < taps[0] <= taps[-1] < target_layers:
        raise ExportError(
            f"{where}: eagle_aux_hidden_state_layer_ids {ids} do not name {count} "
            f"ascending layers of a target of {target_layers}"
        )
    return taps
