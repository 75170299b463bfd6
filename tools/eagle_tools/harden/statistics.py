"""Activation statistics of a Llama, which say how hard it is to quantise.

    python -m eagle_tools.harden.statistics FOLDER [--text FILE] [--tokens N] [--summary]

runs a Hugging Face folder in fp32 over text and prints, for each layer and each input of linear layers:

    max         largest magnitude
    max/median  that over the median magnitude
    kurtosis    fourth central moment over the variance squared; a normal distribution has 3
    channels    largest over median of the channels' own largest magnitudes

for all tokens but the first one of each window, which real models use as a sink, and "first", the largest magnitude of
the first tokens over the median of the others. --summary prints for each input the median over the layers, and the
largest in brackets. Needs memory for all these inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from eagle_calib.texts import read_windows
from eagle_runtime.commands.command import Parser, run_command
from eagle_runtime.text.tokenizer import Text
from eagle_tools.harden.check import load_target
from eagle_tools.harden.strength import HardenError
from eagle_tools.markdown import markdown_table

TEXT = Path("tools/demo_pair/heldout.jsonl")
WINDOW = 128  # tokens
SITES = {
    "q, k, v": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "gate, up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
LM_HEAD = "LM head"
Place = tuple[str, str]  # layer, site


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one input of linear layers; see the module."""

    max: float
    max_over_median: float
    kurtosis: float
    channels: float
    first: float


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    parser = Parser(prog="harden.statistics", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="Hugging Face folder of a Llama")
    parser.add_argument("--text", type=Path, default=TEXT, help="text or JSONL; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--summary", action="store_true", help="one row per input in place of one per layer and input")
    return run_command(parser, argv, run, "export", "stopped; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    measured = measure(args.folder, args.text, args.tokens)
    rows = summary(measured) if args.summary else [[where, site, *cells(one)] for where, site, one in measured]
    titles = ["input" if args.summary else "layer", *([] if args.summary else ["input"])]
    print(markdown_table([*titles, "max", "max/median", "kurtosis", "channels", "first"], rows), end="")


def measure(folder: Path, text: Path, max_tokens: int) -> list[tuple[str, str, Statistics]]:
    """Returns (layer, site, statistics) in the order of the model. Raises EagleError."""
    if not (folder / "config.json").is_file():
        raise HardenError(f"{folder} has no config.json; give a Hugging Face folder of a Llama")
    tokenizer = Text(folder)
    model = load_target(folder)
    windows = read_windows(text, tokenizer, int(model.config.vocab_size), WINDOW, max_tokens)
    return [(where, site, statistics(x, first)) for where, site, x, first in inputs(model, windows)]


def inputs(model: LlamaForCausalLM, windows: list[list[int]]) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yields (layer, site, inputs [tokens, width], inputs of the windows' first tokens [windows, width])."""
    modules = {
        (str(number), site): layer.get_submodule(name)
        for number, layer in enumerate(model.model.layers)
        for site, name in SITES.items()
    }
    for (where, site), (x, first) in observe(model, {**modules, ("", LM_HEAD): model.lm_head}, windows).items():
        yield where, site, x, first


def observe(
    model: LlamaForCausalLM, modules: dict[Place, nn.Module], windows: list[list[int]]
) -> dict[Place, tuple[Tensor, Tensor]]:
    """Returns place -> (inputs [tokens, width], inputs of the windows' first tokens [windows, width])."""
    seen: dict[Place, list[Tensor]] = {name: [] for name in modules}
    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: seen[name].append(given[0][0].clone()))
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad():
            for ids in windows:
                model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return {name: (torch.cat([x[1:] for x in of]), torch.stack([x[0] for x in of])) for name, of in seen.items()}


def statistics(x: Tensor, first: Tensor) -> Statistics:
    """Returns the statistics of inputs [tokens, width], with those of first tokens [windows, width]."""
    magnitudes = x.abs()
    middle = float(magnitudes.flatten().median())
    largest = magnitudes.amax(0)
    centred = x.double() - x.double().mean()
    kurtosis = float(centred.pow(4).mean() / centred.square().mean().square())
    return Statistics(
        max=float(largest.max()),
        max_over_median=float(largest.max()) / middle,
        kurtosis=kurtosis,
        channels=float(largest.max() / largest.median()),
        first=float(first.abs().max()) / middle,
    )


def cells(one: Statistics) -> list[str]:
    """The table's cells."""
    return [rounded(getattr(one, field.name)) for field in fields(one)]


def rounded(value: float) -> str:
    """Two digits, or whole numbers from 10 on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def summary(measured: list[tuple[str, str, Statistics]]) -> list[list[str]]:
    """Returns a row per site: the median over the layers, and the largest in brackets."""
    rows = []
    for site in [*SITES, LM_HEAD]:
        row = [site]
        for field in fields(Statistics):
            values = [getattr(one, field.name) for _, other, one in measured if other == site]
            largest = f" ({rounded(max(values))})" if len(values) > 1 else ""
            row.append(rounded(median(values)) + largest)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
