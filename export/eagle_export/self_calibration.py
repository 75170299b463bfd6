"""Records the inputs of a target's linear layers without a calibration folder: the checkpoint runs in transformers on
text of a file or, without one, on text that it generates itself.

Text of the model's own has the inputs that it sees in use, whatever it was trained on. It is sampled at temperature 1
after a few tokens of the package's text, as LLM-QAT does (arXiv 2305.17888), and then read in one forward pass whose
inputs are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from eagle_calib.calibration import Observed
from eagle_calib.errors import CalibrationError
from eagle_calib.observe import InputStatistics
from eagle_calib.texts import read_windows
from eagle_export.errors import ExportError
from eagle_export.families.source import load_source
from eagle_export.pair import EMBEDDING, LM_HEAD
from eagle_export.source_text import SEED, continued, text_starts
from eagle_runtime.text.tokenizer import Text
from eagle_runtime.tree import Float

SEQUENCES, START, LENGTH = 24, 8, 96  # generated texts, tokens that each starts with, and tokens in all
KEPT = SEQUENCES * LENGTH  # rows of a layer's inputs that are kept: more lower an int4 target's KL, and take memory
WINDOW, MAX_TOKENS = 256, 8192  # of a file: tokens per window, and in all
FC = "head.fc.weight"  # of an EAGLE-3 head, in the target's graph
PROBES = 2  # texts of which the logits are kept


@dataclass(frozen=True, slots=True)
class Probe:
    """A text and the source's logits [R, V] of its last R rows."""

    tokens: list[int]
    logits: Float


@dataclass(frozen=True, slots=True)
class Recorded:
    """inputs: weight name -> inputs of its layer, of every linear layer. probes: some of the texts that were read."""

    inputs: Mapping[str, Observed]
    probes: tuple[Probe, ...]


def observe_source(
    folder: Path,
    text: Text,
    data: Path | None,
    taps: tuple[int, ...] = (),
    report: Callable[[str], None] = lambda step: None,
    joined: Callable[[Sequence[Tensor]], Tensor] = lambda taps: torch.cat(list(taps), -1),
) -> Recorded:
    """Returns what the checkpoint in `folder` computes for a text.

    text: its tokenizer. data: a text file, or JSONL as eagle-calib reads it; None for text of the model's own. taps:
    the hidden states that an EAGLE-3 head reads, if there is one. report: called with what is being done. joined: makes
    of the taps what the head's fc reads. Raises CalibrationError for a file without text, and ExportError if
    transformers cannot run the checkpoint."""
    transformers_logging.disable_progress_bar()
    try:
        model = load_source(folder)
        vocab = int(model.config.vocab_size)
        longest = int(model.config.max_position_embeddings)
        if data is None:
            starts = text_starts(text, vocab, SEQUENCES, START, 2 * START, MAX_TOKENS)
            windows = _own_text(model, starts, min(LENGTH, longest), report)
        else:
            windows = read_windows(data, text, vocab, min(WINDOW, longest), MAX_TOKENS)
        probes = tuple(_probe(model, window) for window in windows[:PROBES])
        return Recorded(_observed(model, windows, taps, report, joined), probes)
    except (ExportError, CalibrationError):
        raise
    except Exception as error:  # transformers, safetensors and a full memory raise many kinds
        lines = str(error).strip().splitlines() or ["no message"]
        reason = f"{type(error).__name__}: {lines[0][:200]}"
        raise ExportError(f"transformers does not run {folder} ({reason})") from None
    finally:
        transformers_logging.enable_progress_bar()


@torch.inference_mode()
def _own_text(model: Any, starts: Sequence[list[int]], length: int, report: Callable[[str], None]) -> list[list[int]]:
    """Continues all starts, which have one length, to `length` tokens, sampled at temperature 1. End-of-sequence tokens
    are sampled like others, and a text goes on after one."""
    random = torch.Generator().manual_seed(SEED)

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.float().softmax(-1), 1, generator=random)

    tokens = torch.tensor(starts)
    report(f"generating text to calibrate on ({tokens.shape[1]} of {length} tokens)")
    for new in continued(model, starts, length - tokens.shape[1], sample):
        tokens = torch.cat([tokens, new], 1)
        report(f"generating text to calibrate on ({tokens.shape[1]} of {length} tokens)")
    result: list[list[int]] = tokens.tolist()
    return result


@torch.inference_mode()
def _probe(model: Any, tokens: list[int]) -> Probe:
    rows = max(1, len(tokens) - START)
    return Probe(tokens, model(input_ids=torch.tensor([tokens]), logits_to_keep=rows).logits[0].float().numpy())


class InputRecorder:
    """Records what linear layers read, text by text."""

    def __init__(self) -> None:
        self._statistics: dict[str, InputStatistics] = {}
        self._same_input: dict[str, str] = {}  # layer -> the layer before it that reads the same tensor
        self._last: tuple[Any, str] = (None, "")  # the tensor that a layer read last, and that layer

    def watch(self, layers: Iterable[tuple[str, nn.Module]]) -> list[Any]:
        """Returns hooks that record the inputs of all linear layers among modules, by the names of their weights."""
        linear = [(f"{name}.weight", layer) for name, layer in layers if isinstance(layer, nn.Linear)]
        return [layer.register_forward_pre_hook(partial(self._read, name)) for name, layer in linear]

    def begin_text(self) -> None:
        """Forgets the tensor that was read last."""
        self._last = (None, "")

    def add(self, name: str, x: Tensor) -> None:
        """Records an input [1, T, K] of a layer."""
        rows = x.reshape(-1, x.shape[-1]).float().numpy()
        if name not in self._statistics:
            self._statistics[name] = InputStatistics(f"the input of {name}", x.shape[-1], KEPT)
        self._statistics[name].add(rows)

    def observed(self) -> dict[str, Observed]:
        """Returns weight name -> inputs; layers that read one tensor share an object. Raises CalibrationError."""
        seen = {name: one.observed() for name, one in self._statistics.items()}
        return seen | {name: seen[other] for name, other in self._same_input.items()}

    def _read(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0] is self._last[0]:
            self._same_input[name] = self._last[1]
            return
        self._last = (args[0], name)
        self.add(name, args[0])


@torch.inference_mode()
def _observed(
    model: Any,
    windows: Sequence[Sequence[int]],
    taps: tuple[int, ...],
    report: Callable[[str], None],
    joined: Callable[[Sequence[Tensor]], Tensor],
) -> dict[str, Observed]:
    """Reads every window as a prompt."""
    recorder = InputRecorder()
    tapped: list[Any] = []
    hooks = recorder.watch(model.named_modules())
    hooks += [model.model.layers[tap - 1].register_forward_hook(lambda _m, _i, out: tapped.append(out)) for tap in taps]
    for number, window in enumerate(windows):
        report(f"recording inputs ({number} of {len(windows)} texts)")
        recorder.begin_text()
        model(input_ids=torch.tensor([list(window)]), use_cache=False)
        if tapped:
            recorder.add(FC, joined(tapped))
            tapped.clear()
    for hook in hooks:
        hook.remove()
    observed = recorder.observed()
    if model.config.tie_word_embeddings:
        observed[EMBEDDING] = observed[LM_HEAD]
    return observed
