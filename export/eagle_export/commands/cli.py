"""eagle-export and its subcommands make (the default), engines and inspect. Heavy imports wait until the arguments have
been parsed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_runtime.bundle.manifest import Certificate
from eagle_runtime.commands.command import Listed, Parser, print_line, run_command, size
from eagle_runtime.machine.host import threads_allowed

if TYPE_CHECKING:
    from eagle_export.bundle import Exported
    from eagle_export.tensorrt.build import Built, BuiltEngine
    from eagle_export.writing.settings import Settings

# The keys of recipes.plan.RECIPES and of its tables, without heavy imports; a test compares them.
BACKENDS = ("cpu", "tensorrt-rtx", "tensorrt", "cuda")
LIBRARIES = ("tensorrt-rtx", "tensorrt")
COMMANDS = ("make", "engines", "inspect")
INTERRUPTED = {  # the message after a signal
    "make": "interrupted; no bundle was written, and the same command goes on with what is finished",
    "engines": "interrupted; no files were left",
}
PRECISIONS = (
    "fp32", "fp16", "int8", "int8-token", "int8-static", "int8-weight", "fp8", "int4", "int4-int8", "stored", "auto",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    given = with_command(sys.argv[1:] if argv is None else argv)
    interrupted = INTERRUPTED.get(given[0], "interrupted")
    return run_command(_parser(), given, lambda args: args.run(args), extra="export", interrupted=interrupted)


def with_command(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with the subcommand, which may be left out of `eagle-export make TARGET ...`."""
    named = argv and (
        argv[0] in COMMANDS or argv[0].split("=")[0] in ("-h", "--help", "--version", "--print-completion")
    )
    return [*argv] if named else ["make", *argv]


def run(args: argparse.Namespace) -> None:
    """Exports a bundle as the parsed arguments say, uploads it if they do, and prints a report on stdout."""
    from eagle_export.inspection.headers import fetched
    from eagle_export.reading.hub import make_repository, push

    if args.push is not None:
        make_repository(args.push)
    target, draft, sources = fetched(args.target, args.draft, Path(args.output))
    from eagle_export.base.errors import ExportError
    from eagle_export.base.memory import without_collection

    with without_collection():
        from eagle_export.bundle import export
    from eagle_export.checking.limits import FidelityError

    if (most := threads_allowed()) is not None:
        import torch

        torch.set_num_threads(most)
    started = time.perf_counter()
    try:
        done = export(target, draft, Path(args.output), _settings(args), sources)
    except FidelityError as error:
        raise ExportError(error.with_options) from None
    commit = None if args.push is None else push(done.bundle, args.push)
    for warning in done.warnings:
        print_line("eagle-export", f"warning: {warning}")
    if done.sensitivities and not args.json:
        from rich.console import Console

        from eagle_export.writing.automatic import table

        Console(width=120).print(table(done.sensitivities))
    if args.json:
        print(json.dumps(_bundle_report(done, commit, time.perf_counter() - started)))
        return
    head = done.manifest.head
    first = "" if done.head_check is None else f", first drafted tokens right {done.head_check.share:.0%}"
    shared = f", shared by both graphs: {', '.join(done.shared) or 'nothing'}" if head else ""
    print(
        f"{args.output}: {head.kind if head else 'no draft'} head, {args.precision}, {done.size / 1e6:.1f} MB"
        f"{shared}{_certified(done.manifest.certificate)}{first}"
    )
    if commit is not None:
        print(f"{args.push}@{commit}")


def _settings(args: argparse.Namespace) -> Settings:
    """The arguments, which have the names of the fields."""
    from eagle_export.writing.settings import Settings

    fields = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    if args.calibration is not None and args.calibration.is_file():
        given |= {"calibration": None, "calibrate": args.calibration}
    return Settings(**given)


def _bundle_report(done: Exported, commit: str | None, seconds: float) -> dict[str, object]:
    head, certificate = done.manifest.head, done.manifest.certificate
    return {
        "bundle": str(done.bundle),
        "commit": commit,
        "head": head and head.kind,
        "precision": done.manifest.precision,
        "taps": head and head.taps,
        "draft_vocab_size": head and head.draft_vocab_size,
        "shared_weights": done.shared,
        "bytes": done.size,
        "seconds": round(seconds, 3),
        "certificate": None if certificate is None else _figures(certificate),
        "first_token_share": done.head_check and done.head_check.share,
        "warnings": done.warnings,
        "sensitivities": [dataclasses.asdict(each) for each in done.sensitivities],
    }


def run_engines(args: argparse.Namespace) -> None:
    """Builds engines as the parsed arguments say, and prints a report on stdout."""
    from eagle_export.tensorrt.build import build_engines

    done = build_engines(
        Path(args.bundle),
        args.backend,
        args.compute_capability,
        context=args.context,
        weight_streaming=args.weight_streaming,
    )
    if args.json:
        print(json.dumps(_engines_report(done)))
        return
    for engine in done.built:
        print(f"{done.folder / engine.spec.file}: {_engine_line(engine)}")


def run_inspect(args: argparse.Namespace) -> None:
    """Prints what is known of a target and a head before anything is downloaded or computed."""
    from eagle_export.inspection.command import as_json
    from eagle_export.inspection.report import inspect, this_machine
    from eagle_export.inspection.tables import show

    report, machine = inspect(args.target, args.draft, args.context), this_machine()
    if args.json:
        print(json.dumps(as_json(report, machine)))
    else:
        show(report, machine)


def _engine_line(engine: BuiltEngine) -> str:
    spec = engine.spec
    line = f"{engine.seconds:.1f} s, {spec.size / 1e6:.1f} MB"
    if spec.kernels is not None and engine.layers == 0:
        line += f", {spec.kernels} kernels"
    elif spec.kernels is not None:
        line += (
            f", {spec.kernels} kernels for {engine.layers} decoder layer{'s' if engine.layers > 1 else ''}, "
            f"attention fused in {spec.fused_attention}"
        )
    return line


def _engines_report(done: Built) -> dict[str, object]:
    engines = {
        engine.name: {
            "file": engine.spec.file,
            "bytes": engine.spec.size,
            "seconds": round(engine.seconds, 3),
            "layers": engine.layers,
            "kernels": engine.spec.kernels,
            "fused_attention": engine.spec.fused_attention,
        }
        for engine in done.built
    }
    return {
        "folder": str(done.folder),
        "library": done.engines.library,
        "library_version": done.engines.library_version,
        "compute_capabilities": done.engines.compute_capabilities,
        "context": done.engines.context,
        "weight_streaming": done.engines.weight_streaming,
        "engines": engines,
    }


def _certified(certificate: Certificate | None) -> str:
    if certificate is None:
        return ""
    line = f"; agreement with the source {100 * certificate.agreement:.1f} %, KL {certificate.kl:.4f}"
    line += "" if certificate.within_limits else ", more than its precision should lose"
    return f"{line}, tau {certificate.tau:.2f}"


def _figures(certificate: Certificate) -> dict[str, object]:
    return {
        "agreement": certificate.agreement,
        "kl": certificate.kl,
        "tau": certificate.tau,
        "limits": dataclasses.asdict(certificate.limits),
        "within_limits": certificate.within_limits,
    }


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-export",
        description="Make a bundle, which runs without torch, or say what one would need.",
        epilog="eagle-export TARGET ... is short for eagle-export make TARGET ...; each subcommand has its own --help.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser(
        "make",
        prog="eagle-export",
        help="export a target and its draft head, or a target alone",
        description="Export a target and its draft head as a bundle, or a target alone.",
        epilog="eagle-export engines BUNDLE builds TensorRT engines of an exported bundle; eagle-export inspect TARGET "
        "[DRAFT] says what an export would need, from headers alone; see their --help.",
    )
    engines = commands.add_parser(
        "engines",
        help="build TensorRT engines of a bundle",
        description="Build the TensorRT engines of an exported bundle.",
    )
    inspect = commands.add_parser(
        "inspect",
        help="say what an export would need, from headers alone",
        description="Say from headers alone whether a target and a head can be exported and belong together, and what "
        "they need at each precision. Of models on the hub nothing else is downloaded.",
    )
    for part, run_it, add in (
        (make, run, _add_make),
        (engines, run_engines, _add_engines),
        (inspect, run_inspect, _add_inspect),
    ):
        add(part)
        part.set_defaults(run=run_it, program=part.prog)
    return parser


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="Hugging Face folder of the target (Llama, Qwen3, Gemma-3, ...: docs/families.md), its GGUF file, or its "
        "id on the hub, OWNER/NAME[@REVISION]",
    )
    parser.add_argument(
        "draft",
        nargs="?",
        metavar="DRAFT",
        help="folder or id of the head (kinds: docs/heads.md), or of a model with a multi-token-prediction layer, such "
        "as TARGET itself; without one, drafts come from the text, and from what the model held likely before",
    )
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the bundle to the hub too, as `hf auth login` allows"
    )
    parser.add_argument("-p", "--precision", choices=PRECISIONS, default="fp32", help="of the target")
    parser.add_argument(
        "--draft-precision",
        choices=PRECISIONS,
        help="of the head (default: the target's, but int4 for an int8 target on a CPU)",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="engine the bundle is for (default cpu)")
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument(
        "--calibration",
        type=Path,
        metavar="PATH",
        help="folder that eagle-calib wrote for these models, or a text or JSONL to record the target's inputs on "
        "(default: text that the target generates)",
    )
    inputs.add_argument(
        "--no-recording",
        dest="record",
        action="store_false",
        help="round weights to the nearest level, without recorded inputs: many times as fast, and less exact",
    )
    parser.add_argument(
        "--size", type=size, metavar="5GB", help="with -p auto: widen layers until all weights take this size"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave these layers of the target as traced, such as lm_head.weight or '*.0.mlp.*'; may be repeated",
    )
    parser.add_argument(
        "--cache-precision",
        choices=("int8",),
        help="keep a quantised target's keys and values in bytes: half of the memory on backend native, a quarter on "
        "cpu (default: the type in which it computes them)",
    )
    parser.add_argument(
        "--draft-vocab", type=int, metavar="N", help="keep the head's N most frequent tokens (needs --calibration)"
    )
    parser.add_argument(
        "--head-top-k",
        dest="draft_top_k",
        type=int,
        metavar="K",
        help="top tokens that the head returns per row: the most children of a tree's node (default 64)",
    )
    parser.add_argument(
        "--no-certificate", dest="certify", action="store_false", help="do not compare the bundle with the source"
    )
    limits = parser.add_argument_group("limits that a bundle must meet to be written (defaults: see docs/precision.md)")
    limits.add_argument(
        "--min-agreement",
        type=float,
        metavar="X",
        help="least share of tokens for which it ranks the same token first as its source; with -p auto and no --size, "
        "layers are widened until it should",
    )
    limits.add_argument("--max-kl", type=float, metavar="Y", help="largest mean KL from its source, in nats per token")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        help="folder that eagle-export wrote with -p fp16, int8, int8-weight, fp8, int4 or int4-int8",
    )
    parser.add_argument("--backend", choices=LIBRARIES, required=True, help="library that will run the engines")
    parser.add_argument(
        "--compute-capability",
        action=Listed,
        nargs="+",
        metavar="X.Y,X.Y",
        help="GPUs to build for with tensorrt-rtx, which needs none of them here (default 8.6,8.9,12.0; fp8: 8.9,12.0)",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and output (default: the model's own, at most 4096)"
    )
    parser.add_argument(
        "--weight-streaming", action="store_true", help="leave weights that the GPU has no room for on the host"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="Hugging Face folder of the target, or OWNER/NAME[@REVISION]")
    parser.add_argument("draft", nargs="?", metavar="DRAFT", help="folder or id of the head")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens that caches are counted for (default 4096, or all of them)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


if __name__ == "__main__":
    sys.exit(main())
