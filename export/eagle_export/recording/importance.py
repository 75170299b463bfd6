"""How much errors of a target's layers change what it predicts: squares of gradients, measured once for all layers.

For small changes D of a weight [K, N] the KL of a text's predictions is half the mean of <G, D>² over tokens that are
drawn from the predictions themselves, where G is the gradient of the sum of their log-probabilities (the Fisher
information). An error that is independent of G, with a mean square d_n in column n, so adds

    sum over n of d_n * |G_n|² / 2 nats to the text,        |G_n|² = g_n.T @ (x @ x.T) @ g_n

with x [T, K] what the layer reads and g [T, N] the gradient of what it writes. A text takes one forward pass and DRAWS
backward passes, which compute no gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_export.base.parted import Array
from eagle_export.recording.layered import batches

SEED, DRAWS = 0, 2  # of the tokens that are drawn for each row
TOKENS = 256  # of texts that are read at once


def column_importance(
    model: Any,
    layers: Sequence[tuple[str, Any]],
    windows: Sequence[Sequence[int]],
    report: Callable[[int], None] = lambda text: None,
) -> Mapping[str, Array]:
    """Returns weight name -> importance [N], in nats per token: the KL that a layer adds is the sum over its columns of
    importance times the mean square error of what the column writes, over the sum of squares of its weights.

    layers: names and torch.nn.Linear of the model, a transformers one. windows: texts. report: called with how many
    have been read."""
    squares = {name: torch.zeros(layer.out_features) for name, layer in layers}
    inputs = dict.fromkeys(squares, 0.0)  # sums of squares
    generator = torch.Generator().manual_seed(SEED)

    def add(name: str, products: Tensor, slope: Tensor) -> None:
        squares[name] += (slope * (products @ slope)).flatten(0, -2).sum(0)

    def forward(name: str, layer: torch.nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        x = args[0].detach().float()  # [B, T, K]
        inputs[name] += float(x.square().sum())
        out.register_hook(partial(add, name, x @ x.mT))  # type: ignore[no-untyped-call]

    with torch.enable_grad(), _only_activations(model), ExitStack() as hooks:
        for name, layer in layers:
            hooks.enter_context(layer.register_forward_hook(partial(forward, name)))
        for texts in batches([len(window) for window in windows], TOKENS):
            report(texts.start)
            ids = torch.tensor([list(windows[text]) for text in texts])
            logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
            scores = logits.log_softmax(-1)
            for draw in range(DRAWS):
                drawn = torch.multinomial(scores.detach().exp(), 1, generator=generator)
                scores.gather(1, drawn).sum().backward(retain_graph=draw + 1 < DRAWS)
    return {
        name: (squares[name] * torch.linalg.vector_norm(layer.weight.detach().float(), dim=1).square()).numpy()
        * np.float32(0.5 / (DRAWS * max(inputs[name], 1e-20)))
        for name, layer in layers
    }


@contextmanager
def _only_activations(model: Any) -> Iterator[None]:
    """Gradients of what layers write, and of no weights."""
    needed = [each for each in model.parameters() if each.requires_grad]
    for each in needed:
        each.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        yield
    finally:
        hook.remove()
        for each in needed:
            each.requires_grad_()
