"""Runs a target that does not fit into the memory: transformers' own code, with the weights of one layer at a time.

The model is built without weights. Its forward pass runs once per batch with layers that only note what they are called
with: masks, positions and rotations depend on no weight. Then each layer in turn gets its weights, reads all texts and
loses them again. Texts of one length that follow each other are a batch: each batch reads a layer's weights from the
memory, which takes as long as the products of some hundred tokens.

Shapes: B texts of T tokens, H hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.base.quiet import quiet
from eagle_export.graphs.trace import real_tables
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.fused_experts import fused_experts, is_biased, read_fused
from eagle_export.reading.families.registry import family_of, read_config
from eagle_export.reading.families.source import attention_of

LM_HEAD_ROWS = 1 << 13  # of the LM head that are read at a time
TOGETHER = 1024  # tokens of a batch: more make no product faster


def batches(lengths: Sequence[int], most: int = TOGETHER) -> list[range]:
    """Returns the texts of each batch. lengths: tokens of each text. most: tokens of a batch of several texts."""
    found: list[range] = []
    for text, length in enumerate(lengths):
        last = found[-1] if found else range(0)
        if last and lengths[last[0]] == length and (len(last) + 1) * length <= most:
            found[-1] = range(last[0], text + 1)
        else:
            found.append(range(text, text + 1))
    return found


def layer_numbers(checkpoint: Checkpoint) -> int:
    """Numbers in the weights of one decoder layer, the first."""
    return sum(math.prod(each.shape) for name, each in checkpoint.tensors.items() if ".layers.0." in name)


class LayeredModel:
    """A checkpoint's model in fp32, its family, and some texts of token ids. hidden: of each text what the next layer
    reads, [1, T, H]. next: the number of the next layer."""

    def __init__(self, checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> None:
        self._checkpoint = checkpoint
        self.family = family_of(checkpoint)
        self._stored = {self.family.parameter(name): each for name, each in checkpoint.tensors.items()}
        config = read_config(self.family, checkpoint)
        with torch.device("meta"), quiet("transformers"):
            model = self.family.model_class()._from_config(
                config, attn_implementation=attention_of(checkpoint), dtype=torch.float32
            )
        model.eval()
        real_tables(model)
        self.config, self._model = model.config, model.model
        self.layers: Sequence[nn.Module] = self._model.layers  # without weights
        self._norm: nn.Module = getattr(self._model, self.family.last_norm)
        self._load(self._norm, f"model.{self.family.last_norm}.")
        self.hidden: list[Tensor] = []
        self.next = 0
        self._batches = batches([len(text) for text in texts])
        self._calls: list[list[tuple[Any, Any]]] = []  # of each batch its layers' arguments but for the first
        self._note_calls(texts)

    @torch.inference_mode()
    def run_layer(self) -> Iterator[int]:
        """Loads the next layer, reads every text and frees it. Yields before each batch how many texts are read."""
        layer = self.layers[self.next]
        self._load(layer, f"model.layers.{self.next}.")
        for texts, calls in zip(self._batches, self._calls, strict=True):
            yield texts.start
            arguments, named = calls[self.next]
            hidden = layer(torch.cat(self.hidden[texts.start : texts.stop]), *arguments, **named)
            self.hidden[texts.start : texts.stop] = hidden.split(1)
        layer.to("meta")
        self.next += 1

    @torch.inference_mode()
    def last_hidden(self, text: int) -> Tensor:
        """Returns [1, T, H] after the last norm, which the LM head reads."""
        normed: Tensor = self._norm(self.hidden[text])
        return normed

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """rows: [R, H] after the last norm. Returns [R, V]."""
        weight = self._checkpoint.lm_head
        bounds = range(0, weight.shape[0], LM_HEAD_ROWS)
        parts = [rows @ weight.rows(start, min(start + LM_HEAD_ROWS, weight.shape[0])).float().T for start in bounds]
        return self.family.logits(self.config, torch.cat(parts, -1))

    def _load(self, module: nn.Module, prefix: str) -> None:
        weights: dict[str, Tensor] = {}
        for name, experts in fused_experts(module):
            weights |= read_fused(self._stored, prefix + name, len(experts.down_proj), is_biased(experts))
        kept = [name for name, _ in module.named_buffers() if prefix + name in self._stored]
        for name in [*kept, *(name for name, _ in module.named_parameters())]:
            if prefix + name not in weights:
                weights[prefix + name] = self._stored[prefix + name].read().float()
        module.load_state_dict({name.removeprefix(prefix): each for name, each in weights.items()}, assign=True)

    @torch.inference_mode()
    def _note_calls(self, texts: Sequence[Sequence[int]]) -> None:
        """Reads each batch with tables of its tokens alone, and with layers that only note their arguments."""
        ids = sorted({token for text in texts for token in text})
        place = {token: number for number, token in enumerate(ids)}
        before = {f"model.{name}": part for name, part in self._model.named_children()}  # the first layer
        del before["model.layers"], before[f"model.{self.family.last_norm}"]
        for name, part in before.items():
            if isinstance(part, nn.Embedding):
                part.weight = nn.Parameter(self._stored[f"{name}.weight"].read()[ids].float(), requires_grad=False)
                part.padding_idx = None
            else:
                self._load(part, f"{name}.")
        calls: list[tuple[Any, Any]] = []

        def note(hidden: Tensor, *arguments: Any, **named: Any) -> Tensor:
            if not calls:
                self.hidden.extend(torch.split(hidden, 1))
            calls.append((arguments, named))
            return hidden

        for layer in self.layers:
            layer.forward = note
        for batch in self._batches:
            calls = []
            rows = [[place[token] for token in texts[text]] for text in batch]
            self._model(input_ids=torch.tensor(rows), use_cache=False)
            self._calls.append(calls)
        for layer in self.layers:
            del layer.forward
        for part in before.values():
            part.to("meta")
