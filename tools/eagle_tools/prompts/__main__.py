"""Make prompts for `eagle-train generate`: questions that a target asks itself, and templates over open text and over
articles that it writes.

    python -m eagle_tools.prompts headers TARGET --count 4000 -o headers.jsonl
    eagle-train generate TARGET --data headers.jsonl -o asked.jsonl
    python -m eagle_tools.prompts articles TARGET --count 800 -o requests.jsonl
    eagle-train generate TARGET --data requests.jsonl -o articles.jsonl
    python -m eagle_tools.prompts mix TARGET --headers headers.jsonl --asked asked.jsonl \\
        --articles articles.jsonl --held-out QUESTIONS/*.jsonl --count 6000 --shards 6 --evaluation 64 -o prompts

writes prompts/eval.jsonl and prompts/train-00.jsonl, ...; rows are in random order, so every file has all kinds and
temperatures. The same options and packages give the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_calib.text_files import json_lines
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import replacing
from eagle_runtime.commands.command import Parser, run_command
from eagle_tools.prompts.articles import article_prompts, articles
from eagle_tools.prompts.mix import mixed
from eagle_tools.prompts.own import headers, questions
from eagle_tools.prompts.passages import functions, prose, standard_library
from eagle_train.data import load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    return run_command(_parser(), argv, lambda args: args.run(args), extra="train", interrupted="interrupted")


def _headers(args: argparse.Namespace) -> None:
    _write(args.output, headers(load_tokenizer(args.target, "headers"), args.count, args.seed))


def _articles(args: argparse.Namespace) -> None:
    _write(args.output, article_prompts(args.count, args.seed))


def _mix(args: argparse.Namespace) -> None:
    if args.shards < 1 or not 0 <= args.evaluation < args.count:
        raise RequestError("shards must be 1 or more, and evaluation below count")
    if len(args.headers) != len(args.asked):
        raise RequestError(f"there are {len(args.headers)} --headers but {len(args.asked)} --asked; give one for each")
    held_out = [text for path in args.held_out for row in _rows(path) for text in _texts(row)]
    tokenizer = load_tokenizer(args.target, "mix")
    own = [
        row for pair in zip(args.headers, args.asked, strict=True) for row in questions(tokenizer, *map(_rows, pair))
    ]
    passages = [*prose(args.modules), *(text for path in args.articles for text in articles(_rows(path)))]
    rows = mixed(own, passages, functions(args.modules), held_out, args.count, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    rest = rows[args.evaluation :]
    if args.evaluation:
        _write(args.output / "eval.jsonl", rows[: args.evaluation])
    for number in range(args.shards):
        _write(args.output / f"train-{number:02}.jsonl", rest[number :: args.shards])
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in sorted({row["kind"] for row in rows})}
    print(f"{args.output}: {len(rows)} prompts, {len(own)} of the target's own looked at; {kinds}")


def _texts(row: dict[str, Any]) -> list[str]:
    """Returns the questions of a row, whatever its form."""
    messages = row.get("messages", [])
    return [*row.get("turns", []), *(message["content"] for message in messages if message["role"] == "user")]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return (row for _, row in json_lines(path, RequestError, "correct the file"))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with replacing(path) as new, new.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _parser() -> Parser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = Parser(
        prog="eagle_tools.prompts",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    first = commands.add_parser("headers", help="where the target's own questions begin, for eagle-train generate")
    first.set_defaults(run=_headers)
    second = commands.add_parser("mix", help="prompts of all kinds, in random order, without repetitions")
    second.set_defaults(run=_mix)
    several: dict[str, Any] = {"type": Path, "action": "extend", "nargs": "+", "default": [], "metavar": "FILE"}
    second.add_argument("--headers", help="what `headers` wrote", **several)
    second.add_argument("--asked", help="what eagle-train made of each of them", **several)
    second.add_argument("--articles", help="what eagle-train made of what `articles` wrote", **several)
    meaning = "questions to keep away from: JSONL of turns or messages"
    second.add_argument("--held-out", help=meaning, **several)
    meaning = "Python modules to take docstrings and functions of (default: Python's own)"
    second.add_argument("--modules", type=Path, default=standard_library(), metavar="FOLDER", help=meaning)
    second.add_argument("--shards", type=int, default=1, metavar="N", help="files to train on (default 1)")
    second.add_argument("--evaluation", type=int, default=0, metavar="N", help="prompts of eval.jsonl (default 0)")
    third = commands.add_parser("articles", help="requests for articles to be asked about, for eagle-train generate")
    third.set_defaults(run=_articles)
    for command in (first, second, third):
        command.add_argument("target", type=Path, metavar="TARGET", help="Hugging Face folder with a chat template")
        command.add_argument("--count", type=int, required=True, metavar="N")
        command.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
        command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    return parser


if __name__ == "__main__":
    sys.exit(main())
