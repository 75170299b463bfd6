"""Conversion for OpenVINO in a process of its own: a Llama in torch is traced with a cache, the cache becomes state of
the model, and NNCF compresses the weights with its defaults.

    python -m eagle_tools.peers.openvino_build FOLDER OUT FORMAT

The traced model is what optimum-intel exports for a Llama, for one sequence: attention is a
scaled_dot_product_attention over a state that each pass extends, which OpenVINO's processor plugin fuses. int8 has a
scale and a zero per output channel, int4 per 128 inputs, with the embedding and the LM head in int8.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_runtime.base.tree import hiding
from eagle_tools.own_python import run_python
from eagle_tools.peers.source import Source, open_source

FORMATS = {"int8": "INT8_ASYM", "int4": "INT4_ASYM"}  # names of nncf.CompressWeightsMode
GROUP = 128  # inputs of a scale in int4; halved until it divides all layers' inputs


def build(source: Source, out: Path, name: str) -> None:
    """Write the model in the format `name`, a key of FORMATS, to the folder `out`. Raises RequestError."""
    own = ["-m", "eagle_tools.peers.openvino_build", str(source.folder), str(out), name]
    run_python(own, f"OpenVINO could not convert {source.folder} to {name}")


def group_of(source: Source) -> int:
    """Returns the number of inputs of a scale in int4."""
    group, config = GROUP, source.config
    inputs = (config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * source.head_dim)
    while any(size % group for size in inputs):
        group //= 2
    return group


def main(argv: Sequence[str]) -> int:
    """Convert in this process; returns the exit status."""
    import nncf
    import openvino as ov
    from openvino._offline_transformations import apply_make_stateful_transformation

    folder, out, name = Path(argv[0]), Path(argv[1]), argv[2]
    source = open_source(folder)
    model = traced(folder)
    names = {}
    for index, (given, made) in enumerate(zip(model.inputs[3:], model.outputs[1:], strict=True)):
        names[f"past.{index}"] = f"present.{index}"
        given.get_tensor().set_names({f"past.{index}"})
        made.get_tensor().set_names({f"present.{index}"})
    for index, label in enumerate(("input_ids", "attention_mask", "position_ids")):
        model.inputs[index].get_tensor().set_names({label})
    model.outputs[0].get_tensor().set_names({"logits"})
    state = [1, source.kv_heads, -1, source.head_dim]
    model.reshape({index: state if index > 2 else [1, -1] for index in range(len(model.inputs))})
    apply_make_stateful_transformation(model, names)
    settings: dict[str, Any] = {"group_size": group_of(source)} if name == "int4" else {}
    model = nncf.compress_weights(model, mode=getattr(nncf.CompressWeightsMode, FORMATS[name]), **settings)
    ov.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
    return 0


def traced(folder: Path) -> Any:
    """Returns OpenVINO's model of a Llama. Inputs: ids [1, T], attention mask [1, P + T], positions [1, T], keys and
    values [1, heads, P, d] of each layer. Outputs: logits [1, T, V], keys and values with those of the new tokens."""
    import openvino as ov
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
    ).eval()
    config, frequencies = model.config, model.model.rotary_emb.inv_freq.clone()
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width = model.model.layers[0].self_attn.head_dim

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        scaled: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * norm.weight
        return scaled

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return (x * cos) + (torch.cat((-second, first), -1) * sin)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(-1, -1, heads // shared, -1, -1).reshape(1, heads, -1, width)

    class Stateless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, positions: Any, *past: Any) -> tuple[torch.Tensor, ...]:
            count, caches = ids.shape[1], []
            x = model.model.embed_tokens(ids)
            # As transformers writes it: OpenVINO finds this pattern and computes its angles in fp32 where all else is
            # bf16, in which positions above 256 are rounded.
            rows = frequencies[None, :, None].float().expand(positions.shape[0], -1, 1)
            angles = (rows.float() @ positions[:, None, :].float()).transpose(1, 2)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
            columns = torch.arange(mask.shape[1])
            hidden = torch.where(columns[None, None, None, :] <= positions[:, None, :, None], 0.0, hiding("float16"))
            for index, layer in enumerate(model.model.layers):
                attention, mlp = layer.self_attn, layer.mlp
                h = normed(x, layer.input_layernorm)
                q = turned(attention.q_proj(h).view(1, count, heads, width).transpose(1, 2), cos, sin)
                k = turned(attention.k_proj(h).view(1, count, shared, width).transpose(1, 2), cos, sin)
                v = attention.v_proj(h).view(1, count, shared, width).transpose(1, 2)
                k, v = torch.cat((past[2 * index], k), 2), torch.cat((past[2 * index + 1], v), 2)
                caches += [k, v]
                o = functional.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=hidden)
                x = x + attention.o_proj(o.transpose(1, 2).reshape(1, count, heads * width))
                h = normed(x, layer.post_attention_layernorm)
                x = x + mlp.down_proj(functional.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
            return (model.lm_head(normed(x, model.model.norm)), *caches)

    past = [torch.zeros(1, shared, 3, width) for _ in range(2 * config.num_hidden_layers)]
    example = (torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 5, dtype=torch.long), torch.tensor([[3, 4]]), *past)
    with torch.no_grad():
        return ov.convert_model(Stateless().eval(), example_input=example)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
