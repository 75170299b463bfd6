"""eagle-train: the command line. Torch is imported after the arguments were checked."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle_runtime.base.errors import EagleError
from eagle_runtime.commands.command import Parser, run_command
from eagle_runtime.machine.host import threads_allowed
from eagle_train.config import ALL_FILES, DRAFT_VOCAB, INPUTS, Sampling, TrainConfig, TrainingJob
from eagle_train.kinds import LAYOUTS, TRAINED

TARGET_HELP = "Hugging Face folder or GGUF file of the target"
Settings = TypeVar("Settings", TrainConfig, TrainingJob, Sampling)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    interrupted = "interrupted; --resume continues from what was saved"
    return run_command(_parser(), argv, run, extra="train", interrupted=interrupted)


def run(args: argparse.Namespace) -> None:
    """Run the subcommand."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no library may download files by itself
    args.run(args)


def _head(args: argparse.Namespace) -> None:
    job, config = _from_arguments(TrainingJob, args), _from_arguments(TrainConfig, args)
    if config.steps == 0 and job.init is None and not job.resume:
        raise EagleError("steps is 0, so the head would stay untrained; give 1 or more, or a trained head by --init")
    _set_threads(args.threads)
    from eagle_train.trainer import train_head

    train_head(job, config)


def _generate(args: argparse.Namespace) -> None:
    sampling = _from_arguments(Sampling, args)
    _set_threads(args.threads)
    from eagle_train.generate import generate_answers

    generate_answers(args.target, args.prompts, args.output, sampling, args.device, args.target_bundle, args.resume)


def _from_arguments(kind: type[Settings], args: argparse.Namespace) -> Settings:
    """Returns the dataclass whose fields are the arguments of the same names."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in vars(args).items() if name in names}
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**arguments)


def _set_threads(threads: int | None) -> None:
    threads = threads_allowed() if threads is None else threads
    if threads is None:
        return
    if threads < 1:
        raise EagleError(f"threads is {threads}, but must be 1 or more")
    import torch

    torch.set_num_threads(threads)


def _parser() -> Parser:
    parser = Parser(prog="eagle-train", description="Train a draft head for a frozen target.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_head(commands.add_parser("head", help="train a head that drafts step by step, or one head per position"))
    _add_block(commands.add_parser("block", help="train a head that drafts several tokens in one pass"))
    _add_generate(commands.add_parser("generate", help="let the target answer prompts, for a head to learn from"))
    return parser


class _Options:
    """Adds options that set the fields of a dataclass and take their defaults from it."""

    def __init__(self, group: argparse._ActionsContainer, settings: type[Any]) -> None:
        self._group = group
        self._defaults = {field.name: field.default for field in dataclasses.fields(settings)}

    def add(self, option: str, meaning: str = "", **settings: Any) -> None:
        """meaning: the help text without the default, which is added."""
        default = self._defaults[option.lstrip("-").replace("-", "_")]
        if default not in (None, ()) and "action" not in settings:
            meaning += " (default %(default)s)"
        default = list(default) if isinstance(default, tuple) else default  # which "extend" copies
        self._group.add_argument(option, default=default, help=meaning.lstrip(), **settings)


def _add_head(parser: argparse.ArgumentParser) -> None:
    kinds = [kind for kind, how in TRAINED.items() if not how.own_command]
    parser.add_argument("--kind", required=True, choices=kinds, help="of head")
    job, learning = _add_training(parser)
    meaning = "learn features and logits of this exported target, such as an int4 one, instead of TARGET's"
    job.add("--target-bundle", meaning, type=Path, metavar="BUNDLE")
    meaning = "whose names and config the head is written with; speculators is for EAGLE-3"
    job.add("--layout", meaning, choices=LAYOUTS)
    learning.add("--ttt-steps", "unrolled steps", type=int, metavar="J")
    meaning = "share of an EAGLE-3 head's rows that are unrolled beyond the first step: less work"
    learning.add("--ttt-share", meaning, type=float, metavar="X")
    learning.add("--heads", "Medusa or Hydra heads, each for one position", type=int, metavar="N")
    learning.add("--noise", "noise on EAGLE-1's features", type=float, metavar="X")
    meaning = "weight of EAGLE-1's cross-entropy relative to the regression of features"
    learning.add("--classification", meaning, type=float, metavar="X")
    learning.add("--inputs", "what an EAGLE-1 head reads, for ablations", choices=INPUTS)
    learning.add("--recompute", "less memory, a third more time (EAGLE-3)", action="store_true")


def _add_block(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="block")
    _, learning = _add_training(parser)
    learning.add("--block", "rows of a block: the last verified token's, and masks", type=int, metavar="B")
    learning.add("--layers", "decoder layers", type=int, metavar="N")
    learning.add("--mlp", "units of their MLPs (default: as the target's)", type=int, metavar="N")
    learning.add("--kv-heads", "their key/value heads (default: as the target's)", type=int, metavar="N")
    learning.add("--anchors", "blocks per window and step", type=int, metavar="N")
    learning.add("--singles", "blocks of one row besides", type=int, metavar="N")
    learning.add("--markov-rank", "of the transitions between drafted tokens; 0 for none", type=int, metavar="R")


def _add_training(parser: argparse.ArgumentParser) -> tuple[_Options, _Options]:
    """Adds what the training of all heads shares. Returns the options of the job and of learning."""
    parser.set_defaults(run=_head)
    parser.add_argument("target", type=Path, metavar="TARGET", help=TARGET_HELP)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="JSONL rows, text, or a folder of them; may be repeated",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="HEAD", help="folder to write")
    job = _Options(parser, TrainingJob)
    parser.add_argument(
        "--glob", dest="pattern", default=ALL_FILES, metavar="PATTERN", help="which files of a folder, as in **/*.py"
    )
    job.add("--eval-data", "held-out text to measure on", type=Path, action="extend", nargs="+", metavar="FILE")
    job.add("--cache", "keep the target's features there: large, but saves its passes", type=Path, metavar="DIR")
    job.add("--init", "a trained head to continue from, such as the base model's", type=Path, metavar="HEAD")
    job.add("--resume", "continue from HEAD's checkpoint", action="store_true")
    _add_machine(parser)
    budget = _Options(parser.add_argument_group("budget (one is needed)"), TrainConfig)
    budget.add("--steps", "steps of training; 0 writes the head of --init as it is", type=int, metavar="N")
    budget.add("--minutes", "minutes of training, without the preparation of data", type=float, metavar="M")
    learning = _Options(parser.add_argument_group("learning"), TrainConfig)
    learning.add("--batch-size", "windows per step", type=int, metavar="N")
    learning.add("--seq-len", "tokens per window", type=int, metavar="N")
    learning.add("--lr", "peak rate (default: 0.4 / width, 5e-5 to 6e-3)", type=float, metavar="X")
    learning.add("--warmup", "steps, at most a tenth of --steps", type=int, metavar="N")
    known = f"tokens that an EAGLE-3 or block head knows (default {DRAFT_VOCAB})"
    learning.add("--draft-vocab", known, type=int, metavar="N")
    learning.add("--seed", type=int, metavar="N")
    learning.add("--save-every", "steps", type=int, metavar="N")
    learning.add("--log-every", "steps", type=int, metavar="N")
    learning.add("--eval-every", "steps between measurements on --eval-data", type=int, metavar="N")
    return job, learning


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("target", type=Path, metavar="TARGET", help=TARGET_HELP)
    prompts = "rows of turns, messages, prompt or ids, as JSONL or a JSON array"
    parser.add_argument("--data", dest="prompts", type=Path, required=True, metavar="PROMPTS", help=prompts)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="JSONL file to write")
    meaning = "answer by this exported target, such as an int4 one, instead of TARGET's weights"
    parser.add_argument("--target-bundle", type=Path, metavar="BUNDLE", help=meaning)
    sampling = _Options(parser, Sampling)
    sampling.add("--max-new-tokens", type=int, metavar="N")
    sampling.add("--temperature", "0 takes the likeliest token", type=float, metavar="X")
    sampling.add("--top-p", type=float, metavar="X")
    sampling.add("--top-k", "0 allows all tokens", type=int, metavar="K")
    sampling.add("--samples", "answers per prompt", type=int, metavar="N")
    sampling.add("--cut-loops", "end an answer where it begins to repeat itself", action="store_true")
    sampling.add("--batch-size", "answers that are written at once", type=int, metavar="N")
    sampling.add("--seed", type=int, metavar="N")
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run has written")
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", dest="device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU (default: torch's)")


if __name__ == "__main__":
    sys.exit(main())
