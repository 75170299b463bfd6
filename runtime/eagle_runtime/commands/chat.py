"""eagle-chat: talk with a bundle in a terminal; without one, each line of the input is a question."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.base.errors import RequestError, why
from eagle_runtime.commands.chat_screen import Interrupt, Screen, at_terminal
from eagle_runtime.commands.chat_talk import Talk
from eagle_runtime.commands.command import (
    LoadingLine,
    Parser,
    add_model_options,
    model_options,
    output_errors,
    print_line,
    run_command,
)
from eagle_runtime.commands.interrupts import Interrupted
from eagle_runtime.drafting.methods import HELP, NAMES
from eagle_runtime.text.call_formats import FORMATS
from eagle_runtime.text.tools import ToolUse

SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "method")  # of `EagleModel.stream`, if given


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error of the input."""
    typed = at_terminal() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    own = [signal.SIGINT] if typed else []
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted", but_for=own)


def run(args: argparse.Namespace) -> None:
    """Load the bundle, talk until the end. Raises what the bundle's errors are, and Interrupted while it loads."""
    screen, interrupt = Screen(), Interrupt()
    settings = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    tools = None if args.tools is None else _tools(Path(args.tools))
    if args.load is not None and (tools or args.tool_format):
        raise RequestError("--load goes on with the tools of the file; leave out --tools and --tool-format")
    with output_errors(), interrupt.handled() if screen.interactive else contextlib.nullcontext():
        try:
            model = EagleModel.load(on_progress=LoadingLine(sys.stderr), **model_options(args))
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        with model:
            if not model.text.available:
                raise RequestError(f"{args.bundle} has no tokenizer, so it takes no text; eagle-run takes --prompt-ids")
            settings.setdefault("max_new_tokens", model.context)  # what is left of it
            talk = Talk(model, screen, interrupt, settings, tools, args.tool_format)
            if args.load is not None:
                talk.load(args.load)
            if args.system is not None:
                talk.take(f"/system {args.system}")
            if screen.interactive:
                name = Path(args.bundle).resolve().name
                screen.note(f"{name} on {model.backend}, {model.context} tokens of context; /help lists the commands")
            if model.notice is not None:
                print_line("eagle-chat", model.notice)
            if not model.text.chat:
                screen.note("the bundle has no chat template: the model goes on from each text that you type, as it is")
            talk.run()


def _tools(path: Path) -> list[dict[str, Any]]:
    """The tools in a file. Raises RequestError."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read as JSON ({why(error)}); give a list of tools") from None
    ToolUse.of(tools)
    return list(tools)


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-chat", description="Talk with a bundle. Without a terminal each line of the input is a question."
    )
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer (default: what is left)")
    parser.add_argument(
        "--tools", metavar="FILE", help="JSON list of tools that the model may call, as OpenAI's API has"
    )
    formats = [row.name for row in FORMATS]
    parser.add_argument(
        "--tool-format", choices=formats, metavar="NAME", help="of calls (default: as the template says)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0: the likeliest token (default: the model's own; see /set)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the k likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the smallest set of this mass (1: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random numbers (default: new ones)")
    parser.add_argument("--method", choices=NAMES, help=HELP)
    return parser


if __name__ == "__main__":
    sys.exit(main())
