"""What each part of a block head is worth: heads of one target, trained on the same text for the same time, and how far
the target follows their drafts.

    python -m studies block_ablation WORK --minutes 20 [--pair tools/demo_pair] [--count 20] [-- --lr 0.0015]

What follows -- goes to each training.

WORK holds the answers that tools/train_demo_pair.py made (greedy.jsonl, sampled.jsonl, far.jsonl). Every head is
trained once, by eagle-train, into WORK/ablation, and exported there; a head that is there already is taken as it is.
The table goes to WORK/ablation/table.md:

    chain       the likeliest token at each position
    tree        the best 16 nodes of a dynamic tree (EAGLE-2); without transitions it is DDTree's, of marginals
    coupled     drafts are ranked with the random numbers that will draw the tokens (drafting/coupling.py)

The two layers have MLPs so small that they hold as many weights as the one layer, unless training begins from an
EAGLE-1 head (--init), whose layer is taken over. tau: tokens per forward pass of the target; ms: median time of growing
one draft.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, TreeShape, chain
from eagle_tools.markdown import markdown_table
from eagle_tools.questions import Question, read_questions
from eagle_train.cli import main as eagle_train

DATA = ("greedy.jsonl", "sampled.jsonl", "far.jsonl")
BLOCK, NODES, TOP_K = 8, 16, 8  # rows of the usual block; nodes of a tree, most children of one
TEMPERATURES = (0.6, 1.0)
PRECISIONS = ("fp32", "int8", "int4")
EAGLE = ("eagle1", "eagle3")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. parameters: of the head. draft_ms: median over cycles."""

    head: str
    parameters: int
    precision: str
    draft: str
    temperature: float
    tau: float
    draft_ms: float


def variants(target: Mapping[str, Any], kv_heads: int | None, whole: bool = False) -> dict[str, list[str]]:
    """Returns name -> options of eagle-train block. target: its config.json; two layers need it, for the size of their
    MLPs. kv_heads: of the heads; None takes the target's. whole: whether each of the two layers is as large as the
    one."""
    hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
    head_dim = int(target.get("head_dim") or hidden // heads)
    pairs = kv_heads or int(target.get("num_key_value_heads") or heads)
    attention = 2 * hidden * head_dim * (heads + pairs)
    units = max(8, int(target["intermediate_size"] / 2 - attention / (6 * hidden)))
    shared = [] if kv_heads is None else ["--kv-heads", str(kv_heads)]
    options: dict[str, list[str]] = {
        "block": [],
        "without transitions": ["--markov-rank", "0"],
        "two layers": ["--layers", "2", *([] if whole else ["--mlp", str(units)])],
        "4 rows": ["--block", "4"],
        "16 rows": ["--block", "16"],
    }
    return {name: [*shared, *own] for name, own in options.items()}


def train(work: Path, target: Path, folder: Path, options: Sequence[str]) -> None:
    """Train a block head into a folder, unless it is there. Raises RequestError if eagle-train fails."""
    if (folder / "model.safetensors").is_file():
        return
    data = [str(work / name) for name in DATA if (work / name).is_file()]
    if not data:
        raise RequestError(f"{work} has none of {', '.join(DATA)}; run tools/train_demo_pair.py data and answers first")
    again = ["--resume"] if (folder / "training").is_dir() else []
    if eagle_train(["block", str(target), "-o", str(folder), "--data", *data, *options, *again]):
        raise RequestError(f"the training of {folder.name} failed; the reason stands above")


def measured(
    model: EagleModel, questions: Sequence[Question], shape: TreeShape, temperature: float, coupled: bool, tokens: int
) -> tuple[float, float]:
    """Returns tau, and the median milliseconds of growing a draft."""
    cycles: list[Cycle] = []
    new = passes = 0
    for question in questions:
        own = {} if coupled else {"drafter": EagleDrafter(model.head, shape)}
        settings: dict[str, Any] = own or {"method": "eagle", "tree": shape}
        result = model.generate(
            question.turns[0],
            sampling=SamplingParams(temperature=temperature),
            seed=int(question.id),
            max_new_tokens=tokens,
            on_cycle=cycles.append,
            **settings,
        )
        new, passes = new + result.usage.new_tokens - 1, passes + result.usage.target_passes
    return new / max(1, passes), 1e3 * median(cycle.draft_s for cycle in cycles)


def rows_of(
    name: str, head: Path, precision: str, bundle: Path, questions: Sequence[Question], args: argparse.Namespace
) -> Iterator[Row]:
    """Export a head and yield what is measured of it: trees, of block heads also chains, and of the usual block head in
    fp32 the temperatures with and without coupling."""
    if not bundle.is_dir():
        export(args.pair / "target", head, bundle, Settings(precision=precision, certify=False))
    parameters = parameters_of(head)
    with EagleModel.load(bundle, threads=args.threads) as model:
        spec = model.manifest.head
        assert spec is not None
        top_k = min(TOP_K, spec.top_k)
        drafts = BLOCK if spec.block is None else spec.block.size - (not spec.block.anchor)
        tree = DynamicTree(NODES, drafts - 1, top_k)
        settings: list[tuple[str, TreeShape, float, bool]] = [("tree", tree, 0.0, True)]
        if spec.block is not None:
            settings.insert(0, ("chain", chain(drafts), 0.0, True))
        if (name, precision) == ("block", "fp32"):
            for temperature in TEMPERATURES:
                settings += [("tree", tree, temperature, False), ("tree, coupled", tree, temperature, True)]
        for draft, shape, temperature, coupled in settings:
            tau, ms = measured(model, questions, shape, temperature, coupled, args.max_new_tokens)
            yield Row(name, parameters, precision, draft, temperature, tau, ms)


def parameters_of(head: Path) -> int:
    """Returns the number of weights in a head's folder."""
    total = 0
    for path in head.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a dict)
                if name not in ("d2t", "t2d", "embed_tokens.weight"):
                    size = 1
                    for length in file.get_slice(name).get_shape():
                        size *= length
                    total += size
    return total


def table(rows: Sequence[Row]) -> str:
    """Returns the rows in Markdown."""
    titles = ["head", "weights", "precision", "draft", "T", "tau", "ms"]
    return markdown_table(
        titles,
        [
            [
                r.head,
                f"{r.parameters:,}",
                r.precision,
                r.draft,
                f"{r.temperature:g}",
                f"{r.tau:.2f}",
                f"{r.draft_ms:.2f}",
            ]
            for r in rows
        ],
    )


def report(args: argparse.Namespace) -> str:
    """Train, export and measure all heads; returns the table, and writes it. args.rest: options of each training."""
    target = args.pair / "target"
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    questions = read_questions(args.prompts or args.pair / "heldout.jsonl", args.count)
    out = args.work / "ablation"
    out.mkdir(exist_ok=True)
    budget = ["--minutes", str(args.minutes)] if args.steps is None else ["--steps", str(args.steps)]
    if args.threads is not None:
        budget += ["--threads", str(args.threads)]
    budget += args.rest
    known = variants(config, args.kv_heads, whole="--init" in args.rest)
    wanted = [*EAGLE, *known] if args.only is None else args.only
    if unknown := [name for name in wanted if name not in (*EAGLE, *known)]:
        raise RequestError(f"{unknown[0]!r} is not a head of the table; choose from {', '.join((*EAGLE, *known))}")
    heads = {name: args.pair / name for name in EAGLE if name in wanted and (args.pair / name).is_dir()}
    for name, options in known.items():
        if name not in wanted:
            continue
        heads[name] = out / name.replace(" ", "-")
        train(args.work, target, heads[name], [*budget, *options])
    rows: list[Row] = []
    for name, head in heads.items():
        for precision in args.precisions if name in ("block", "eagle3") else args.precisions[:1]:
            bundle = out / f"{head.name}-{precision}.bundle"
            rows += rows_of(name, head, precision, bundle, questions, args)
            (out / "table.md").write_text(table(rows), encoding="utf-8")
    return table(rows)


def add_options(parser: Parser) -> None:
    """What is trained, and on what it is measured."""
    parser.add_argument("work", type=Path, metavar="WORK", help="folder with the target's answers")
    parser.add_argument("--pair", type=Path, default=Path("tools/demo_pair"), help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the pair's heldout.jsonl")
    parser.add_argument("--only", action=Listed, metavar="A,B", help="rows of the table, by the name of their head")
    parser.add_argument(
        "--precisions", action=Listed, among=PRECISIONS, default=PRECISIONS, metavar="A,B", help="default: all"
    )
    parser.add_argument("--minutes", type=float, default=20, metavar="M", help="of training per head (default 20)")
    parser.add_argument("--steps", type=int, metavar="N", help="of training per head, instead of minutes")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="of the heads (default: as the target's)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="prompts (default 20)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="per prompt (default 96)")
    parser.add_argument("--threads", type=int, metavar="N", help="of training and decoding")
