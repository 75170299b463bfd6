"""The command eagle-calib: records the inputs of the linear layers of an fp32 bundle."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle_calib.calibration import Input
from eagle_runtime.commands.command import Parser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    return run_command(_parser(), argv, run, extra="cpu,calib", interrupted="interrupted; no files were left")


def run(args: argparse.Namespace) -> None:
    """Calibrates as the parsed arguments say, and prints a report on stdout."""
    from eagle_calib.calibrate import calibrate

    started = time.perf_counter()
    done = calibrate(
        Path(args.bundle),
        Path(args.output),
        data=Path(args.data) if args.data is not None else None,
        threads=args.threads,
        max_tokens=args.tokens,
    )
    seconds = time.perf_counter() - started
    figures = {graph: _figures(inputs) for graph, inputs in done.graphs.items()}
    if args.json:
        report = {
            "calibration": args.output,
            "tokens": {"prefilled": done.tokens.prefilled, "verified": done.tokens.verified},
            "target": figures["target"],
            "draft": figures.get("draft"),
            "seconds": round(seconds, 3),
        }
        print(json.dumps(report))
        return
    print(f"{args.output}: {done.tokens.prefilled} tokens of text, {done.tokens.verified} tree nodes verified")
    for graph, counts in figures.items():
        print(f"{graph:7}" + ", ".join(f"{count} {name}" for name, count in counts.items()))


def _figures(inputs: Sequence[Input]) -> dict[str, int]:
    """Counts for the report. rows: of the input with the most; the LM head reads fewer rows than the other layers."""
    layers = sum(len(item.weights) for item in inputs)
    return {"layers": layers, "inputs": len(inputs), "rows": max(item.observed.rows for item in inputs)}


def _parser() -> Parser:
    parser = Parser(prog="eagle-calib", description="Record the inputs of the linear layers of an fp32 bundle.")
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by eagle-export -p fp32")
    parser.add_argument("-o", "--output", required=True, metavar="CALIB", help="folder to write")
    parser.add_argument(
        "--data", metavar="FILE", help="UTF-8 text, or JSONL with turns, text or ids (default: the package's text)"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="tokens of the text to read (default 8192)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
