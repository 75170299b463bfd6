"""Writes small ONNX graphs as bytes, without a dependency on the onnx package: those that allocate, select and move
rows in device memory, as words of four bytes, whatever their type, and the one that finds the candidates of logits."""

from __future__ import annotations

import struct

from eagle_runtime.bundle.listed_files import varint

IR_VERSION, OPSET = 8, 18
OWN_DOMAIN = "eagle"  # of the native operators
FLOAT, UINT8, INT8, INT32, INT64 = 1, 2, 3, 6, 7  # TensorProto.DataType
# Field numbers of onnx.proto.
MODEL_IR, MODEL_GRAPH, MODEL_OPSET, OPSET_DOMAIN, OPSET_VERSION = 1, 7, 8, 1, 2
GRAPH_NODE, GRAPH_NAME, GRAPH_INPUT, GRAPH_OUTPUT = 1, 2, 11, 12
NODE_INPUT, NODE_OUTPUT, NODE_OP, NODE_ATTRIBUTE, NODE_DOMAIN = 1, 2, 4, 5, 7
ATTRIBUTE_NAME, ATTRIBUTE_FLOAT, ATTRIBUTE_INT, ATTRIBUTE_TYPE, ATTRIBUTE_IS_FLOAT, ATTRIBUTE_IS_INT = 1, 2, 3, 20, 1, 2
VALUE_NAME, VALUE_TYPE, TYPE_TENSOR, TENSOR_ELEMENT, TENSOR_SHAPE, SHAPE_DIM, DIM_NAME = 1, 2, 1, 1, 2, 1, 2


def model(nodes: list[bytes], inputs: dict[str, tuple[int, int]], outputs: dict[str, tuple[int, int]]) -> bytes:
    """Returns the bytes of an ONNX file. inputs, outputs: name -> element type and number of dimensions, all
    symbolic."""
    graph = b"".join(_field(GRAPH_NODE, node) for node in nodes) + _field(GRAPH_NAME, b"rows")
    for number, values in ((GRAPH_INPUT, inputs), (GRAPH_OUTPUT, outputs)):
        graph += b"".join(_field(number, _value(name, *kind)) for name, kind in values.items())
    opsets = _field(MODEL_OPSET, _field(OPSET_VERSION, OPSET))
    opsets += _field(MODEL_OPSET, _field(OPSET_DOMAIN, OWN_DOMAIN.encode()) + _field(OPSET_VERSION, 1))
    return _field(MODEL_IR, IR_VERSION) + _field(MODEL_GRAPH, graph) + opsets


def node(op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: int | float) -> bytes:
    """Returns the bytes of one node."""
    node = b"".join(_field(NODE_INPUT, name.encode()) for name in inputs)
    node += b"".join(_field(NODE_OUTPUT, name.encode()) for name in outputs) + _field(NODE_OP, op.encode())
    for name, value in attributes.items():
        attribute = _field(ATTRIBUTE_NAME, name.encode())
        if isinstance(value, float):
            attribute += varint(ATTRIBUTE_FLOAT << 3 | 5) + struct.pack("<f", value)
            attribute += _field(ATTRIBUTE_TYPE, ATTRIBUTE_IS_FLOAT)
        else:
            attribute += _field(ATTRIBUTE_INT, value) + _field(ATTRIBUTE_TYPE, ATTRIBUTE_IS_INT)
        node += _field(NODE_ATTRIBUTE, attribute)
    return node + (_field(NODE_DOMAIN, domain.encode()) if domain else b"")


def allocate() -> bytes:
    """Returns a graph: shape [1] int64 -> words, zeros of that shape, in memory that the engine allocates."""
    return model([node("ConstantOfShape", ["shape"], ["words"])], {"shape": (INT64, 1)}, {"words": (FLOAT, 1)})


def pick() -> bytes:
    """Returns a graph: rows [n, W], index [m] int64 -> picked [m, W]."""
    gather = node("Gather", ["rows", "index"], ["picked"], axis=0)
    return model([gather], {"rows": (FLOAT, 2), "index": (INT64, 1)}, {"picked": (FLOAT, 2)})


def move() -> bytes:
    """Returns a graph: cache [A, n, W], index [m] int64, places [A, m, 2] int64 -> committed [A, n, W], the cache with
    cache[:, index] written at places. With committed bound to the address of the cache it works in place, since all
    rows are read before one is written."""
    nodes = [
        node("Gather", ["cache", "index"], ["picked"], axis=1),
        node("ScatterND", ["cache", "places", "picked"], ["committed"]),
    ]
    inputs = {"cache": (FLOAT, 3), "index": (INT64, 1), "places": (INT64, 3)}
    return model(nodes, inputs, {"committed": (FLOAT, 3)})


def candidates() -> bytes:
    """Returns a graph: logits [R, V], count [1] int64, first [1] int64 (0), watched [R, M] int64,
    inverse_temperature [1] -> top_logits [R, count], top_ids [R, count] int32, best first; best_log_prob [R, 1], of the
    best at that temperature; watched_logits [R, M]."""
    nodes = [
        node("TopK", ["logits", "count"], ["top_logits", "wide_ids"], axis=1),
        node("Cast", ["wide_ids"], ["top_ids"], to=INT32),
        node("Gather", ["wide_ids", "first"], ["best_id"], axis=1),
        node("Mul", ["logits", "inverse_temperature"], ["scores"]),
        node("LogSoftmax", ["scores"], ["log_probs"], axis=1),
        node("GatherElements", ["log_probs", "best_id"], ["best_log_prob"], axis=1),
        node("GatherElements", ["logits", "watched"], ["watched_logits"], axis=1),
    ]
    inputs = {"logits": (FLOAT, 2), "count": (INT64, 1), "first": (INT64, 1), "watched": (INT64, 2)}
    outputs = {"top_logits": (FLOAT, 2), "top_ids": (INT32, 2), "best_log_prob": (FLOAT, 2)}
    return model(nodes, inputs | {"inverse_temperature": (FLOAT, 1)}, outputs | {"watched_logits": (FLOAT, 2)})


def _value(name: str, element: int, rank: int) -> bytes:
    dims = (_field(SHAPE_DIM, _field(DIM_NAME, f"{name}_{axis}".encode())) for axis in range(rank))
    tensor = _field(TENSOR_ELEMENT, element) + _field(TENSOR_SHAPE, b"".join(dims))
    return _field(VALUE_NAME, name.encode()) + _field(VALUE_TYPE, _field(TYPE_TENSOR, tensor))


def _field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protobuf message: a number, or a string or message with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value
