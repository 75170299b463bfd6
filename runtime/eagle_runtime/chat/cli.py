"""eagle-chat: talk with a bundle in a terminal; without one, each line of the input is a question."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.backends import AUTO, BACKENDS
from eagle_runtime.chat.screen import Interrupt, Screen, at_terminal
from eagle_runtime.chat.talk import Talk
from eagle_runtime.command import Parser, output_errors, run_command
from eagle_runtime.eagle_model import EagleModel
from eagle_runtime.errors import RequestError
from eagle_runtime.loading_line import LoadingLine
from eagle_runtime.threads.interrupts import Interrupted


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error of the input."""
    typed = at_terminal() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    own = [signal.SIGINT] if typed else []
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted", but_for=own)


def run(args: argparse.Namespace) -> None:
    """Load the bundle, talk until the end. Raises what the bundle's errors are, and Interrupted while it loads."""
    screen, interrupt = Screen(), Interrupt()
    settings = {"max_new_tokens": args.max_new_tokens}
    settings |= {name: value for name in ("temperature", "seed") if (value := getattr(args, name)) is not None}
    with output_errors(), interrupt.handled() if screen.interactive else contextlib.nullcontext():
        try:
            model = EagleModel.load(
                args.bundle,
                backend=args.backend,
                context=args.context,
                threads=args.threads,
                draft_bundle=args.draft_bundle,
                habits=args.habits,
                on_progress=LoadingLine(sys.stderr),
            )
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        with model:
            if not model.text.available:
                raise RequestError(f"{args.bundle} has no tokenizer, so it takes no text; eagle-run takes --prompt-ids")
            talk = Talk(model, screen, interrupt, settings)
            if args.load is not None:
                talk.load(args.load)
            if screen.interactive:
                name = Path(args.bundle).resolve().name
                screen.note(f"{name} on {model.backend}, {model.context} tokens of context; /help lists the commands")
            if model.notice is not None:
                screen.note(model.notice)
            if not model.text.chat:
                screen.note("the bundle has no chat template: the model goes on from each text that you type, as it is")
            talk.run()


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-chat", description="Talk with a bundle. Without a terminal each line of the input is a question."
    )
    parser.add_argument("bundle", help="folder written by eagle-export")
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    parser.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="of an answer (default: 1024)")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0: the likeliest token (default: the model's own; see /set)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the random numbers (default: new ones)")
    parser.add_argument(
        "--backend", default=AUTO, metavar="B", help=f"engine to run on: {', '.join(BACKENDS)}, or auto (default)"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of the whole conversation to make room for")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a forward pass (default: physical cores, or quota)"
    )
    parser.add_argument("--draft-bundle", metavar="FOLDER", help="bundle of a smaller model that drafts")
    parser.add_argument("--habits", metavar="FILE", help="keep what method recycling learns in this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
