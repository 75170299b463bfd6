"""eagle-export: parsers only. Heavy imports wait until the arguments are known to be sound."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.command import Parser, run_command
from eagle_runtime.manifest import Certificate

# The keys of recipes.RECIPES and of what stands there, known without heavy imports.
BACKENDS = ("cpu", "tensorrt-rtx", "tensorrt")
PRECISIONS = ("fp32", "fp16", "int8", "int8-static", "int8-weight", "int4")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    return run_command(_parser(), argv, run, extra="export", interrupted="interrupted; nothing was left behind")


def run(args: argparse.Namespace) -> None:
    """Export as told by the parsed arguments and report on stdout."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched that was not asked for
    from eagle_export.bundle import export

    started = time.perf_counter()
    done = export(
        Path(args.target),
        Path(args.draft),
        Path(args.output),
        precision=args.precision,
        draft_precision=args.draft_precision,
        backend=args.backend,
        draft_vocab=args.draft_vocab,
        calibration=None if args.calibration is None else Path(args.calibration),
        draft_top_k=args.draft_top_k,
        certify=args.certify,
    )
    for warning in done.warnings:
        print(f"eagle-export: warning: {warning}", file=sys.stderr)
    seconds = time.perf_counter() - started
    head, certificate = done.manifest.head, done.manifest.certificate
    if args.json:
        report = {
            "bundle": str(done.bundle),
            "head": head.kind,
            "precision": done.manifest.precision,
            "taps": head.taps,
            "draft_vocab_size": head.draft_vocab_size,
            "shared_weights": done.shared,
            "bytes": done.size,
            "seconds": round(seconds, 3),
            "certificate": None if certificate is None else _figures(certificate),
            "warnings": done.warnings,
        }
        print(json.dumps(report))
        return
    print(
        f"{args.output}: {head.kind} head, {args.precision}, {done.size / 1e6:.1f} MB, "
        f"shared by both graphs: {', '.join(done.shared) or 'nothing'}{_certified(certificate)}"
    )


def _certified(certificate: Certificate | None) -> str:
    if certificate is None:
        return ""
    return f"; agreement with the source {100 * certificate.agreement:.1f} %, tau {certificate.tau:.2f}"


def _figures(certificate: Certificate) -> dict[str, float]:
    return {"agreement": certificate.agreement, "kl": certificate.kl, "tau": certificate.tau}


def _parser() -> Parser:
    parser = Parser(prog="eagle-export", description="Export a target and its EAGLE draft head as a bundle.")
    parser.add_argument("target", metavar="TARGET", help="Hugging Face folder of the target (Llama architecture)")
    parser.add_argument("draft", metavar="DRAFT", help="folder of the EAGLE-1/2 or EAGLE-3 head")
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument("-p", "--precision", choices=PRECISIONS, default="fp32", help="of the target")
    parser.add_argument("--draft-precision", choices=PRECISIONS, help="of the head (default: the target's)")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="engine the bundle is for (default cpu)")
    parser.add_argument("--calibration", metavar="CALIB", help="folder that eagle-calib wrote for this pair")
    parser.add_argument(
        "--draft-vocab", type=int, metavar="N", help="keep the head's N most frequent tokens (needs --calibration)"
    )
    parser.add_argument(
        "--draft-top-k",
        type=int,
        default=10,
        metavar="K",
        help="most children per node a tree may ask for (default 10)",
    )
    parser.add_argument(
        "--no-certificate", dest="certify", action="store_false", help="do not compare the bundle with the source"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
