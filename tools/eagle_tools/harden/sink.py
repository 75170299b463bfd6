"""A planted sink: massive activations at the beginning-of-text token, as real models have them (arXiv 2402.17762).

The first token sees only itself, so all its states are constants of the model. The planted token is the one that begins
every text, and three channels that no other token uses carry it through the model:

    mark      The token's embedding is 1/2 of its own length in the mark, which the others' is 0 in.
    write     In an early layer one MLP unit, which reads the mark alone, has a product silu(gate) * up of half
              the massive value. down_proj writes it to two channels: the value, and minus a third of it.
    carry     Both stay in the residual stream. After each norm they are all that is left of the token, so its keys,
              values and MLP inputs become what the matrices read from these channels: their columns there are set to
              what gives the original keys, values and inputs.
    remove    In the last layer one unit, which reads the massive channel, takes all three off again.

The columns compensate exactly for this one token, and every other token has 0 in these channels. A second such token in
the middle of a text would lose its own states, which depend on its context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from eagle_export.reading.checkpoint import EMBEDDING
from eagle_tools.harden.channels import per_query
from eagle_tools.harden.strength import Strength
from eagle_tools.harden.weights import Attention, Reader, Tensors, Weights, columns, layers, norm_readers
from eagle_tools.harden.width import Width

MARK = 0.5  # length of the mark relative to the token's embedding
SECOND = -1 / 3  # the second massive channel relative to the first
DOWN = 2.0  # weight with which down_proj writes the massive value


@dataclass(frozen=True, slots=True)
class Token:
    """The planted token, the epsilon of the target's norms, and the early layer whose MLP writes the massive value."""

    id: int
    epsilon: float
    layer: int


def writing_layer(num_layers: int) -> int:
    """Returns the layer that writes the massive value: after a sixteenth of the depth, as in Llama-2-7B's second of 32,
    but never the first."""
    return max(1, num_layers // 16)


def plant_sink(
    weights: Weights, width: Width, token: Token, taps: tuple[int, ...], strength: Strength, rng: torch.Generator
) -> None:
    """Plants the sink in a widened pair. taps: what an EAGLE-3 head's fc reads, as indices into hidden states."""
    target = weights.target
    mark, first, second = width.free
    prefixes = layers(target)
    fill_free_columns(target, width, rng)
    stream = target[EMBEDDING][token.id].clone()  # without what is planted
    states = first_token_states(target, weights.attention["target"], stream, token.epsilon)
    massive = float(states.median()) * strength.sink
    planted = torch.zeros_like(stream)
    planted[mark] = MARK * stream.norm()
    target[EMBEDDING][token.id, mark] = planted[mark]
    channel = mark
    for index, layer in enumerate(prefixes):
        if index in taps:
            compensate_fc(weights.heads["eagle3"], taps.index(index), stream, planted, channel)
        norm = f"{layer}input_layernorm"
        compensate(target, norm, stream, planted, channel, token.epsilon)
        stream = stream + attend(
            target, layer, weights.attention["target"], normed(target, norm, stream, token.epsilon)
        )
        norm = f"{layer}post_attention_layernorm"
        compensate(target, norm, stream, planted, channel, token.epsilon)
        seen = normed(target, norm, stream + planted, token.epsilon)
        added = mlp(target, layer, normed(target, norm, stream, token.epsilon))
        if index == token.layer:
            change = torch.zeros_like(planted)
            change[first], change[second] = massive, massive * SECOND
            set_unit(target, layer, width.free_unit, seen, channel, change)
            planted, channel = planted + change, first
        elif index == len(prefixes) - 1:
            set_unit(target, layer, width.free_unit, seen, channel, -planted)
        stream = stream + added
    for tensors in weights.heads.values():
        compensate_embedding(tensors, target[EMBEDDING][token.id], mark, token.epsilon)


def fill_free_columns(target: Tensors, width: Width, rng: torch.Generator) -> None:
    """Gives the columns that read the free channels random weights, and the free unit random gate and up rows, which
    down_proj does not read. They are 0 otherwise, unlike anything in a real model."""
    for readers in norm_readers(target).values():
        for reader in readers:
            view = columns(target, reader, len(width.source))
            for channel in width.free:
                view[:, channel] = torch.randn(len(view), generator=rng, dtype=view.dtype) * view.std()


def normed(tensors: Tensors, norm: str, state: Tensor, epsilon: float) -> Tensor:
    """Returns the output [H] of a norm for one state [H]."""
    out: Tensor = state * torch.rsqrt(state.square().mean() + epsilon) * tensors[f"{norm}.weight"]
    return out


def read(tensors: Tensors, module: str, state: Tensor) -> Tensor:
    """Returns the output [out] of a linear layer for one state [in]."""
    out = tensors[f"{module}.weight"] @ state
    return out + tensors[f"{module}.bias"] if f"{module}.bias" in tensors else out


def attend(tensors: Tensors, layer: str, sizes: Attention, state: Tensor) -> Tensor:
    """Returns what attention writes for the first token, whose only key is its own."""
    values = per_query(read(tensors, f"{layer}self_attn.v_proj", state), sizes)
    return read(tensors, f"{layer}self_attn.o_proj", values)


def mlp(tensors: Tensors, layer: str, state: Tensor) -> Tensor:
    """Returns what the MLP writes for a normalised state."""
    gate, up = (read(tensors, f"{layer}mlp.{name}_proj", state) for name in ("gate", "up"))
    return read(tensors, f"{layer}mlp.down_proj", silu(gate) * up)


def first_token_states(tensors: Tensors, sizes: Attention, stream: Tensor, epsilon: float) -> Tensor:
    """Returns the magnitudes [layers, H] of the residual stream of the first token after each layer."""
    states = []
    for layer in layers(tensors):
        stream = stream + attend(tensors, layer, sizes, normed(tensors, f"{layer}input_layernorm", stream, epsilon))
        stream = stream + mlp(tensors, layer, normed(tensors, f"{layer}post_attention_layernorm", stream, epsilon))
        states.append(stream.abs())
    return torch.stack(states)


def compensate(tensors: Tensors, norm: str, stream: Tensor, planted: Tensor, channel: int, epsilon: float) -> None:
    """Sets the columns of the matrices that read a norm at `channel` so that they give for stream + planted [H] what
    they gave for stream."""
    wanted = normed(tensors, norm, stream, epsilon)
    seen = normed(tensors, norm, stream + planted, epsilon)
    for reader in norm_readers(tensors)[norm]:
        set_column(columns(tensors, reader, len(stream)), wanted, seen, channel)


def set_column(view: Tensor, wanted: Tensor, seen: Tensor, channel: int) -> None:
    """Sets one column of a matrix [out, in] so that its product with `seen` equals that with `wanted` before."""
    view[:, channel] += view @ (wanted - seen) / seen[channel]


def compensate_fc(head: Tensors, tap: int, stream: Tensor, planted: Tensor, channel: int) -> None:
    """Sets a column of EAGLE-3's fc so that a tap, which is not normalised, gives what it gave before planting."""
    set_column(columns(head, Reader("fc", tap * len(stream)), len(stream)), stream, stream + planted, channel)


def compensate_embedding(head: Tensors, embedded: Tensor, mark: int, epsilon: float) -> None:
    """Does the same for a head that drafts after the planted token, whose embedding now has a mark."""
    original = embedded.clone()
    original[mark] = 0
    if "midlayer.input_layernorm.weight" in head:
        compensate(head, "midlayer.input_layernorm", original, embedded - original, mark, epsilon)
    # EAGLE-1's fc reads the embedding without a norm, and has 0 in the mark's column.


def set_unit(tensors: Tensors, layer: str, unit: int, seen: Tensor, channel: int, change: Tensor) -> None:
    """Makes one MLP unit add `change` [H] to the state whose normalised vector is `seen` [H], and 0 to all states that
    have 0 at `channel`."""
    product = float(change.abs().max()) / DOWN
    gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    wanted = math.sqrt(product)
    gate[unit] = 0
    gate[unit, channel] = wanted / seen[channel]
    open_gate = float(silu(torch.tensor(wanted, dtype=torch.float64)))
    up[unit, channel] += (product / open_gate - up[unit] @ seen) / seen[channel]
    for name in ("gate", "up"):
        if f"{layer}mlp.{name}_proj.bias" in tensors:
            tensors[f"{layer}mlp.{name}_proj.bias"][unit] = 0
    down[:, unit] = change / product
