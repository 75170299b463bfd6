"""eagle-precision: the command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_calib.texts import read_windows
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser, run_command
from eagle_tools.bench.machine import physical_cores
from eagle_tools.bench.peers import Peers, check_peers, converted_peers, load_peers, stored_target
from eagle_tools.bench.plan import check_vocabularies
from eagle_tools.bench.rows import precision_name
from eagle_tools.peers.engine import ALL_FORMATS, formats_of
from eagle_tools.precision.closeness import Passage, Scorer, compare_texts, own_text
from eagle_tools.precision.rows import Row, rows_of, tables
from eagle_tools.precision.speed import CONTEXT, NODES, Answerer, BundleAnswers, PeerAnswers, time_models
from eagle_tools.questions import Question, prompt_ids, read_questions

WINDOW = 512  # most tokens of a held-out text that are read as one context


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Measure what the arguments name, print the tables, write tables, rows and plot."""
    import matplotlib  # noqa: F401  (a missing package is reported before the work)

    folder, bundles = Path(args.output), [Path(bundle) for bundle in args.bundles]
    _check(args, folder)
    questions = read_questions(Path(args.prompts), args.count)
    rows = _measured(args, bundles, questions)
    text = tables(rows)
    print(text, end="")
    from eagle_tools.plots import precision_plot

    folder.mkdir(exist_ok=True)
    (folder / "precision.md").write_text(text, encoding="utf-8")
    lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rows]
    (folder / "precision.jsonl").write_text("".join(lines), encoding="utf-8")
    points = [(row.name, row.eagle_tokens_per_s, _agreement(row)) for row in rows]
    precision_plot(points, folder / "precision.png")


def _measured(args: argparse.Namespace, bundles: Sequence[Path], questions: Sequence[Question]) -> list[Row]:
    from rich.console import Console
    from rich.progress import Progress

    threads = args.threads or physical_cores()
    compared = args.peer_target is not None
    formats = formats_of(args.peer_formats, ALL_FORMATS, "eagle-precision") if compared else ()
    source = check_peers(args.peer_target, formats) if compared else None
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(EagleModel.load(bundle, threads=args.threads)) for bundle in bundles]
        check_vocabularies(bundles, [model.manifest for model in models])
        reference = models[0]
        longest = min(WINDOW, *(model.context for model in models))
        passages = []
        if args.text is not None:
            vocab_size = reference.manifest.target.vocab_size
            windows = read_windows(args.text, reference.text, vocab_size, longest, args.tokens)
            passages = [Passage(tuple(ids)) for ids in windows if len(ids) > 1]  # one token predicts nothing
            if not passages:
                raise RequestError(f"{args.text} holds no text of two tokens or more; give held-out text")
        prompts = [prompt_ids(reference, question.turns[0]) for question in questions]
        progress = stack.enter_context(Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()))
        peers: Peers | None = None
        if source is not None:
            if source.config["vocab_size"] != reference.manifest.target.vocab_size:
                raise RequestError(
                    f"{args.peer_target} has another vocabulary than {bundles[0]}; give the bundles' source"
                )
            made = converted_peers(source, formats, args.peer_folder, threads, progress.console.print)
            room = max(map(len, prompts)) + max(args.max_new_tokens, args.own_tokens)
            context = min(max(WINDOW, room, CONTEXT + NODES), reference.context)
            peers = load_peers(source, made, threads, context, stack, progress.console.print)
        task = progress.add_task("writing the reference's own text", total=args.own_tokens)
        own = own_text(
            reference, prompts, args.own_tokens, args.seed, args.own_temperature, lambda n: progress.advance(task, n)
        )
        scorers: list[Scorer] = [*models, *(peers.workers.values() if peers else ())]
        task = progress.add_task("reading", total=len(own) + len(passages))
        by_own, by_text = (compare_texts(scorers, texts, lambda: progress.advance(task)) for texts in (own, passages))
        answerers: list[Answerer] = [BundleAnswers(model) for model in models]
        weights, names, sizes = source.num_weights() if source else _num_weights(reference), [], []
        for bundle, model in zip(bundles, models, strict=True):
            names.append((bundle.absolute().name, precision_name(model.manifest)))
            sizes.append(stored_target(bundle, model.manifest.target.graph.file, weights))
        for form, worker in peers.workers.items() if peers else ():
            assert peers is not None
            answerers.append(PeerAnswers(worker, list(peers.contenders_of(form)), reference))
            names.append((str(form), form.name))
            sizes.append(peers.sizes[form.name, form.engine])
        task = progress.add_task("decoding", total=len(questions))
        speeds = time_models(answerers, questions, args.max_new_tokens, lambda: progress.advance(task))
    return rows_of(names, sizes, by_own, by_text, speeds)


def _agreement(row: Row) -> float:
    share = row.own_agreement if row.own_agreement is not None else row.text_agreement
    assert share is not None
    return share


def _num_weights(reference: EagleModel) -> int | None:
    """Returns the number of the target's weights, which only an fp32 bundle's manifest shows."""
    if reference.manifest.precision["target"] != "fp32":
        return None
    return sum(math.prod(map(int, spec.shape)) for spec in reference.manifest.target.graph.weights.values())


def _check(args: argparse.Namespace, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} exists and is not a folder; choose another name")
    if not folder.absolute().parent.is_dir():
        raise RequestError(f"{folder.absolute().parent} does not exist; create it first")
    for name, least in (("max_new_tokens", 1), ("own_tokens", 0), ("tokens", 2)):
        if getattr(args, name) < least:
            raise RequestError(f"{name} is {getattr(args, name)}, but must be {least} or more")
    if not 0 <= args.own_temperature < math.inf:
        raise RequestError(f"own_temperature is {args.own_temperature}, but must be a number, 0 or more")
    if not args.own_tokens and args.text is None:
        raise RequestError("there is no text to compare on; give --text, or --own-tokens above 0")
    if args.peer_formats is not None and args.peer_target is None:
        raise RequestError("peers run the weights that the bundles were made from; give --peer-target TARGET too")


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-precision",
        description="How close bundles of one pair, and other engines on the same weights, are to the first bundle, "
        "and how fast.",
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument("--text", type=Path, metavar="FILE", help='held-out text, or JSONL with "text" or "ids"')
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="write precision.md, .jsonl, .png there"
    )
    parser.add_argument("--count", type=int, metavar="N", help="take the first N prompts (default: all)")
    parser.add_argument(
        "--own-tokens", type=int, default=2000, metavar="N", help="tokens that the first bundle writes (default 2000)"
    )
    parser.add_argument("--own-temperature", type=float, default=1.0, metavar="T", help="of that text (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of that text")
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="tokens of the held-out text to read (default 8192)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default 128)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    parser.add_argument(
        "--peer-target", type=Path, metavar="TARGET", help="folder of the target, to run in other engines, or GGUF file"
    )
    parser.add_argument(
        "--peer-formats", action=Listed, metavar="A,B", help="as in llama.cpp/q4_0 (default: all of engines here)"
    )
    parser.add_argument("--peer-folder", type=Path, metavar="F", help="keep converted weights there (default: a cache)")
    return parser
