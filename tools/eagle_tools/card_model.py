"""Predicts what decoding takes on NVIDIA cards, from a bundle or from the shape of a model (docs/dev/card_model.md).

python -m eagle_tools.card_model BUNDLE
python -m eagle_tools.card_model --shape 8b --precision fp16 int8 int4 fp8 --tau 4.2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.commands.command import Parser, run_command
from eagle_tools.card.cards import CARDS, Assumed, Card
from eagle_tools.card.facts import PRECISIONS, SHAPES, Pair, pair_of_bundle, pair_of_shape, read_shape
from eagle_tools.card.kernels import recorded
from eagle_tools.card.model import Prediction, Tree, predict
from eagle_tools.markdown import markdown_table

BAR = 2.2  # times as fast as without drafts
NODES = (16, 32, 60)  # verified trees of the table
BY_NAME = {card.name: card for card in CARDS}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One pair on one card. smaller: the predictions with trees of NODES nodes."""

    pair: Pair
    prediction: Prediction
    smaller: dict[int, Prediction]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 for wrong input."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Prints tables, or with --json one object. Raises RequestError, BundleError."""
    if min(args.nodes - 1, args.depth, args.top_k, args.past) < 1:
        raise RequestError("--nodes must be 2 or more, and --depth, --top-k and --past 1 or more")
    assumed, tree = assumptions(args.assume), Tree(args.nodes, args.depth, args.top_k)
    pairs, tau = _pairs(args)
    tau = tau if args.tau is None else args.tau
    cards = [BY_NAME[name] for name in args.card] if args.card else CARDS
    rows = [_row(pair, card, tree, args.past, assumed, sampled=args.sampled) for pair in pairs for card in cards]
    if args.plot is not None:
        _plot(rows, tau, args.plot)
    if args.json:
        print(
            json.dumps(
                {
                    "pair": pairs[0].name,
                    "tree": dataclasses.asdict(tree),
                    "past": args.past,
                    "tau": tau,
                    "sampled": args.sampled,
                    "rows": [_json(row, tau) for row in rows],
                    "cards": [dataclasses.asdict(card) for card in cards],
                    "assumed": dataclasses.asdict(assumed),
                    "assumptions": assumed.lines(),
                }
            )
        )
    else:
        print(page(rows, cards, tau, assumed, tree, args.past), end="")


def assumptions(changes: Sequence[str]) -> Assumed:
    """Returns the assumptions with changes of the form name=number. Raises RequestError."""
    names = [field.name for field in dataclasses.fields(Assumed)]
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            values[name] = float(text)
        except ValueError:
            raise RequestError(f"--assume {change}: give a number, such as kernel_s=3e-6") from None
        if name not in names or not values[name] > 0:
            raise RequestError(f"--assume {change}: give one of {', '.join(names)}, and a number above 0")
    return Assumed(**values)


def _pairs(args: argparse.Namespace) -> tuple[list[Pair], float | None]:
    """Returns the pairs of a run, and the tau of the bundle's certificate."""
    if (args.bundle is None) == (args.shape is None):
        raise RequestError("give either a bundle or --shape")
    if args.bundle is None:
        shape = SHAPES.get(args.shape) or read_shape(Path(args.shape))
        return [pair_of_shape(args.shape, shape, name) for name in args.precision or PRECISIONS], None
    manifest = read_manifest(args.bundle)
    if manifest.head is None or manifest.target.graph.inputs["tree_mask"].dtype != "float16":
        raise RequestError(f"{args.bundle} must have a draft head and compute in fp16: -p fp16 --backend tensorrt-rtx")
    if args.precision:
        raise RequestError("--precision is for --shape; a bundle has its own")
    tau = None if manifest.certificate is None else manifest.certificate.tau
    return [pair_of_bundle(args.bundle.name, manifest)], tau


def _row(pair: Pair, card: Card, tree: Tree, past: int, assumed: Assumed, *, sampled: bool) -> Row:
    kernels = recorded(pair.precision, pair.target.layers, tree)
    trees = {nodes: dataclasses.replace(tree, nodes=nodes) for nodes in (*NODES, tree.nodes)}
    all_of = {n: predict(pair, kernels, card, one, past, assumed, sampled=sampled) for n, one in trees.items()}
    return Row(pair, all_of[tree.nodes], {nodes: all_of[nodes] for nodes in NODES})


def page(rows: Sequence[Row], cards: Sequence[Card], tau: float | None, assumed: Assumed, tree: Tree, past: int) -> str:
    """Returns the tables and the list of assumptions in Markdown. tau: None leaves the speed-ups out."""
    pair = rows[0].pair
    trees = f"{tree.nodes}/{tree.depth}/{tree.top_k}"
    at = "" if tau is None else f", tau {tau:.2f}"
    text = f"Predicted, not measured: {pair.name}, trees {trees} (nodes/levels/children), {past} tokens before{at}.\n\n"
    titles = ["precision", "card", "GB", "plain ms", *(f"{n} nodes ms" for n in NODES), "draft ms", "6 calls ms"]
    titles[-1] = f"{tree.depth + 1} calls ms"
    titles += ["token ms", "cycle ms", "older cycle ms", f"tau for {BAR}x: {', '.join(map(str, NODES))} nodes"]
    titles += [] if tau is None else ["speed-up", "tokens/s"]
    text += markdown_table(titles, [_cells(row, tau) for row in rows]) + "\n"
    new, old = rows[0].prediction.traffic, rows[0].prediction.old_traffic
    moved = [
        [name, str(one.calls), str(one.syncs), str(one.copies), f"{one.up / 1e3:,.1f}", f"{one.down / 1e3:,.1f}"]
        for name, one in (("one call drafts the tree", new), ("older: a call for each level, logits to the host", old))
    ]
    text += markdown_table(["per cycle", "engine calls", "waits", "copies", "kB up", "kB down"], moved) + "\n"
    figures = [
        [
            card.name,
            card.capability,
            f"{card.memory / 1e9:.0f}",
            f"{card.bandwidth / 1e9:.0f}",
            *(f"{card.compute[kind] / 1e12:.0f}" if kind in card.compute else "-" for kind in ("fp16", "int8", "fp8")),
            f"{card.bus / 1e9:.0f}",
            card.source,
        ]
        for card in cards
    ]
    text += markdown_table(
        ["card", "compute", "GB", "GB/s", "fp16 T/s", "int8 T/s", "fp8 T/s", "PCIe GB/s", "published"], figures
    )
    return text + "\nAssumed:\n\n" + "".join(f"- {line}\n" for line in assumed.lines())


def _cells(row: Row, tau: float | None) -> list[str]:
    one = row.prediction
    cells = [one.precision, one.card, f"{one.gigabytes:.1f}"]
    if not one.runs or not one.fits:
        why = "no such kernels" if not one.runs else "does not fit"
        return [*cells, why, *["-"] * (len(NODES) + 6 + 2 * (tau is not None))]
    numbers = [
        one.plain,
        *(other.verify for other in row.smaller.values()),
        one.draft,
        one.six,
        one.token,
        one.cycle,
        one.old_cycle,
    ]
    cells += [
        *(f"{1e3 * seconds:.2f}" for seconds in numbers),
        ", ".join(f"{other.tau_for(BAR):.2f}" for other in row.smaller.values()),
    ]
    return cells if tau is None else [*cells, f"{one.speed_up(tau):.2f}", f"{tau / one.cycle:.0f}"]


def _json(row: Row, tau: float | None) -> dict[str, Any]:
    """Milliseconds, as in the table."""
    one = row.prediction
    seconds = ("plain", "verify", "draft", "six", "token", "cycle", "old_cycle")
    return {
        **{key: value for key, value in dataclasses.asdict(one).items() if key not in seconds},
        **{f"{key}_ms": 1e3 * getattr(one, key) for key in seconds},
        "verify_nodes_ms": {str(nodes): 1e3 * other.verify for nodes, other in row.smaller.items()},
        "tau_for_bar": {str(nodes): other.tau_for(BAR) for nodes, other in row.smaller.items()},
        "speed_up": None if tau is None else one.speed_up(tau),
    }


def _plot(rows: Sequence[Row], tau: float | None, path: Path) -> None:
    from eagle_tools.plots import speed_up_plot

    if tau is None:
        raise RequestError("--plot needs --tau, or a bundle with a certificate")
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        one = row.prediction
        if one.runs and one.fits:
            bars.setdefault(one.precision, {})[one.card] = one.speed_up(tau)
    speed_up_plot(bars, BAR, f"predicted speed-up at tau {tau:.2f}", path)


def _parser() -> Parser:
    parser = Parser(
        prog="eagle_tools.card_model",
        description="What decoding takes on NVIDIA cards, predicted from the bytes and operations of a pair's graphs.",
    )
    parser.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE", help="a pair exported for TensorRT")
    parser.add_argument("--shape", metavar="S", help=f"{' or '.join(SHAPES)}, or a JSON file with a shape's fields")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), help="of a shape (default: all)")
    parser.add_argument("--card", nargs="+", choices=list(BY_NAME), help="default: all")
    parser.add_argument(
        "--tau", type=float, metavar="X", help="tokens per cycle (default: of the bundle's certificate)"
    )
    parser.add_argument("--nodes", type=int, default=60, metavar="N", help="nodes of a tree (default 60)")
    parser.add_argument("--depth", type=int, default=5, metavar="D", help="levels after the first (default 5)")
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="children of a node (default 10)")
    parser.add_argument("--past", type=int, default=1000, metavar="N", help="tokens before (default 1000)")
    parser.add_argument("--sampled", action="store_true", help="at a temperature above 0")
    parser.add_argument("--assume", nargs="+", default=[], metavar="NAME=X", help="change assumptions: kernel_s=3e-6")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="bars of the speed-ups; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
