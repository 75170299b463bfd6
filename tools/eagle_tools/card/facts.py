"""What a forward pass of a graph reads and computes: from a bundle's manifest, or from the shape of a model whose
weights are not at hand. The two agree to the byte for a bundle that exists (tests/tools/test_card_model.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import MANIFEST_BYTES, read_json
from eagle_runtime.bundle.manifest import DTYPE_BITS, GraphSpec, HeadSpec, Manifest, TargetSpec
from eagle_runtime.bundle.typed_json import from_json

EMBEDDING = "model.embed_tokens.weight"
WEIGHT_ONLY = "weight-only"
BELONGING = (".scale", ".zero")  # endings of tensors that belong to a quantised weight


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times a weight [inputs, outputs]. nbytes: of the weight and its scales. kind: the type of both factors
    ("fp16", "int8", "fp8"), or "weight-only" for fp16 rows and a smaller weight. logits: whether it makes logits."""

    inputs: int
    outputs: int
    nbytes: int
    kind: str
    logits: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """One graph. vectors: bytes of norms and biases. layers, attention_width (query heads x head size): of its
    attention. kv_row: bytes of keys and values of one token in all layers. hidden: width of its embedding rows."""

    products: tuple[Product, ...]
    vectors: int
    layers: int
    attention_width: int
    kv_row: int
    hidden: int

    @property
    def weights(self) -> int:
        """Bytes of weights that a forward pass reads; rows of an embedding table are none of them."""
        return sum(product.nbytes for product in self.products) + self.vectors

    @property
    def vocab(self) -> int:
        """Columns of the logits."""
        return sum(product.outputs for product in self.products if product.logits)


@dataclass(frozen=True, slots=True)
class Pair:
    """Target and head (None without one). precision: of the target."""

    name: str
    precision: str
    target: Facts
    head: Facts | None


def pair_of_bundle(name: str, manifest: Manifest) -> Pair:
    """Returns the facts of a bundle that computes in fp16."""
    head = None if manifest.head is None else _facts(manifest.head)
    return Pair(name, manifest.precision["target"], _facts(manifest.target), head)


def _facts(model: TargetSpec | HeadSpec) -> Facts:
    graph = model.graph
    products, vectors = [], 0
    for name in graph.weights:
        of_norm = name.endswith((".weight", ".bias")) and len(graph.weights[name].shape) == 1
        if of_norm:
            vectors += _nbytes(graph, name)
        elif _is_linear(graph, name):
            products.append(_product(graph, name))
    outputs = [product for product, name in zip(products, _linear(graph), strict=True) if "o_proj" in name]
    return Facts(
        products=tuple(products),
        vectors=vectors,
        layers=model.num_layers,
        attention_width=outputs[0].inputs if outputs else model.hidden_size,
        kv_row=2 * graph.kv_row_bytes * model.num_layers,
        hidden=graph.weights[EMBEDDING].shape[1] if EMBEDDING in graph.weights else model.hidden_size,  # type: ignore[arg-type]
    )


def _linear(graph: GraphSpec) -> Iterator[str]:
    return (name for name in graph.weights if _is_linear(graph, name))


def _is_linear(graph: GraphSpec, name: str) -> bool:
    """Whether a tensor is the weight of a linear layer. An embedding table is one if it makes the logits too, and then
    the only tensor that can."""
    if ".weight" not in name or len(graph.weights[name].shape) != 2 or name.endswith(BELONGING):
        return False
    others = (other for other in graph.weights if other != name)
    return name != EMBEDDING or not any("lm_head." in other or other.startswith(EMBEDDING) for other in others)


def _product(graph: GraphSpec, name: str) -> Product:
    base = name[: name.rindex(".weight") + len(".weight")]
    first, second = map(int, graph.weights[name].shape)
    inputs, outputs = (second, first) if name == EMBEDDING else (first, second)
    related = [other for other in graph.weights if other.startswith(base) and other.endswith(BELONGING)]
    nbytes = _nbytes(graph, name) + sum(_nbytes(graph, other) for other in related)
    bits = DTYPE_BITS.get(graph.weights[name].dtype, 8)
    recipe = graph.recipe.get(base, "")
    kind = "fp16" if bits == 16 else WEIGHT_ONLY
    for activations in ("int8", "fp8"):
        kind = activations if f"activations {activations}" in recipe else kind
    return Product(inputs, outputs, nbytes, kind, logits="lm_head" in name or name.startswith(EMBEDDING))


def _nbytes(graph: GraphSpec, name: str) -> int:
    spec = graph.weights[name]
    return prod(map(int, spec.shape)) * DTYPE_BITS.get(spec.dtype, 8) // 8


@dataclass(frozen=True, slots=True)
class Stored:
    """How a precision stores a weight [K, N]. bits: of a number. scale_bits, zero_bits: per column, or per block of
    `block` rows of a column. kind: as in Product. weight_only: parts of the names of layers that are stored as int8
    weights for fp16 rows."""

    bits: int
    kind: str
    scale_bits: int = 0
    zero_bits: int = 0
    block: int | None = None
    weight_only: tuple[str, ...] = ()

    def product(self, name: str, inputs: int, outputs: int) -> Product:
        """Returns the product of a layer [inputs, outputs]."""
        stored = PRECISIONS["int8-weight"] if any(part in name for part in self.weight_only) else self
        groups = outputs * (1 if stored.block is None else -(-inputs // stored.block))
        bits = inputs * outputs * stored.bits + groups * (stored.scale_bits + stored.zero_bits)
        return Product(inputs, outputs, bits // 8, stored.kind, logits="lm_head" in name)


# As eagle-export stores linear layers for TensorRT.
PRECISIONS = {
    "fp16": Stored(16, "fp16"),
    "int8": Stored(8, "int8", scale_bits=32, zero_bits=8, weight_only=("down_proj", "lm_head")),
    "int8-weight": Stored(8, WEIGHT_ONLY, scale_bits=16, zero_bits=8),
    "int4": Stored(4, WEIGHT_ONLY, scale_bits=16, block=32),
    "fp8": Stored(8, "fp8", scale_bits=32, zero_bits=8, weight_only=("lm_head",)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with an EAGLE-3 head of one layer, in numbers of its configuration. draft_vocab: tokens that the head
    knows. head_intermediate: width of the head's MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    head_intermediate: int


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256, 32000, 8192),  # Llama 3.2 1 B
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, 32000, 14336),  # Llama 3 8 B and its published EAGLE-3 head
}


def read_shape(path: Path) -> Shape:
    """Returns the shape in a JSON file with the fields of Shape. Raises RequestError."""
    data = read_json(path, MANIFEST_BYTES, RequestError, "write the fields of a shape", "give a JSON file")
    shape: Shape = from_json(Shape, data, str(path))
    return shape


def pair_of_shape(name: str, shape: Shape, precision: str) -> Pair:
    """Returns the facts of a pair of this shape, with target and head in one precision."""
    h, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def layer(inputs: int, intermediate: int) -> list[tuple[str, int, int]]:
        attention = [("q_proj", inputs, query), ("k_proj", inputs, kv), ("v_proj", inputs, kv), ("o_proj", query, h)]
        return [
            *attention,
            ("gate_proj", h, intermediate),
            ("up_proj", h, intermediate),
            ("down_proj", intermediate, h),
        ]

    def facts(layers: int, norms: int, linear: list[tuple[str, int, int]]) -> Facts:
        products = tuple(PRECISIONS[precision].product(*one) for one in linear)
        return Facts(products, 2 * norms * h, layers, query, 4 * kv * layers, h)

    taps = ("fc", 3 * h, h)  # the head's first product, which the target's graph computes
    target = [*layer(h, shape.intermediate) * shape.layers, taps, ("lm_head", h, shape.vocab)]
    head = [*layer(2 * h, shape.head_intermediate), ("lm_head", h, shape.draft_vocab)]
    return Pair(name, precision, facts(shape.layers, 2 * shape.layers + 1, target), facts(1, 4, head))
