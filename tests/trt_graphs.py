"""What TensorRT rejects, ignores or builds in another type in a graph, and a graph as older exports wrote it."""

from __future__ import annotations

import onnx_ir as ir

from eagle_export.recipes.graph import replace

BYTES = (ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)
QUANTISERS = ("QuantizeLinear", "DequantizeLinear")


def faults(model: ir.Model) -> set[str]:
    """Returns what TensorRT rejects, ignores or builds in fp32 without a warning, in an fp16 graph. fp32 may only be
    what `bytes_in_fp32` finds."""
    problems = {f"operator domain {node.domain!r}" for node in model.graph if node.domain}
    problems |= {f"opset domain {domain!r}" for domain in model.opset_imports if domain}
    problems |= {
        f"{value.dtype} weight {name}"
        for name, value in model.graph.initializers.items()
        # Frequencies are multiplied by positions of thousands, for which fp16 has too few digits.
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
        and not name.endswith("rotary_emb.inv_freq")
        and not _is_scale_of_bytes(value)
    }
    for node in model.graph:
        if node.op_type == "Attention" or (node.op_type == "MatMul" and not bytes_in_fp32(node)):
            types = {type_of(value) for value in node.inputs if value is not None}
            problems |= {f"{kind} input of {node.op_type}" for kind in types - {ir.DataType.FLOAT16}}
        if node.op_type == "Attention":
            problems |= _attention_faults(node)
    return problems


def bytes_in_fp32(node: ir.Node) -> bool:
    """Whether a product is of bytes and scaled in fp32: an fp16 input that is cast, quantised and dequantised, a weight
    in bytes, and a result that is cast to fp16."""
    made = [value.producer() for value in node.inputs if value is not None]
    if len(made) != 2 or any(each is None or each.op_type != "DequantizeLinear" for each in made):
        return False
    inputs, weight = (each.inputs for each in made if each is not None)
    quantised = inputs[0].producer() if inputs[0] is not None else None
    if quantised is None or quantised.op_type != "QuantizeLinear" or weight[0] is None or inputs[1] is None:
        return False
    scales = (inputs[1], quantised.inputs[1], weight[1])
    (out,) = node.outputs
    after = [use.node for use in out.uses()]
    return (
        all(scale is not None and scale.dtype == ir.DataType.FLOAT for scale in scales)
        and weight[0].is_initializer()
        and weight[0].dtype in BYTES
        and cast_type(quantised.inputs[0]) == ir.DataType.FLOAT
        and [cast_type(each.outputs[0]) for each in after] == [ir.DataType.FLOAT16]
    )


def type_of(value: ir.Value) -> ir.DataType | None:
    """The type of a value, also where the file does not name it: of a DequantizeLinear's or a Cast's output."""
    node = value.producer()
    if node is not None and node.op_type == "DequantizeLinear" and node.inputs[1] is not None:
        return node.inputs[1].dtype
    return cast_type(value) or value.dtype


def cast_type(value: ir.Value | None) -> ir.DataType | None:
    """The type that a Cast gives a value; None if no Cast computes it."""
    node = None if value is None else value.producer()
    return None if node is None or node.op_type != "Cast" else ir.DataType(node.attributes["to"].as_int())


def scaled_in_fp16(model: ir.Model) -> int:
    """Rewrites all products of bytes as older exports wrote them, without casts and with scales in fp16. Returns how
    many."""
    products = [node for node in model.graph if node.op_type == "MatMul" and bytes_in_fp32(node)]
    for node in products:
        (out,) = node.outputs
        replace(next(iter(out.uses())).node, out)
        for value in node.inputs:
            made = value.producer() if value is not None else None
            assert made is not None
            quantised = made.inputs[0].producer() if made.inputs[0] is not None else None
            for each in (made, quantised):
                if each is not None:
                    _narrow(each.inputs[1])
            if quantised is not None and cast_type(quantised.inputs[0]) is not None:
                before = quantised.inputs[0].producer() if quantised.inputs[0] is not None else None
                assert before is not None
                quantised.replace_input_with(0, before.inputs[0])
    unused = [node for node in model.graph if node.op_type == "Cast" and not list(node.outputs[0].uses())]
    model.graph.remove([node for node in unused if not node.outputs[0].is_graph_output()], safe=True)
    return len(products)


def _narrow(scale: ir.Value | None) -> None:
    assert scale is not None and scale.const_value is not None
    values = scale.const_value.numpy().astype("float16")
    scale.const_value = ir.tensor(values, name=scale.name)
    scale.dtype = ir.DataType.FLOAT16


def _is_scale_of_bytes(value: ir.Value) -> bool:
    """Whether a weight only scales bytes to and from fp32."""
    uses = list(value.uses())
    return bool(uses) and all(use.idx == 1 and use.node.op_type in QUANTISERS for use in uses)


def _attention_faults(node: ir.Node) -> set[str]:
    neutral = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0, "scale": 1.0}
    problems = {f"attribute {name}" for name, item in node.attributes.items() if item.value != neutral.get(name)}
    if len(node.outputs) != 1:
        problems.add(f"{len(node.outputs)} outputs of Attention")
    mask, *more = [*node.inputs[3:], None]
    if mask is None:
        problems.add("no mask")
    slots = ("past_key", "past_value", "nonpad_kv_seqlen", "")
    return problems | {f"input {slot}" for slot, value in zip(slots, more, strict=False) if value is not None}
