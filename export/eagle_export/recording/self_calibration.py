"""Records the inputs of the linear layers of a target and its head without a calibration folder: the checkpoint runs in
transformers on text of a file or, without one, on text that it generates itself.

Text of the model's own has the inputs that it sees in use, whatever it was trained on. It is sampled at temperature 1
after a few tokens of the package's text, as LLM-QAT does (arXiv 2305.17888); what layers read meanwhile is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_calib.calibration import LEAST_ROWS, Observed, is_expert
from eagle_calib.observe import InputStatistics, SampleFile
from eagle_calib.texts import read_windows
from eagle_export.base.parted import Array
from eagle_export.graphs.eager import Hidden, eager_head, eager_weights, features_of, read_block_rows, read_rows
from eagle_export.graphs.head_modules import AnyHead
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.families.fused_experts import expert_inputs, fused_experts
from eagle_export.reading.families.registry import family_of
from eagle_export.reading.families.target import open_target
from eagle_export.recording.continuations import run_errors
from eagle_export.recording.importance import column_importance
from eagle_export.recording.packed import load_packed
from eagle_export.recording.source_text import Asked, Writer, Written, text_starts
from eagle_runtime.text.tokenizer import Text

SEQUENCES, START, LENGTH = 44, 8, 56  # generated texts, tokens that each starts with, and tokens in all
KEPT = SEQUENCES * LENGTH  # rows of a layer's inputs that are kept: more lower an int4 target's KL, and take memory
WINDOW, MAX_TOKENS = 256, 8192  # of a file: tokens per window, and in all
TEXTS = 4  # that a head reads at once: more take memory for their logits
BETWEEN_ROOTS = 4  # tokens of a text from one block of a head to the next


@dataclass(frozen=True, slots=True)
class Recorded:
    """inputs: weight name -> inputs of its layer, of every linear layer of the target and of its head; layers that read
    one tensor share an object. importance: weight name -> [N], of the target's layers (importance.py), if that was
    measured."""

    inputs: Listed
    importance: Mapping[str, Array] = field(default_factory=dict)

    def digest(self, chosen: object) -> str:
        """Returns a hash of the inputs, by those of the last layer, and of what was chosen by them."""
        last = self.inputs[LM_HEAD]
        return sha256(last.channel_absmax.tobytes() + last.sample.tobytes() + repr(chosen).encode()).hexdigest()


def observe_source(
    source: Path | Checkpoint,
    text: Text,
    data: Path | None,
    head: HeadPart | None = None,
    report: Callable[[str], None] = lambda step: None,
    asked: Asked | None = None,
    file: SampleFile | None = None,
    *,
    weighed: int = 0,
    share: Collection[int] = range(SEQUENCES),
    model: Any = None,
) -> Recorded:
    """Returns what a checkpoint (load_source's argument) computes for a text.

    text: its tokenizer. data: a text file, or JSONL as eagle-calib reads it; None for text of the model's own. head: of
    the model; its inputs are recorded too. report: called with what is being done. asked: other texts that the model
    writes meanwhile. file: where the inputs are kept; None for the memory. weighed: on about how many tokens of these
    texts the importance of columns is measured, 0 for none. share: which of SEQUENCES texts of its own it writes.
    model: the checkpoint, if it is loaded. Raises CalibrationError for a file without text, and ExportError if
    transformers cannot run the checkpoint."""
    with run_errors(source):
        checkpoint = open_target(source) if isinstance(source, Path) else source
        model, without = load_packed(checkpoint) if model is None else model, family_of(checkpoint).scorers
        vocab = int(model.config.vocab_size)
        longest = int(model.config.max_position_embeddings)
        if data is None:
            starts = text_starts(text, vocab, SEQUENCES, START, 2 * START, MAX_TOKENS)
            starts = [starts[number] for number in share]
            windows, observed, written = _own_text(
                model, without, starts, min(LENGTH, longest), head, report, asked, file
            )
        else:
            windows, written = read_windows(data, text, vocab, min(WINDOW, longest), MAX_TOKENS), []
            observed = _observed(model, without, windows, head, report, file)
            if asked is not None:
                written = Writer(model).write([], 0, (), asked.texts, asked.taps)[1]
        if asked is not None:
            asked.look(model, written)
        return Recorded(observed, _importance(model, without, windows, weighed, report) if weighed else {})


@torch.inference_mode()
def _own_text(
    model: Any,
    without: tuple[str, ...],
    starts: Sequence[list[int]],
    length: int,
    head: HeadPart | None,
    report: Callable[[str], None],
    asked: Asked | None,
    file: SampleFile | None,
) -> tuple[list[list[int]], Listed, list[Written]]:
    """Continues all starts, which have one length, to `length` tokens, sampled at temperature 1. End-of-sequence tokens
    are sampled like others, and a text goes on after one. Returns the texts, the inputs that were recorded while they
    were written, and what was asked for besides."""
    taps = set[int]() if head is None else {-1, *head.config.taps}
    inputs = LayerInputs(model, without=(*without, LM_HEAD), file=file)  # which is run for the last row of a pass alone

    def show(done: int, total: int) -> None:
        report(f"generating text to calibrate on ({done} of {total} tokens)")

    writer = Writer(model, show, inputs.count, lambda hidden: inputs.add(LM_HEAD, hidden))
    more, more_taps = ([], ()) if asked is None else (asked.texts, asked.taps)
    sampled, written = writer.write(starts, length, taps, more, more_taps)
    texts = sampled.tokens
    read_by_head = (
        (texts[row : row + TEXTS], {tap: each[row : row + TEXTS] for tap, each in sampled.hidden.items()})
        for row in range(0, len(texts), TEXTS)
    )
    order = _text_by_text(sampled.passes, len(texts))
    return texts.tolist(), _all_inputs(model, inputs, head, read_by_head, order), written


def _text_by_text(passes: Sequence[int], texts: int) -> Array:
    """Returns where the rows of the first text are, then those of the second one, ..., among rows that were read pass
    by pass. passes: rows of each text in each of them."""
    starts = np.cumsum([0, *(texts * rows for rows in passes)])
    places = [start + np.arange(texts * rows).reshape(texts, rows) for start, rows in zip(starts, passes, strict=False)]
    order: Array = np.concatenate(places, 1).ravel()
    return order


def _importance(
    model: Any, without: tuple[str, ...], windows: Sequence[list[int]], most: int, report: Callable[[str], None]
) -> Mapping[str, Array]:
    """Of the columns of all layers, on so many tokens of the windows, or one of these."""
    count = max(1, most // max(map(len, windows)))

    def show(number: int) -> None:
        report(f"measuring layers ({number} of {min(count, len(windows))} texts)")

    found = dict(column_importance(model, list(linears(model, without)), windows[:count], show))
    if model.config.tie_word_embeddings and LM_HEAD in found:
        found[EMBEDDING] = found[LM_HEAD]
    return found


class LayerInputs:
    """Statistics of what the linear layers of a torch module read while it runs, those of experts included. Layers that
    read one tensor share them."""

    def __init__(
        self,
        module: torch.nn.Module,
        prefix: str = "",
        without: tuple[str, ...] = (),
        file: SampleFile | None = None,
    ) -> None:
        """prefix: of the module's name. without: what names of weights end with whose layers are not recorded. file:
        where rows are kept, None for the memory."""
        self.file = file
        self._statistics: dict[str, InputStatistics] = {}
        self._same_input: dict[str, str] = {}  # layer -> the layer before it that reads the same tensor
        self._last: tuple[Any, str] = (None, "")  # the tensor that a layer read last, and that layer
        self._counted = (1, 1)
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._record, prefix + name))
            for name, layer in linears(module, without)
        ]
        for name, part in fused_experts(module):
            self._hooks.append(part.register_forward_pre_hook(partial(self._record_experts, prefix + name)))

    def count(self, texts: int, batch: int) -> None:
        """Records the first `texts` of the `batch` texts of each pass from now on."""
        self._counted = texts, batch

    def _first(self, rows: Tensor) -> Tensor:
        """The rows of the texts that are recorded, of rows [B, ...] or [B * T, ...]."""
        texts, batch = self._counted
        return rows[: len(rows) * texts // batch]

    def _record(self, name: str, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args[0] is self._last[0]:
            self._same_input[name] = self._last[1]
            return
        self._last = args[0], name
        self.add(name, self._first(args[0]))

    def _record_experts(self, name: str, experts: torch.nn.Module, args: tuple[Any, ...]) -> None:
        hidden, chosen = (self._first(each) for each in args[:2])
        for number, rows, products in expert_inputs(experts, hidden, chosen):
            expert = f"{name}.{number}"
            self.add(f"{expert}.gate_proj.weight", rows)
            self._same_input[f"{expert}.up_proj.weight"] = f"{expert}.gate_proj.weight"
            self.add(f"{expert}.down_proj.weight", products)

    def add(self, name: str, x: Tensor) -> None:
        """Adds rows x [..., K] that the layer of weight `name` reads."""
        if not x.numel():
            return
        if name not in self._statistics:
            self._statistics[name] = InputStatistics(
                f"the input of {name}", x.shape[-1], KEPT, half=True, file=self.file
            )
        self._statistics[name].add(x.reshape(-1, x.shape[-1]).float().numpy())

    def observed(self, order: Array | None = None) -> Listed:
        """Ends the recording and returns weight name -> inputs, without experts of fewer than LEAST_ROWS rows. order:
        of the rows of layers that read every row."""
        for hook in self._hooks:
            hook.remove()
        kept = {name: one for name, one in self._statistics.items() if one.rows >= LEAST_ROWS or not is_expert(name)}
        names = {name: name for name in kept}
        names |= {name: other for name, other in self._same_input.items() if other in kept}
        if self.file is not None:
            for one in kept.values():
                one.check()
            return Listed(names, lambda name: _ordered(kept[name].observed(), order))
        self._statistics.clear()
        observed = {}
        while kept:  # each is freed when it is copied: those of all layers may take gigabytes
            name, one = kept.popitem()
            observed[name] = _ordered(one.observed(), order)
        return Listed(names, observed.__getitem__)


def _ordered(seen: Observed, order: Array | None) -> Observed:
    every = order is not None and seen.rows == len(order) == len(seen.sample)
    return replace(seen, sample=seen.sample[order]) if every else seen


@dataclass(frozen=True, slots=True)
class Listed(Mapping[str, Observed]):
    """Inputs that are read when they are asked for. names: of weights -> what `read` is called with, which is the same
    for layers that read one tensor."""

    names: Mapping[str, Any]
    read: Callable[[Any], Observed]

    def __getitem__(self, name: str) -> Observed:
        return self.read(self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class HeadInputs(LayerInputs):
    """What the layers of a head read over a text: with the target's features, and with its own hidden states in their
    place, as on the second level of a tree. Medusa's and Hydra's heads read the target's features alone."""

    def __init__(self, part: HeadPart, head: AnyHead, file: SampleFile | None = None) -> None:
        """head: as eager_head returns it. file: as for LayerInputs."""
        self._config, self._head = part.config, head
        borrowed = (LM_HEAD,) if part.config.borrows_lm_head else ()  # has the target's name, and its inputs there
        super().__init__(head, "head.", borrowed, file)

    def read(self, tokens: Tensor, hidden: Any) -> None:
        """tokens [B, T]; hidden: the target's hidden states for them, as `features_of` takes them."""
        count, length = tokens.shape
        if isinstance(self._head, BlockHead):
            roots = torch.arange(1, length, BETWEEN_ROOTS)
            for row in range(count):
                one = {tap: hidden[tap][row : row + 1] for tap in {-1, *self._config.taps}}
                read_block_rows(self._head, self._config, tokens[row], one, roots)
            return
        own = features_of(self._head, self._config.taps, hidden)
        if isinstance(self._head, HeadsAhead):
            for depth in range(min(len(self._head.heads), length - 1)):
                self._head.forced(depth, own, tokens)
            return
        for first in range(1, min(3, length)):  # the rows' tokens are those after their features
            own = read_rows(self._head, self._config, tokens[:, first:], own[:, : length - first])
            if not self._config.borrows_lm_head:
                self._head.logits(own)


@torch.inference_mode()
def _observed(
    model: Any,
    without: tuple[str, ...],
    windows: Sequence[Sequence[int]],
    head: HeadPart | None,
    report: Callable[[str], None],
    file: SampleFile | None,
) -> Listed:
    """Reads every window as a prompt. file: as for LayerInputs."""
    inputs = LayerInputs(model, without=without, file=file)

    def read() -> Iterator[tuple[Tensor, Hidden]]:
        for number, window in enumerate(windows):
            report(f"recording inputs ({number} of {len(windows)} texts)")
            tokens = torch.tensor(list(window))
            out = model(input_ids=tokens[None], use_cache=False, output_hidden_states=head is not None)
            yield tokens[None], out.hidden_states or ()

    return _all_inputs(model, inputs, head, read())


def _all_inputs(
    model: Any,
    inputs: LayerInputs,
    head: HeadPart | None,
    texts: Iterable[tuple[Tensor, Hidden]],
    order: Array | None = None,
) -> Listed:
    """Returns the inputs of a target's layers and of its head's. texts: some of one length [B, T], with the target's
    hidden states for the head. order: as for LayerInputs.observed."""
    file = inputs.file
    head_inputs = None if head is None else HeadInputs(head, eager_head(head.config, eager_weights(head, model)), file)
    for tokens, hidden in texts:
        if head_inputs is not None:
            head_inputs.read(tokens, hidden)
    parts = [inputs.observed(order), *([] if head_inputs is None else [head_inputs.observed()])]
    names = {name: (part.read, key) for part in parts for name, key in part.names.items()}
    if model.config.tie_word_embeddings:
        names[EMBEDDING] = names[LM_HEAD]
    return Listed(names, lambda place: place[0](place[1]))


def linears(module: torch.nn.Module, without: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields weight name and layer of each linear layer but those whose name ends as one in `without`."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and not f".{name}.weight".endswith(without):
            yield f"{name}.weight", layer
