"""Reading and changing graphs in recipes: linear layers, new nodes, weights that are computed when written, and what
every pass is: a pattern to find, a rewrite of the nodes that match, and a check of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.base.parted import part_of, scaled

Array = npt.NDArray[Any]
Match = TypeVar("Match")
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators
KEPT_WIDE = "kept wide"  # key in a node's meta: recipes leave the layer as traced
WINDOW = "eagle.window"  # key in the metadata of an Attention node: how many positions back a row sees
CONVOLUTION = ("eagle", "ShortConvolution")  # domain and name of traces' own node (graphs/short_convolutions.py)
DELTA_NET, STATE_SPACE = ("eagle", "GatedDeltaNet"), ("eagle", "StateSpace")  # the same of graphs/delta_nets.py
KEPT = ".kept"  # suffix to the name of an LM head that was trimmed to some of its columns


@dataclass(frozen=True, slots=True)
class Linear:
    """A product of x [..., K] and a weight [K, N]. rotated: the weight is stored as [N, K] and goes through a
    Transpose, because it is also the embedding."""

    node: ir.Node
    weight: ir.Value
    rotated: bool

    @property
    def x(self) -> ir.Value:
        """The current input: the layer that computes it may have been replaced since this object was made."""
        (value, _) = self.node.inputs
        assert value is not None
        return value

    @property
    def name(self) -> str:
        return str(self.weight.name)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)"""
        assert self.weight.shape is not None
        rows, columns = self.weight.shape.numpy()
        return (columns, rows) if self.rotated else (rows, columns)

    @property
    def dtype(self) -> ir.DataType:
        """The type of the input."""
        assert self.x.dtype is not None
        return self.x.dtype

    def reader(self) -> Callable[[], Array]:
        """Returns a function that reads the weight as [K, N] fp32, also after the layer has left the graph."""
        tensor, rotated = self.weight.const_value, self.rotated
        assert tensor is not None

        def read() -> Array:
            array = tensor.numpy().astype(np.float32, copy=False)
            return np.ascontiguousarray(array.T) if rotated else array

        return read

    def columns(self) -> Callable[[slice], Array]:
        """As `reader`, of some columns of the weight [K, n]."""
        tensor, rotated = self.weight.const_value, self.rotated
        assert tensor is not None

        def read(piece: slice) -> Array:
            array = part_of(tensor, 0 if rotated else 1, piece).astype(np.float32, copy=False)
            return np.ascontiguousarray(array.T) if rotated else array

        return read


def linears(model: ir.Model) -> list[Linear]:
    """Every product with a weight that recipes may change, in the graph's order."""
    layers = []
    for node in model.graph:
        if node.op_type != "MatMul" or KEPT_WIDE in node.meta:
            continue
        _, weight = node.inputs
        assert weight is not None
        producer = weight.producer()
        rotated = producer is not None and producer.op_type == "Transpose"
        if rotated:
            assert producer is not None and producer.inputs[0] is not None
            weight = producer.inputs[0]
        if weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2:
            layers.append(Linear(node, weight, rotated))
    return layers


def is_lm_head(linear: Linear) -> bool:
    """Whether the layer computes the target's logits or the head's. Families scale or bound them, block heads add
    transitions, and fp16 logits are cast to fp32."""
    (out,) = linear.node.outputs
    while out.name != "logits":
        after = [use.node for use in out.uses()]
        if any(node.op_type == "LogSoftmax" for node in after):
            return True
        if len(after) != 1 or after[0].op_type not in ("Add", "Cast", "Div", "Mul", "Tanh"):
            return False
        (out,) = after[0].outputs
    return True


def fed_by_product(linear: Linear) -> bool:
    """Whether its input is one activation times another, as that of down is. A few values of a row are then far larger
    than the others."""
    return made_by(linear.x, "Mul") is not None


def fed_by_norm(linear: Linear) -> bool:
    """Whether its input is normalised, as that of q, k, v, gate and up is, or the sum of all layers before it, as in
    families whose norms come after a layer; but not what a state space's last product reads, which is such as o's."""
    if linear.name.endswith(".out_proj.weight"):
        return False
    x = made_of(linear.x, "Cast") or linear.x  # of an embedding in fp16
    producer = x.producer()
    if producer is not None and producer.op_type == "Split":  # the rows of an expert (routed_experts.py)
        gathered = made_of(made_of(x, "Split"), "Gather")
        producer = None if gathered is None else gathered.producer()
    if producer is None or producer.op_type == "RMSNormalization":
        return producer is not None
    first, *rest = producer.inputs
    weights = [value is not None and value.is_initializer() for value in (first, *rest)]
    return (producer.op_type == "Add" and not any(weights)) or (producer.op_type == "Gather" and weights[0])


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node that computes a value; None if it is of another operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op else None


def made_of(value: ir.Value | None, op: str) -> ir.Value | None:
    """The first input of the node that computes a value; None if that is of another operator."""
    node = made_by(value, op)
    return None if node is None else node.inputs[0]


def only_reader(value: ir.Value, op: str) -> ir.Node | None:
    """The node that alone reads a value; None if there are more, or it is of another operator."""
    nodes = [use.node for use in value.uses()]
    return nodes[0] if len(nodes) == 1 and nodes[0].op_type == op else None


def multiplied_after(value: ir.Value) -> tuple[ir.Node, float] | None:
    """The node that alone reads a value and multiplies it by a number, and that number; None if there is none."""
    node = only_reader(value, "Mul")
    if node is None:
        return None
    factor = number_of(next(each for each in node.inputs if each is not value))
    return None if factor is None else (node, factor)


def number_of(value: ir.Value | None) -> float | None:
    """The only number of a constant; None of anything else."""
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def size_of(value: ir.Value | None, axis: int) -> int:
    """Returns a size that is a number."""
    assert value is not None and value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def narrows(linear: Linear) -> bool:
    """Whether its output is narrower than its input, as that of k and v is with grouped-query attention. Those of small
    experts are narrow too, but each column serves one row and there are many."""
    k, n = linear.shape
    return n < k and ".experts." not in linear.name


def lazy_weight(
    model: ir.Model, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Array]
) -> ir.Value:
    """Adds an initializer whose values are computed when they are written. Returns an existing one of that name."""
    tensor = ir.LazyTensor(lambda: ir.tensor(read(), dtype=dtype), dtype=dtype, shape=ir.Shape(shape), name=name)
    return initializer(model, tensor)


def constant(model: ir.Model, name: str, array: Array) -> ir.Value:
    """Adds a small initializer. Returns an existing one of that name."""
    return initializer(model, ir.tensor(array, name=name))


def initializer(model: ir.Model, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds an initializer. Returns an existing one of that name."""
    name = str(tensor.name)
    if name not in model.graph.initializers:
        model.graph.register_initializer(ir.val(name, const_value=tensor))
    return model.graph.initializers[name]


def pieces(compute: Callable[[], tuple[Array, ...]], count: int) -> tuple[Callable[[], Array], ...]:
    """Returns readers of the `count` arrays that `compute` returns. It runs when one of them is first read. Each array
    is freed when it is read; reading one again computes all again."""
    held: dict[int, Array] = {}

    def read(index: int) -> Array:
        if index not in held:
            held.update(enumerate(compute()))
        return held.pop(index)

    return tuple(partial(read, index) for index in range(count))


def insert(
    before: ir.Node, op: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any
) -> ir.Value:
    """Adds a node before another one. Returns its output."""
    return insert_all(before, op, inputs, 1, domain, **attributes)[0]


def insert_all(
    before: ir.Node, op: str, inputs: Sequence[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
) -> Sequence[ir.Value]:
    """Adds a node of several outputs before another one. Returns these."""
    node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs)
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    if domain:
        before.graph.opset_imports[domain] = 1
    return node.outputs


def insert_after(value: ir.Value, op: str, other: ir.Value) -> ir.Value:
    """Adds a node that reads a value and another one, and whose output all read in the place of the value. Returns the
    output, which has the value's type and shape."""
    before, node = value.producer(), ir.node(op, [value, other])
    assert before is not None and isinstance(before.graph, ir.Graph)
    (new,) = node.outputs
    new.type, new.shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, new, replace_graph_outputs=True)
    node.replace_input_with(0, value)
    before.graph.insert_after(before, node)
    return new


def rescale(weight: ir.Value, factors: Array, axis: int) -> None:
    """Multiplies an initializer along an axis, when it is written."""
    assert weight.const_value is not None
    weight.const_value = scaled(weight.const_value, factors, axis)


@dataclass(frozen=True, slots=True)
class Steps:
    """Adds nodes before one of a graph; a call with an operator and its inputs returns the new node's output."""

    model: ir.Model
    before: ir.Node

    def __call__(self, op: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        return insert(self.before, op, inputs, domain, **attributes)

    def ints(self, *values: int) -> ir.Value:
        """Returns a constant [len(values)] in int64."""
        return constant(self.model, "ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def integer(self, value: int) -> ir.Value:
        """Returns a constant [] in int64."""
        return constant(self.model, f"int_{value}", np.array(value, np.int64))

    def number(self, value: float) -> ir.Value:
        """Returns a constant [] in fp32."""
        return constant(self.model, f"number_{value:.6g}", np.array(value, np.float32))

    def single(self, value: ir.Value) -> ir.Value:
        return self("Cast", value, to=int(ir.DataType.FLOAT))

    def double(self, value: ir.Value) -> ir.Value:
        return self("Cast", value, to=int(ir.DataType.DOUBLE))

    def greatest(self, value: ir.Value) -> ir.Value:
        """Returns the largest value along the last axis, which is kept."""
        return self("ReduceMax", value, self.ints(-1), keepdims=1)


def insert_split(
    before: ir.Node, value: ir.Value, parts: int, axis: int, sizes: ir.Value | None = None
) -> tuple[ir.Value, ...]:
    """Cuts a value along an axis into equal parts, or into parts of `sizes` [parts]. Returns the parts."""
    if sizes is None:
        return tuple(insert_all(before, "Split", [value], parts, axis=axis, num_outputs=parts))
    return tuple(insert_all(before, "Split", [value, sizes], parts, axis=axis))


def replace(node: ir.Node, value: ir.Value) -> None:
    """Lets `value` take the place of a node's only output. Removes the node, and whatever only it used."""
    (old,) = node.outputs
    take_place(old, value)
    _remove(node)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Puts a value in the place and under the name of one whose node leaves the graph."""
    new.shape, new.type, name = old.shape, old.type, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name, new.name = None, name


def _remove(node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    inputs = [value for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for value in inputs:
        if value.uses() or value.is_graph_output():
            continue
        if value.is_initializer():
            graph.initializers.pop(str(value.name), None)
            continue
        producer = value.producer()  # which an earlier input may have removed, if it has several outputs
        if producer is not None and producer.graph is not None and not any(out.uses() for out in producer.outputs):
            _remove(producer)


@dataclass(frozen=True, slots=True, eq=False)
class Pass(ABC, Generic[Match]):
    """One change to a graph, with its settings as fields. name: as errors call it."""

    name: ClassVar[str]

    @abstractmethod
    def pattern(self, model: ir.Model) -> list[Match]:
        """Returns the nodes or layers that the pass will change, in the graph's order."""

    @abstractmethod
    def rewrite(self, model: ir.Model, matches: list[Match]) -> dict[str, str]:
        """Changes them in place. Returns weight or node name -> what was done, in words for the manifest."""

    def check(self, model: ir.Model) -> None:
        """Raises ExportError if the graph is not as it must be after the pass: the pattern still matches something."""
        if rest := self.pattern(model):
            raise ExportError(f"pass {self.name!r} left {len(rest)} of its matches unchanged; report this as a bug")

    def apply(self, model: ir.Model) -> dict[str, str]:
        """Finds, rewrites and checks. Returns what `rewrite` does, nothing if the pattern matches nothing."""
        matches = self.pattern(model)
        if not matches:
            return {}
        changed = self.rewrite(model, matches)
        self.check(model)
        return changed


@dataclass(frozen=True, slots=True)
class LayerPass(Pass[Linear]):
    """A pass over the linear layers that are `wanted`: by default all that are still in floats."""

    wanted: Callable[[Linear], bool] = field(default=lambda _: True, kw_only=True)

    def pattern(self, model: ir.Model) -> list[Linear]:
        return list(filter(self.wanted, linears(model)))
