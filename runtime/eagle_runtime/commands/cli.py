"""eagle-run: decode one prompt or chat message from a bundle, or serve lines of JSON (--worker)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.app.result import Result
from eagle_runtime.base.backend_names import AUTO
from eagle_runtime.base.errors import RequestError, why
from eagle_runtime.commands.command import (
    Listed,
    LoadingLine,
    Parser,
    add_model_options,
    model_options,
    output_errors,
    print_line,
    run_command,
    size,
)
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.methods import HELP, NAMES, TREES, method_named
from eagle_runtime.opening.backends import reasons_text

SETTINGS = (  # of `EagleModel.stream` whose arguments have the same name
    "max_new_tokens", "method", "tree", "total_token", "depth", "draft_top_k", "stop", "stop_token_ids", "ignore_eos",
    "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
SOURCES = ("prompt", "prompt_ids", "prompt_file", "message", "messages")
OF_WORKER = ("bundle", "backend", "context", "threads", "draft_bundle", "datastore", "habits", "worker", "memory_limit")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error of the input."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Decode with the parsed arguments and print the text as it comes, or one JSON object at the end; with --worker
    serve until the input ends."""
    _check(args)
    if args.worker:
        from eagle_runtime.commands import worker

        worker.run(args)
    else:
        _answer(args)


def _answer(args: argparse.Namespace) -> None:
    with output_errors(), contextlib.ExitStack() as stack:
        model = stack.enter_context(EagleModel.load(on_progress=LoadingLine(sys.stderr), **model_options(args)))
        if args.backend == AUTO:
            over = f" ({reasons_text(model.passed_over)})" if model.passed_over else ""
            print(f"eagle-run: on {model.backend}{over}", file=sys.stderr)
        if model.notice is not None:
            print_line("eagle-run", model.notice)
        method = method_named(args.method or model.default_method)
        if args.habits is not None and method.proposer != "habits":
            raise RequestError(
                f"--habits is for method recycling, but method {method.name} drafts; add --method recycling"
            )
        tracer, before = None if args.trace is None else _Tracer(args.trace), model.counters()
        pieces = model.stream(
            _prompt(args),
            on_cycle=tracer,
            logit_bias=dict(args.logit_bias),
            **{name: getattr(args, name) for name in SETTINGS},
        )
        if tracer is not None:  # opened after all checks, so that a refused request leaves no file
            stack.enter_context(tracer)
        for piece in pieces:
            if not args.json:
                ids = " ".join(map(str, piece.token_ids)) + " "
                print(piece.text if model.text.available else ids, end="", flush=True)
            if piece.result is not None:
                now = model.counters()
                counters = None if before is None or now is None else dataclasses.asdict(now.since(before))
                _report(piece.result, args.json, counters)


class _Tracer:
    """Writes one JSON line per cycle to a file that is open within the block."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._count = 0

    def __enter__(self) -> _Tracer:
        with _trace_errors(self._path):
            self._file = Path(self._path).open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        with _trace_errors(self._path):
            self._file.close()

    def __call__(self, cycle: Cycle) -> None:
        tree, step = cycle.tree, cycle.step
        row = {
            "cycle": self._count,
            "tokens": tree.tokens.tolist(),
            "parents": tree.parents.tolist(),
            "scores": tree.scores.tolist(),
            "path": step.path.tolist(),
            "accepted": step.num_accepted,
            "next_token": int(step.tokens[-1]),
            "ms": {
                "draft": round(cycle.draft_s * 1e3, 4),
                "verify": round(cycle.verify_s * 1e3, 4),
                "host": round(cycle.host_s * 1e3, 4),
            },
        }
        assert self._file is not None
        with _trace_errors(self._path):
            print(json.dumps(row), file=self._file)
        self._count += 1


def _report(result: Result, as_json: bool, counters: dict[str, int] | None) -> None:
    if as_json:
        print(json.dumps(result.as_data() | ({} if counters is None else {"counters": counters})), flush=True)
        return
    stats = result.usage
    print(flush=True)
    print(
        f"[{stats.new_tokens} tokens, {stats.tokens_per_s:.1f} per second, {stats.tau:.2f} per target pass, "
        f"finish: {result.finish_reason}]",
        file=sys.stderr,
    )


def _check(args: argparse.Namespace) -> None:
    """Raises RequestError for options that do not go together."""
    given = [name for name in SOURCES if getattr(args, name) is not None]
    if args.worker:
        defaults = vars(_parser().parse_args([args.bundle]))
        for name, value in vars(args).items():
            if name not in OF_WORKER and value != defaults.get(name, value):
                raise RequestError(f"--worker takes its orders from standard input; leave out {_option(name)}")
    elif args.memory_limit is not None:
        raise RequestError("--memory-limit is for --worker; add it, or give --context")
    elif not given:
        raise RequestError(f"there is nothing to answer; give {', '.join(map(_option, SOURCES[:-1]))} or --messages")
    elif args.system is not None and args.message is None:
        raise RequestError("--system stands before a --message; give one, or put both into --messages FILE")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _prompt(args: argparse.Namespace) -> str | list[int] | list[dict[str, str]]:
    """The prompt, as `EagleModel.stream` takes it. Raises RequestError."""
    if args.prompt_ids is not None:
        return list(args.prompt_ids)
    if args.prompt_file is not None:
        return _read(args.prompt_file, "prompt file")
    if args.message is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return [*system, {"role": "user", "content": args.message}]
    if args.messages is not None:
        try:
            messages = json.loads(_read(args.messages, "file of messages"))
        except (ValueError, RecursionError):
            raise RequestError(f"{args.messages} is not JSON; give a list of objects with role and content") from None
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
            raise RequestError(f"{args.messages} holds no list of messages; give objects with role and content")
        return messages
    return str(args.prompt)


def _read(path: str, what: str) -> str:
    """The text of a file, of the standard input for "-". Raises RequestError."""
    try:
        with open(0 if path == "-" else path, encoding="utf-8", closefd=path != "-") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file can have
        raise RequestError(f"{what} {path} cannot be read as UTF-8 text ({why(error)}); give another file") from None


@contextlib.contextmanager
def _trace_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"trace file {path} cannot be written ({error.strerror})") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bias like 42=-1.5") from None


def _parser() -> Parser:
    parser = Parser(prog="eagle-run", description="Decode one prompt or chat message from a bundle.")
    add_model_options(parser, backend=None)  # None: auto, silently
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text that the model continues")
    source.add_argument("--message", metavar="TEXT", help="what the user says, for the bundle's chat template")
    source.add_argument("--messages", metavar="F", help='JSON file or -: a list of {"role": ..., "content": ...}')
    source.add_argument("--prompt-ids", action=Listed, of=int, metavar="1,2,3", help="token ids")
    source.add_argument("--prompt-file", metavar="F", help="text file, or - for standard input, that it continues")
    parser.add_argument("--system", metavar="TEXT", help="system message before --message")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of the answer (default 256)")
    parser.add_argument("--method", choices=NAMES, help=HELP)
    parser.add_argument("--ignore-eos", action="store_true", help="decode past end-of-sequence tokens")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="the answer ends before it; may be repeated"
    )
    parser.add_argument(
        "--stop-token-ids", action=Listed, of=int, default=[], metavar="1,2", help="more that end the text"
    )
    parser.add_argument("--trace", metavar="FILE", help="write one JSON line per cycle")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--worker",
        action="store_true",
        help="serve lines of JSON on standard input and output (docs/worker.md)",
    )
    limit = "with --worker: for weights, keys and values together"
    parser.add_argument("--memory-limit", type=size, metavar="4GB", help=limit)
    tree = parser.add_argument_group("draft tree (defaults: the bundle's)")
    tree.add_argument("--tree", choices=TREES, help="kind of tree; cost-aware is sized by what passes cost here")
    tree.add_argument("--total-token", type=int, metavar="N", help="nodes verified per forward pass, root included")
    tree.add_argument("--depth", type=int, metavar="N", help="growth passes: the tree has N + 1 levels below its root")
    tree.add_argument("--draft-top-k", type=int, metavar="K", help="beam, and children per node")
    sampling = parser.add_argument_group("sampling (defaults: the model's own, from the bundle's manifest)")
    kinds: dict[str, tuple[type, str]] = {
        "temperature": (float, "0: take the likeliest token"),
        "top-k": (int, "keep the k likeliest (0: all)"),
        "top-p": (float, "keep the smallest set of this mass (1: all)"),
        "min-p": (float, "drop tokens below this share of the likeliest (0: none)"),
        "repetition-penalty": (float, "over prompt and output (1: none)"),
        "presence-penalty": (float, "over the output (default 0)"),
        "frequency-penalty": (float, "over the output (default 0)"),
    }
    for name, (kind, text) in kinds.items():
        sampling.add_argument(f"--{name}", type=kind, metavar="X", help=text)
    sampling.add_argument("--seed", type=int, metavar="N", help="of the random numbers (default: a new one, reported)")
    sampling.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to a token's logit",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
