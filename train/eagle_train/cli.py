"""eagle-train: parsers only. Heavy imports wait until the arguments are known to be sound."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.command import Parser, run_command
from eagle_runtime.errors import EagleError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    interrupted = "interrupted; --resume goes on from the last checkpoint"
    return run_command(_parser(), argv, run, extra="train", interrupted=interrupted)


def run(args: argparse.Namespace) -> None:
    """Do what the subcommand says."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched that was not asked for
    args.run(args)


def _head(args: argparse.Namespace) -> None:
    from eagle_train.config import TrainConfig

    config = TrainConfig(
        kind=args.kind,
        steps=args.steps,
        minutes=args.minutes,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        lr=args.lr,
        warmup=args.warmup,
        ttt_steps=args.ttt_steps,
        draft_vocab=args.draft_vocab,
        seed=args.seed,
        noise=args.noise,
        classification=args.classification,
        inputs=args.inputs,
        recompute=args.recompute,
        save_every=args.save_every,
        log_every=args.log_every,
    )
    _set_threads(args.threads)
    from eagle_train.trainer import Job, train_head

    job = Job(
        target=Path(args.target),
        data=tuple(map(Path, args.data)),
        output=Path(args.output),
        eval_data=tuple(map(Path, args.eval_data)),
        pattern=args.glob,
        cache=None if args.cache is None else Path(args.cache),
        init=None if args.init is None else Path(args.init),
        device=args.device,
        resume=args.resume,
    )
    train_head(job, config)


def _generate(args: argparse.Namespace) -> None:
    _set_threads(args.threads)
    from eagle_train.generate import Sampling, generate_answers

    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        samples=args.samples,
        seed=args.seed,
    )
    generate_answers(Path(args.target), Path(args.data), Path(args.output), sampling, args.batch_size, args.device)


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise EagleError(f"threads is {threads}, but must be 1 or more")
    import torch

    torch.set_num_threads(threads)


def _parser() -> Parser:
    parser = Parser(prog="eagle-train", description="Train an EAGLE head for a frozen target.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_head(commands.add_parser("head", help="train a head"))
    _add_generate(commands.add_parser("generate", help="let the target answer prompts, for a head to learn from"))
    return parser


def _add_head(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_head)
    parser.add_argument("target", metavar="TARGET", help="Hugging Face folder of the target (Llama architecture)")
    parser.add_argument("--kind", required=True, choices=["eagle1", "eagle3"])
    parser.add_argument(
        "--data", required=True, nargs="+", metavar="FILE", help="JSONL conversations or ids, text, or folders of them"
    )
    parser.add_argument("-o", "--output", required=True, metavar="HEAD", help="folder to write")
    parser.add_argument("--glob", default="**/*", metavar="PATTERN", help="which files of a folder, as in **/*.py")
    parser.add_argument("--eval-data", nargs="+", default=[], metavar="FILE", help="held-out text to measure on")
    parser.add_argument("--cache", metavar="DIR", help="keep the target's features there: large, but no pass of it")
    parser.add_argument("--init", metavar="HEAD", help="a trained head to go on from, such as that of the base model")
    parser.add_argument("--resume", action="store_true", help="go on from HEAD's checkpoint")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU (default: torch's)")
    budget = parser.add_argument_group("budget (one is needed)")
    budget.add_argument("--steps", type=int, metavar="N")
    budget.add_argument("--minutes", type=float, metavar="M", help="of training, data preparation aside")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--batch-size", type=int, default=8, metavar="N", help="windows per step (default 8)")
    learning.add_argument("--seq-len", type=int, default=512, metavar="N", help="tokens per window (default 512)")
    learning.add_argument("--lr", type=float, metavar="X", help="peak rate (default: 0.4 / width, 5e-5 to 6e-3)")
    learning.add_argument(
        "--warmup", type=int, default=100, metavar="N", help="steps, at most a tenth of --steps (default 100)"
    )
    learning.add_argument("--ttt-steps", type=int, default=7, metavar="J", help="unrolled steps (default 7)")
    learning.add_argument("--draft-vocab", type=int, metavar="N", help="tokens an EAGLE-3 head knows (default 32000)")
    learning.add_argument("--noise", type=float, default=0.1, metavar="X", help="on EAGLE-1's features (default 0.1)")
    learning.add_argument(
        "--classification",
        type=float,
        default=0.1,
        metavar="X",
        help="weight of EAGLE-1's cross-entropy beside the regression of features (default 0.1)",
    )
    learning.add_argument(
        "--inputs",
        default="feature+shifted",
        choices=["feature+shifted", "feature+unshifted", "feature", "token"],
        help="what an EAGLE-1 head sees, for ablations",
    )
    learning.add_argument("--recompute", action="store_true", help="less memory, a third more time (EAGLE-3)")
    learning.add_argument("--seed", type=int, default=0, metavar="N")
    learning.add_argument("--save-every", type=int, default=500, metavar="N", help="steps (default 500)")
    learning.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default 20)")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("target", metavar="TARGET", help="Hugging Face folder of the target (Llama architecture)")
    parser.add_argument("--data", required=True, metavar="PROMPTS", help="JSONL of turns, messages, prompt or ids")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="JSONL file to write")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: take the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU (default: torch's)")


if __name__ == "__main__":
    sys.exit(main())
