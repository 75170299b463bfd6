"""Records the inputs of the linear layers of a target and its head without a calibration folder: the checkpoint runs in
transformers on text of a file or, without one, on text that it generates itself.

Text of the model's own has the inputs that it sees in use, whatever it was trained on. It is sampled at temperature 1
after a few tokens of the package's text, as LLM-QAT does (arXiv 2305.17888); what layers read meanwhile is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from eagle_calib.calibration import LEAST_ROWS, Observed, is_expert
from eagle_calib.errors import CalibrationError
from eagle_calib.observe import InputStatistics
from eagle_calib.texts import read_windows
from eagle_export.base.errors import ExportError
from eagle_export.base.parted import Array
from eagle_export.graphs.eager import (
    Hidden,
    eager_head,
    eager_weights,
    features_of,
    read_block_rows,
    read_rows,
)
from eagle_export.graphs.head_modules import AnyHead
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.families.fused_experts import expert_inputs, fused_experts
from eagle_export.reading.families.source import load_source
from eagle_export.recording.continuations import first_line
from eagle_export.recording.source_text import SEED, continued, text_starts
from eagle_runtime.base.tree import Float
from eagle_runtime.text.tokenizer import Text

SEQUENCES, START, LENGTH = 24, 8, 96  # generated texts, tokens that each starts with, and tokens in all
KEPT = SEQUENCES * LENGTH  # rows of a layer's inputs that are kept: more lower an int4 target's KL, and take memory
WINDOW, MAX_TOKENS = 256, 8192  # of a file: tokens per window, and in all
BETWEEN_ROOTS = 4  # tokens of a text from one block of a head to the next
PROBES = 2  # texts of which the logits are kept


@dataclass(frozen=True, slots=True)
class Probe:
    """A text and the source's logits [R, V] of its last R rows."""

    tokens: list[int]
    logits: Float


@dataclass(frozen=True, slots=True)
class Recorded:
    """inputs: weight name -> inputs of its layer, of every linear layer of the target and of its head; layers that read
    one tensor share an object.
    probes: some of the texts that were read."""

    inputs: Mapping[str, Observed]
    probes: tuple[Probe, ...]


def observe_source(
    source: Path | Checkpoint,
    text: Text,
    data: Path | None,
    head: HeadPart | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> Recorded:
    """Returns what a checkpoint (load_source's argument) computes for a text.

    text: its tokenizer. data: a text file, or JSONL as eagle-calib reads it; None for text of the model's own. head: of
    the model; its inputs are recorded too. report: called with what is being done. Raises CalibrationError for a file
    without text, and ExportError if transformers cannot run the checkpoint."""
    transformers_logging.disable_progress_bar()
    try:
        model = load_source(source)
        vocab = int(model.config.vocab_size)
        longest = int(model.config.max_position_embeddings)
        if data is None:
            starts = text_starts(text, vocab, SEQUENCES, START, 2 * START, MAX_TOKENS)
            windows, observed = _own_text(model, starts, min(LENGTH, longest), head, report)
        else:
            windows = read_windows(data, text, vocab, min(WINDOW, longest), MAX_TOKENS)
            observed = _observed(model, windows, head, report)
        return Recorded(observed, tuple(_probe(model, window) for window in windows[:PROBES]))
    except (ExportError, CalibrationError):
        raise
    except Exception as error:  # transformers, safetensors and a full memory raise many kinds
        folder = source if isinstance(source, Path) else source.folder
        raise ExportError(f"transformers does not run {folder} ({first_line(error)})") from None
    finally:
        transformers_logging.enable_progress_bar()


@torch.inference_mode()
def _own_text(
    model: Any,
    starts: Sequence[list[int]],
    length: int,
    head: HeadPart | None,
    report: Callable[[str], None],
) -> tuple[list[list[int]], dict[str, Observed]]:
    """Continues all starts, which have one length, to `length` tokens, sampled at temperature 1. End-of-sequence tokens
    are sampled like others, and a text goes on after one. Returns the texts, and the inputs that were recorded while
    they were written."""
    random, taps = torch.Generator().manual_seed(SEED), set[int]()
    if head is not None:
        taps = {-1, *head.config.taps}

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.float().softmax(-1), 1, generator=random)

    inputs, tokens, tapped = LayerInputs.of(model), list[Tensor](), {tap: list[Tensor]() for tap in taps}
    count, with_hidden = max(0, length - len(starts[0])), head is not None
    for read in continued(model, starts, count, sample, with_hidden=with_hidden, logits_to_keep=0):
        tokens.append(read.tokens)
        for tap, kept in tapped.items():
            kept.append(read.hidden[tap])
        report(f"generating text to calibrate on ({sum(each.shape[1] for each in tokens)} of {length} tokens)")
    texts, hidden = torch.cat(tokens, 1), {tap: torch.cat(kept, 1) for tap, kept in tapped.items()}
    read_by_head = (
        (text, {tap: each[row : row + 1] for tap, each in hidden.items()}) for row, text in enumerate(texts)
    )
    order = _text_by_text([each.shape[1] for each in tokens], len(texts))
    return texts.tolist(), _all_inputs(model, inputs, head, read_by_head, order)


def _text_by_text(passes: Sequence[int], texts: int) -> Array:
    """Returns where the rows of the first text are, then those of the second one, ..., among rows that were read pass
    by pass. passes: rows of each text in each of them."""
    starts = np.cumsum([0, *(texts * rows for rows in passes)])
    places = [start + np.arange(texts * rows).reshape(texts, rows) for start, rows in zip(starts, passes, strict=False)]
    order: Array = np.concatenate(places, 1).ravel()
    return order


@torch.inference_mode()
def _probe(model: Any, tokens: list[int]) -> Probe:
    rows = max(1, len(tokens) - START)
    return Probe(tokens, model(input_ids=torch.tensor([tokens]), logits_to_keep=rows).logits[0].float().numpy())


class LayerInputs:
    """Statistics of what layers of a torch module read while it runs. Layers that read one tensor share them."""

    @classmethod
    def of(cls, module: torch.nn.Module, prefix: str = "") -> LayerInputs:
        """Records all linear layers of a module, those of experts included. prefix: of the module's name."""
        return cls(
            ((prefix + name, layer) for name, layer in linears(module)),
            ((prefix + name, experts) for name, experts in fused_experts(module)),
        )

    def __init__(
        self,
        layers: Iterable[tuple[str, torch.nn.Module]],
        mixtures: Iterable[tuple[str, torch.nn.Module]] = (),
    ) -> None:
        """layers: weight name and layer. mixtures: name and module of `fused_experts`."""
        self._statistics: dict[str, InputStatistics] = {}
        self._same_input: dict[str, str] = {}  # layer -> the layer before it that reads the same tensor
        self._last: tuple[Any, str] = (None, "")  # the tensor that a layer read last, and that layer
        self._hooks = [layer.register_forward_pre_hook(partial(self._record, name)) for name, layer in layers]
        self._hooks += [part.register_forward_pre_hook(partial(self._record_experts, name)) for name, part in mixtures]

    def _record(self, name: str, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args[0] is self._last[0]:
            self._same_input[name] = self._last[1]
            return
        self._last = args[0], name
        self.add(name, args[0])

    def _record_experts(self, name: str, experts: torch.nn.Module, args: tuple[Any, ...]) -> None:
        hidden, chosen, *_ = args
        for number, rows, products in expert_inputs(experts, hidden, chosen):
            expert = f"{name}.{number}"
            self.add(f"{expert}.gate_proj.weight", rows)
            self._same_input[f"{expert}.up_proj.weight"] = f"{expert}.gate_proj.weight"
            self.add(f"{expert}.down_proj.weight", products)

    def add(self, name: str, x: Tensor) -> None:
        """Adds rows x [..., K] that the layer of weight `name` reads."""
        rows = x.reshape(-1, x.shape[-1]).float().numpy()
        self._statistics.setdefault(name, InputStatistics(f"the input of {name}", x.shape[-1], KEPT, half=True)).add(
            rows
        )

    def observed(self, order: Array | None = None) -> dict[str, Observed]:
        """Ends the recording and returns weight name -> inputs, without experts of fewer than LEAST_ROWS rows. order:
        of the rows of layers that read every row."""
        for hook in self._hooks:
            hook.remove()
        observed = {}
        while self._statistics:  # each is freed when it is copied: those of all layers may take gigabytes
            name, one = self._statistics.popitem()
            if one.rows >= LEAST_ROWS or not is_expert(name):
                seen = one.observed()
                every = order is not None and seen.rows == len(order) == len(seen.sample)
                observed[name] = replace(seen, sample=seen.sample[order]) if every else seen
        return observed | {name: observed[other] for name, other in self._same_input.items() if other in observed}


class HeadInputs(LayerInputs):
    """What the layers of a head read over a text: with the target's features, and with its own hidden states in their
    place, as on the second level of a tree. Medusa's and Hydra's heads read the target's features alone."""

    def __init__(self, part: HeadPart, head: AnyHead) -> None:
        """head: as eager_head returns it."""
        self._config, self._head = part.config, head
        borrowed = LM_HEAD if part.config.borrows_lm_head else None  # has the target's name, and its inputs there
        super().__init__((f"head.{name}", layer) for name, layer in linears(self._head) if name != borrowed)

    def read(self, tokens: Tensor, hidden: Any) -> None:
        """tokens [T]; hidden: the target's hidden states for them, as `features_of` takes them."""
        if isinstance(self._head, BlockHead):
            roots = torch.arange(1, len(tokens), BETWEEN_ROOTS)
            read_block_rows(self._head, self._config, tokens, hidden, roots)
            return
        own = features_of(self._head, self._config.taps, hidden)
        if isinstance(self._head, HeadsAhead):
            for depth in range(min(len(self._head.heads), len(tokens) - 1)):
                self._head.forced(depth, own, tokens[None])
            return
        for first in range(1, min(3, len(tokens))):  # the rows' tokens are those after their features
            own = read_rows(self._head, self._config, tokens[first:], own[:, : len(tokens) - first])
            self._head.logits(own)


@torch.inference_mode()
def _observed(
    model: Any, windows: Sequence[Sequence[int]], head: HeadPart | None, report: Callable[[str], None]
) -> dict[str, Observed]:
    """Reads every window as a prompt."""
    inputs = LayerInputs.of(model)

    def read() -> Iterator[tuple[Tensor, Hidden]]:
        for number, window in enumerate(windows):
            report(f"recording inputs ({number} of {len(windows)} texts)")
            tokens = torch.tensor(list(window))
            out = model(input_ids=tokens[None], use_cache=False, output_hidden_states=head is not None)
            yield tokens, out.hidden_states or ()

    return _all_inputs(model, inputs, head, read())


def _all_inputs(
    model: Any,
    inputs: LayerInputs,
    head: HeadPart | None,
    texts: Iterable[tuple[Tensor, Hidden]],
    order: Array | None = None,
) -> dict[str, Observed]:
    """Returns the inputs of a target's layers and of its head's. texts: each with the target's hidden states, for the
    head. order: as for LayerInputs.observed."""
    head_inputs = None if head is None else HeadInputs(head, eager_head(head.config, eager_weights(head, model)))
    for tokens, hidden in texts:
        if head_inputs is not None:
            head_inputs.read(tokens, hidden)
    observed = inputs.observed(order)
    if model.config.tie_word_embeddings:
        observed[EMBEDDING] = observed[LM_HEAD]
    return observed if head_inputs is None else observed | head_inputs.observed()


def linears(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields weight name and layer of each linear layer."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            yield f"{name}.weight", layer
