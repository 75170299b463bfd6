"""Makes the kit that `eagle-doctor --card` checks a GPU with (docs/backends.md): small bundles in some precisions with
engines for GeForce RTX 30, 40 and 50, and what the CPU computes with them.

    python -m eagle_tools.card_kit -o KIT --archive KIT.tar.xz          from the source tree; needs no GPU
"""

from __future__ import annotations

import argparse
import lzma
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from eagle_calib.replay import forced_logits, golden_prompts
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.commands.command import Listed, Parser, run_command
from eagle_tools.card.check import BACKEND, CONTEXT
from eagle_tools.card.kit import KIT, REQUIREMENTS, VERSION, Kit, Reference, write_references

PAIR = Path(__file__).resolve().parents[1] / "demo_pair"
HEAD = "eagle3"
PRECISIONS = ("fp16", "int8", "int8-weight", "int4", "fp8")
LOGIT_ROWS = 16  # of logits for each prompt
SMALL = 100_000_000  # bytes that an archive should stay below
WINDOW = 64 << 20  # bytes in which the archive's compression looks for repetitions


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 for wrong input."""
    return run_command(_parser(), argv, run, extra="dev", interrupted="interrupted; the kit is not complete")


def run(args: argparse.Namespace) -> None:
    """Makes the kit and prints its size. Raises RequestError, ExportError, BackendError."""
    if args.output.exists() and any(args.output.iterdir()):
        raise RequestError(f"{args.output} is not empty; name a new folder")
    if args.archive is not None and args.archive.exists():
        raise RequestError(f"{args.archive} exists; name a new file")
    make_kit(args.output, args.target, args.draft, args.precision)
    size = sum(path.stat().st_size for path in args.output.rglob("*") if path.is_file())
    print(f"{args.output}: {', '.join(args.precision)}, {size / 1e6:.1f} MB")
    if args.archive is not None:
        pack(args.output, args.archive)
        size = args.archive.stat().st_size
        hint = "" if size < SMALL else "; leave out precisions to make it smaller"
        print(f"{args.archive}: {size / 1e6:.1f} MB{hint}")


def make_kit(folder: Path, target: Path, draft: Path, precisions: Sequence[str], context: int = CONTEXT) -> Kit:
    """Make a kit of a pair in a new or empty folder. context: tokens that its engines serve."""
    from eagle_calib.calibrate import calibrate
    from eagle_export.bundle import export
    from eagle_export.tensorrt.build import build_engines
    from eagle_export.writing.settings import Settings

    folder.mkdir(parents=True, exist_ok=True)
    libraries, served = set(), {}
    with tempfile.TemporaryDirectory() as scratch:
        calibration = None
        if set(precisions) & {"int8", "fp8"}:
            plain, calibration = Path(scratch) / "fp32", Path(scratch) / "calibration"
            export(target, draft, plain, Settings(certify=False))
            calibrate(plain, calibration)
        for precision in precisions:
            of = calibration if precision in ("int8", "fp8") else None
            bundle = folder / precision
            export(target, draft, bundle, Settings(precision=precision, backend=BACKEND, calibration=of, certify=False))
            built = build_engines(bundle, BACKEND, context=context)
            served[precision] = built.engines.compute_capabilities
            libraries.add((built.engines.library, built.engines.library_version))
            with EagleModel.load(bundle, backend="cpu", context=context) as model:
                write_references(folder / f"{precision}.npz", references(model))
    pair = f"{target.parent.name}/{target.name}, {draft.name}"
    (library, library_version), *others = libraries
    assert not others, "one process builds with one version"
    (folder / REQUIREMENTS).write_text(f"{library}=={library_version}\n", encoding="utf-8")
    kit = Kit(VERSION, version("eagle-edge"), pair, served, f"{library} {library_version}", hashes(folder))
    (folder / KIT).write_text(kit.to_json(), encoding="utf-8")
    return kit


def references(model: EagleModel) -> list[Reference]:
    """Returns what this model computes: a greedy continuation of each golden prompt, with its logits."""
    prompts = golden_prompts(model.text, model.manifest.target.vocab_size, model.context // 2)
    made = []
    for prompt in prompts:
        result = model.generate(
            prompt, method="vanilla", max_new_tokens=LOGIT_ROWS, ignore_eos=True, sampling=SamplingParams()
        )
        logits = forced_logits(model, prompt, result.token_ids)
        made.append(Reference(np.array(prompt), np.array(result.token_ids), logits.astype(np.float32)))
    return made


def hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a kit but its list."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / KIT)
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}


def pack(folder: Path, archive: Path) -> None:
    """Write a kit as a .tar.xz. Its window spans whole engines, which hold their weights once for each profile."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": WINDOW}]
    with lzma.open(archive, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, folder.name)


def _parser() -> Parser:
    parser = Parser(prog="eagle_tools.card_kit", description="Make the kit that eagle-doctor --card checks a GPU with.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="KIT", help="a new folder")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="also pack it into FILE.tar.xz")
    parser.add_argument("--target", type=Path, default=PAIR / "target", metavar="T", help="default: the demo pair's")
    parser.add_argument("--draft", type=Path, default=PAIR / HEAD, metavar="D", help="default: the demo pair's EAGLE-3")
    parser.add_argument(
        "--precision", action=Listed, among=PRECISIONS, default=list(PRECISIONS), metavar="A,B", help="default: all"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
