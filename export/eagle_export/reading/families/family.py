"""What a family of targets declares: in what its graph differs from Llama's, and what of it cannot be expressed.

Everything else, such as biases, widths and multipliers, is in the code of transformers that is traced.
Shapes: V vocabulary, E experts, k experts per row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint, is_gain
from eagle_export.reading.stored_tensors import StoredTensor
from eagle_runtime.bundle.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor  # imported with the class that a family names: configs are read without it

Config = Any  # a config of transformers, of the family's own class
Windows = tuple[int | None, ...]
Rows = tuple[tuple[int, int], ...]  # key/value heads, and the width of one, of each layer that has keys and values
MODULE = "mlp"  # of a decoder layer
LINEAR, ATTENTION = "linear_attention", "full_attention"  # types of layers


def by_layer_type(config: Config) -> Windows:
    """The layers that config.layer_types calls sliding have a window."""
    width = config.sliding_window
    return tuple(int(width) if kind == "sliding_attention" and width else None for kind in config.layer_types)


def one_window(config: Config) -> Windows:
    """All layers have config.sliding_window, if there is one."""
    width = config.sliding_window
    return (None if width is None else int(width),) * int(config.num_hidden_layers)


def equal_rows(config: Config) -> Rows:
    """All layers have keys and values of one shape."""
    width = getattr(config, "head_dim", None)
    width = config.hidden_size // config.num_attention_heads if width is None else width
    return ((int(config.num_key_value_heads), int(width)),) * int(config.num_hidden_layers)


def linear_layers(config: Config) -> int:
    """How many layers have linear attention."""
    return sum(kind == LINEAR for kind in getattr(config, "layer_types", None) or ())


def attention_layers(config: Config) -> int:
    """How many layers have attention, where others have a state."""
    return int(config.num_hidden_layers) - linear_layers(config)


def rows_of_attention(config: Config) -> Rows:
    """The layers with attention have keys and values of one shape."""
    return equal_rows(config)[: attention_layers(config)]


def delta_sizes(checkpoint: Checkpoint) -> tuple[int, int, int, int]:
    """Returns number and width of a delta net's heads of keys, and of those of values; as transformers has them where
    config.json does not say. Raises ExportError for what is no number."""
    defaults = {"num_key_heads": 16, "key_head_dim": 128, "num_value_heads": 32, "value_head_dim": 128}
    keys, width, values, value_width = (checkpoint.integer(f"linear_{key}", size) for key, size in defaults.items())
    return keys, width, values, value_width


def check_states(checkpoint: Checkpoint, sizes: tuple[int, int, int, int]) -> None:
    """Raises ExportError for layers without a state or attention, for none with attention, and for heads of values that
    do not share those of keys. sizes: of a state, as `Family.state_sizes` has them."""
    where = checkpoint.folder / "config.json"
    only_types(checkpoint, LINEAR, ATTENTION)
    kinds = checkpoint.config.get("layer_types")
    if isinstance(kinds, list) and ATTENTION not in kinds:
        raise ExportError(f"{where}: no layer is of type {ATTENTION!r}, and a target needs one")
    if sizes[2] % sizes[0]:
        raise ExportError(
            f"{where}: {sizes[2]} heads of values cannot share {sizes[0]} heads of keys; download it again"
        )


def only_types(checkpoint: Checkpoint, first: str, second: str) -> None:
    """Raises ExportError for a layer of another type than these two."""
    kinds = checkpoint.config.get("layer_types")
    if isinstance(kinds, list) and (other := [kind for kind in kinds if kind not in (first, second)]):
        where = checkpoint.folder / "config.json"
        raise ExportError(f"{where}: a layer is of type {other[0]!r}, not {first!r} or {second!r}")


def no_moving_rope(checkpoint: Checkpoint) -> None:
    """Raises ExportError for a rotation that depends on the length of the text, be it that of one kind of layers."""
    tables = checkpoint.config.get("rope_parameters")
    if not isinstance(tables, Mapping) or not any(isinstance(each, Mapping) for each in tables.values()):
        tables = {"of all layers": tables}
    for each in tables.values():
        rope_settings({**checkpoint.config, "rope_parameters": each}, str(checkpoint.folder / "config.json"))


@dataclass(frozen=True, slots=True)
class Family:
    """A family of targets.

    name: as people call it. model_type: of config.json. causal_lm: transformers' class of the whole model.
    as_llama: whether its layers compute what Llama's do, but for biases, windows and norms of each head's queries and
    keys.
    layer_norms: RMS norms in each layer. norms: config -> those of the whole model, where layers differ; None:
    `layer_norms` of each layer, and one. norm_offset: what the model adds to a norm's stored gain. epsilon: name of the
    config's number that is added under a norm's root.
    experts: where a mixture of experts keeps them.
    neighbours: whether RoPE rotates dimensions 2 i and 2 i + 1 of a head together. Exports reorder the rows of the
    query and key weights, so that RoPE as Llama has it (dimensions i and i + d/2) gives the same attention scores.
    windows: config -> for each layer the number of keys that a row sees, itself included; None for all.
    rows: config -> shapes of keys and values; the first are those that config names.
    attention_layers: config -> number of layers with attention. convolution: name of the part that others have in its
    place (graphs/short_convolutions.py); "": all have attention.
    delta: name of the part that layers of type LINEAR have in the place of attention, a gated delta net, which has a
    state and no keys (graphs/delta_nets.py); "": none has. Attention is gated then.
    space: name of the part that they have instead, a state space of Mamba-2; "": none has.
    state_sizes: the checkpoint -> number and width of heads of keys, and of values, in a layer with a state.
    reordered: the checkpoint -> those of its tensors whose rows the graph has in another order, in that order.
    rotary_layers: config -> number of layers that rotate queries; those of them that have keys rotate these too.
    mlp_norm, last_norm: names of a norm of each layer, as that before its MLP, and of the one after the last layer.
    linked: config -> whether layers read more than the hidden state before them, so that no layer is like another.
    context: config -> the longest text for which the graph computes what transformers does.
    logits: config, the LM head's output [..., V] -> logits [..., V].
    refuse: raises ExportError for a config that transformers runs and this exporter cannot express.
    variant: config.json -> the declaration of such a model, where models of one model_type differ; None: this one.
    opened: the checkpoint as it is stored -> with the names that the graph's weights have, and without what only its
    storage needs (a config that says how weights are packed).
    since: release of transformers with which the class was tried, where older ones compute something else.
    sampling: settings that the family's chat models are published with, for files that state none; None if there are no
    such settings of all of them."""

    name: str
    model_type: str
    causal_lm: str
    as_llama: bool = False
    layer_norms: int = 2
    norms: Callable[[Config], int] | None = None
    norm_offset: float = 0.0
    epsilon: str = "rms_norm_eps"
    experts: Experts | None = None
    neighbours: bool = False
    windows: Callable[[Config], Windows] = lambda config: (None,) * int(config.num_hidden_layers)
    rows: Callable[[Config], Rows] = equal_rows
    attention_layers: Callable[[Config], int] = lambda config: int(config.num_hidden_layers)
    convolution: str = ""
    delta: str = ""
    space: str = ""
    state_sizes: Callable[[Checkpoint], tuple[int, int, int, int]] = delta_sizes
    reordered: Callable[[Checkpoint], Mapping[str, StoredTensor]] = lambda checkpoint: {}
    rotary_layers: Callable[[Config], int] = lambda config: int(config.num_hidden_layers)
    mlp_norm: str = "post_attention_layernorm"
    last_norm: str = "norm"
    linked: Callable[[Config], bool] = lambda config: False
    context: Callable[[Config], int] = lambda config: int(config.max_position_embeddings)
    logits: Callable[[Config, Tensor], Tensor] = lambda config, logits: logits
    refuse: Callable[[Checkpoint], None] = no_moving_rope
    variant: Callable[[Mapping[str, Any]], Family | None] = lambda config: None
    opened: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint
    since: str = "5.0.0"
    sampling: SamplingDefaults | None = None

    @property
    def with_state(self) -> str:
        """Name of the part of layers that have a state and no keys; "": none has."""
        return self.delta or self.space

    @property
    def query_parts(self) -> int:
        """Rows of q_proj per row of queries: with those of its gates, where attention is gated."""
        return 2 if self.delta else 1

    def norm_count(self, config: Config) -> int:
        """Returns how many RMS norms the whole model has."""
        return self.layer_norms * int(config.num_hidden_layers) + 1 if self.norms is None else self.norms(config)

    def rotations(self, config: Config) -> int:
        """Returns how often the model rotates queries or keys."""
        keyless = int(config.num_hidden_layers) - linear_layers(config) - len(self.rows(config))
        return 2 * self.rotary_layers(config) - keyless

    def keyed(self, config: Config) -> tuple[int, ...]:
        """Returns the numbers of the layers that have keys and values."""
        if not self.with_state:
            return tuple(range(len(self.rows(config))))
        return tuple(number for number, kind in enumerate(config.layer_types) if kind != LINEAR)

    def gain_offset(self, name: str) -> float:
        """Returns what the model adds to a stored tensor."""
        return self.norm_offset if is_gain(name) else 0.0

    @property
    def scorers(self) -> tuple[str, ...]:
        """What names of layers end with that weigh experts, and the MLP beside them: they stay as they are."""
        parts = () if self.experts is None else (self.experts.router, self.experts.shared_gate)
        return tuple(f".{part}.weight" for part in parts if part)

    def parameter(self, name: str) -> str:
        """Returns the name of a checkpoint's tensor in the graph."""
        return name if self.experts is None else self.experts.parameter(name)

    def model_class(self) -> Any:
        """Returns transformers' class. Raises ExportError if this release of transformers has none that is right."""
        import transformers
        from packaging.version import Version

        cls, release = getattr(transformers, self.causal_lm, None), transformers.__version__
        if cls is None:
            raise ExportError(
                f"transformers {release} has no {self.causal_lm}, which {self.name} needs; install a newer release"
            )
        if Version(release) < Version(self.since):
            raise ExportError(f"{self.name} needs transformers {self.since} or newer; {release} is installed")
        return cls


def cache_keyword(model: Any) -> str:
    """Returns under which name a model of transformers takes and returns its cache; it changed in release 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def row_sums(values: Tensor) -> Tensor:
    """values [..., k]. Returns sums [..., 1], added one by one: a reduction's order of the numbers of a row depends on
    where the row is in memory, so on the rows before it."""
    first, *others = values.chunk(values.shape[-1], dim=-1)
    for other in others:
        first = first + other
    return first


def by_sigmoids(config: Config, scores: Tensor, correction: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """As Experts.chosen says: corrected sigmoids choose experts, whose own are their weights. least: what is added to
    the weights' sum, by which they are divided."""
    shares = scores.sigmoid()
    which = (shares + correction).topk(int(config.num_experts_per_tok))[1]
    best = shares.gather(-1, which)
    if config.norm_topk_prob:
        best = best / (row_sums(best) + least)
    return best * float(config.routed_scaling_factor), which


def rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_theta (default 10000, for any target) and scaling of a Llama-like config, as arguments of LlamaConfig.

    Raises ExportError for scalings whose table depends on the length of the current call: rows that are cached already
    would have been rotated with another table."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ExportError(f"{where}: {key} is {config[key]!r}, but must be an object")
    parameters = {k: v for k, v in (config.get("rope_parameters") or {}).items() if v is not None}
    scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None}
    kind = scaling.get("rope_type", scaling.get("type", parameters.get("rope_type", "default")))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ExportError(f"{where}: rope scaling {kind!r} depends on the text's length; it is not supported")
    theta = config.get("rope_theta")
    theta = parameters.get("rope_theta", 10000.0) if theta is None else theta
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ExportError(f"{where}: rope_theta is {theta!r}, but must be a number above 0")
    merged = {**parameters, **{k: v for k, v in scaling.items() if k != "type"}}
    settings: dict[str, Any] = {"rope_parameters": {**merged, "rope_type": kind, "rope_theta": float(theta)}}
    if config.get("max_position_embeddings") is not None:
        settings["max_position_embeddings"] = config["max_position_embeddings"]
    return settings


@dataclass(frozen=True, slots=True)
class Experts:
    """Where a family keeps its experts, and how a row's are chosen and computed.

    block, module: names in checkpoints, and in transformers, of the part of a layer that has them; "": the layer has,
    beside its MLP.
    gate, up, down: names in checkpoints of an expert's matrices.
    count, width: config -> E, columns of an expert.
    renormalised: config -> whether the weights of a row's k experts add up to 1.
    router: name of the part that scores experts, of a router with more parts with its own name before it.
    stacked: whether checkpoints hold those of a layer in one tensor, of which `Family.opened` makes each one's.
    biased: whether router and experts have biases; transformers keeps the matrices of such experts transposed, columns
    of gate and up in turns.
    gated: config, gate, up -> what down reads; None for activation(gate) * up.
    tells_shares: whether the part of a layer returns more than its output.
    chosen: config, the router's scores [T, E], a correction [E] -> weights and numbers [T, k] of each row's experts;
    None for the likeliest by softmax.
    correction: name of that tensor in the part of a layer, of which checkpoints may know its last part alone; "": none.
    shared: name there of an MLP that reads every row; "": none. shared_gate: of the part whose sigmoid its output is
    multiplied by; "": by nothing."""

    count: Callable[[Any], int]
    width: Callable[[Any], int]
    renormalised: Callable[[Any], bool]
    block: str = MODULE
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    stacked: bool = False
    biased: bool = False
    gated: Callable[[Config, Tensor, Tensor], Tensor] | None = None
    tells_shares: bool = False
    chosen: Callable[[Config, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    correction: str = ""
    shared: str = ""
    shared_gate: str = ""
    module: str = MODULE

    @property
    def within(self) -> str:
        """What stands between a layer's name and that of an expert's part."""
        return f".{self.module}.experts." if self.module else ".experts."

    def counts(self, config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns E and k of a config.json; None where it leaves them to the defaults of transformers."""
        # As newer releases write it, for Qwen3-MoE, and as ERNIE does.
        names = {"num_experts": config.get("num_local_experts", config.get("moe_num_experts"))}
        try:
            each = config["moe_k"] if "moe_k" in config else config["num_experts_per_tok"]
            return self.count(SimpleNamespace(**{**names, **config})), int(each)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def parameter(self, name: str) -> str:
        """Returns the name that a checkpoint's tensor has here."""
        head, block, tail = name.partition(f".{self.block}.")
        if block and self.correction and tail.endswith(self.correction.rpartition(".")[2]):
            return f"{head}.{self.module}.{self.correction}"
        if not block or ".experts." not in name:
            return f"{head}.{self.module}.{tail}" if block else name
        *before, matrix, kind = tail.split(".")
        renamed = {self.gate: "gate_proj", self.up: "up_proj", self.down: "down_proj"}.get(matrix, matrix)
        return ".".join([head, self.module, *before, renamed, kind])
