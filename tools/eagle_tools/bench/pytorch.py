"""Runs the same prompts through transformers' `generate`, which users have before they export a bundle.

Decoding is greedy with batch size 1. End-of-sequence ids are ignored on both sides, so that lengths are equal. A
streamer reports the times of tokens.

    eager           model.generate with its defaults
    compiled        torch.compile of the decoding step over a static cache, as transformers itself does on GPUs
    prompt-lookup   generate(prompt_lookup_num_tokens=10)
    assisted        generate(assistant_model=...): a small model of the same vocabulary drafts

Precisions: fp32 and bf16 on a CPU, fp16 and bf16 on a CUDA device.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError, first_line
from eagle_tools.bench.identity import PYTORCH
from eagle_tools.bench.rows import Asked, Row, Setup, foreign_row

MODES = ("eager", "compiled", "prompt-lookup")
ASSISTED = "assisted"
LOOKUP = 10  # tokens, as in transformers' documentation
COMPILE_STEPS = 4  # tokens of the generation that compiles


@dataclass(frozen=True, slots=True)
class Passes:
    """Times of the forward passes of one generation. started: time of its start. counts, times: number of tokens of
    each pass, and the time when they were there; the last time is the end of the generation."""

    started: float
    counts: tuple[int, ...]
    times: tuple[float, ...]


class PytorchModel:
    """A checkpoint in one precision, loaded once for all modes."""

    def __init__(self, folder: Path, precision: str, threads: int, longest: int, assistant: Path | None) -> None:
        """longest: length of the static cache, in tokens of prompt and output."""
        torch = _torch()
        from transformers import GenerationConfig, StaticCache
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        hf_logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.precision = precision
        self._config: Any = GenerationConfig
        self._model = _loaded(folder, precision, self.device)
        self._assistant = None if assistant is None else _loaded(assistant, precision, self.device)
        # Attention over a static cache takes time for its whole length, so it is no longer than needed.
        self._new_cache: Callable[[], Any] = lambda: StaticCache(config=self._model.config, max_cache_len=longest)
        self._cache: Any = None
        self._compile = _compile_config()

    def generate(self, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], Passes]:
        """Returns the new tokens and the times of the forward passes."""
        torch = _torch()
        settings: dict[str, Any] = {}
        more: dict[str, Any] = {}
        if mode == "compiled":
            if self._cache is None:
                self._cache = self._new_cache()
            settings["compile_config"] = self._compile
            more["past_key_values"] = self._cache
        elif mode == "prompt-lookup":
            settings["prompt_lookup_num_tokens"] = LOOKUP
        elif mode == ASSISTED:
            more["assistant_model"] = self._assistant
        config: Any = self._config(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
        )
        ids = torch.tensor([token_ids], device=self.device)
        streamer = _Streamer()
        started = time.perf_counter()
        with torch.inference_mode():
            if mode == "compiled":
                self._cache.reset()
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer, **more
            )
        new = out[0, len(token_ids) :].tolist()
        ended = time.perf_counter()
        assert len(new) == max_new_tokens, f"transformers ended after {len(new)} of {max_new_tokens} tokens"
        (_, *counts), (_, *times) = streamer.counts, streamer.times  # the prompt comes first
        return new, Passes(started, tuple(counts), (*times[:-1], ended))

    def pass_bytes(self) -> int:
        """Returns the bytes of weights that a forward pass reads. Of an embedding that is not the LM head too it reads
        only a few rows."""
        table, head = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        total = sum(part.numel() * part.element_size() for part in self._model.parameters())
        return int(total - (0 if table is head else table.numel() * table.element_size()))

    def close(self) -> None:
        """Release the weights."""
        self._model = self._assistant = self._cache = None
        gc.collect()


class PytorchContender:
    """A contender of a checkpoint, a precision and a mode.

    Speed and tau count the tokens after the first forward pass, which with a draft may give several tokens; a bundle's
    first pass, over the prompt, gives one."""

    def __init__(self, model: PytorchModel, folder: Path, mode: str) -> None:
        self.setup = Setup(mode, model.precision, PYTORCH, folder.absolute().name, 0.0)
        self.pass_bytes = model.pass_bytes()
        self._model = model
        self._mode = mode

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        """As of Contender, but in one turn, since `generate` cannot be interrupted."""
        row = self.answer(asked, max_new_tokens)
        yield row.new_tokens
        return row

    def answer(self, asked: Asked, max_new_tokens: int) -> Row:
        """Returns the row of one generation."""
        new, passes = self._model.generate(self._mode, asked.token_ids, max_new_tokens)
        prefill_s, decode_s = passes.times[0] - passes.started, passes.times[-1] - passes.times[0]
        return foreign_row(self.setup, asked, new, passes.counts[0], len(passes.counts) - 1, prefill_s, decode_s)


def check_checkpoint(folder: Path, vocab_size: int) -> None:
    """Raises RequestError unless the folder holds a model of this vocabulary, and torch is there to run it."""
    if not (folder / "config.json").is_file():
        raise RequestError(f"{folder} has no config.json; give the Hugging Face folder that the bundle was made from")
    _torch()
    from transformers import AutoConfig

    try:
        vocabulary = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).vocab_size
    except Exception as error:  # transformers raises many kinds
        raise RequestError(f"transformers cannot read {folder}: {first_line(error)}") from None
    if vocabulary != vocab_size:
        raise RequestError(
            f"{folder} has a vocabulary of {vocabulary}, the bundles one of {vocab_size}; give their source"
        )


def precisions() -> tuple[str, str]:
    """Returns the precisions of this machine, the one closest to the checkpoint first."""
    return ("fp16", "bf16") if _torch().cuda.is_available() else ("fp32", "bf16")


def pytorch_contenders(
    model: PytorchModel, folder: Path, modes: Sequence[str], asked: Asked, say: Callable[[str], None]
) -> list[PytorchContender]:
    """Returns a contender for each mode that runs here. `say` gets a line for each mode that does not."""
    contenders = []
    for mode in modes:
        contender = PytorchContender(model, folder, mode)
        if mode == "compiled":
            started = time.perf_counter()
            try:
                contender.answer(asked, COMPILE_STEPS)
            except Exception as error:  # torch.compile, its backend and the compiler raise many kinds
                say(f"PyTorch compiled, {model.precision}: skipped, torch.compile failed ({first_line(error)})")
                continue
            say(f"PyTorch compiled, {model.precision}: ready after {time.perf_counter() - started:.0f} s")
        contenders.append(contender)
    return contenders


class _Streamer:
    """Records the time and the number of tokens of each call: first the prompt, then each forward pass."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Does nothing; transformers calls it at the end."""


def _torch() -> Any:
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"the comparison with PyTorch needs {error.name!r}; pip install 'eagle-edge[cpu,export,bench]'"
        ) from None
    return torch


def _loaded(folder: Path, precision: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch = _torch()
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds
        raise RequestError(f"transformers cannot load {folder}: {first_line(error)}") from None
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None  # it would replace the None of a call
    return model


def _compile_config() -> Any:
    """Returns a configuration that compiles on any device; by default transformers compiles on GPUs only."""
    from transformers import CompileConfig

    for name in ("torch._dynamo", "torch._inductor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    config = CompileConfig()
    config._compile_all_devices = True
    return config
