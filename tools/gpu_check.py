"""Checks eagle-edge on a machine with an NVIDIA GPU: runs the tests that need one, the certificates on every backend,
and the bench against PyTorch. tools/gpu_check.sh sets up the machine and calls it.

    python tools/gpu_check.py OUT [--pairs demo,grown] [--count N]

Every step is a process, whose output goes to OUT/<step>.log. When a step fails, the steps that need its output are left
out, and the others run. OUT/report.md names the hardware and contains all tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_export.tensorrt.precision import LEAST_FOR_FP8
from eagle_runtime.commands.command import Listed, Parser
from eagle_runtime.machine.nvidia import DeviceInfo, first_gpu
from eagle_tools.check_command import run_check
from eagle_tools.engines import find_engines

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "tools" / "demo_pair"
HELDOUT = DEMO / "heldout.jsonl"
HEADS = ("eagle1", "eagle3")
SHAPE = "--layers 16 --hidden 2048 --heads 32 --kv-heads 8 --head-dim 64 --intermediate 8192 --vocab 32000"
RTX_GPUS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # compute capabilities that TensorRT for RTX builds for
TENSORRT_PRECISIONS = ("int8", "int8-weight", "int4")  # besides fp16, of TensorRT and TensorRT for RTX
CALIBRATED = ("int8", "int4", "fp8")  # with recorded inputs, of one calibration
TIMED = "eager,compiled"  # ways of running PyTorch
NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Step:
    """A process. argv: Python's arguments. makes: the folder or file that it writes; needs: those of earlier steps."""

    name: str
    argv: tuple[str, ...]
    needs: tuple[Path, ...] = ()
    makes: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: exit status of the process, None if it was left out; 1 from a check or a bench if outputs differ."""

    name: str
    status: int | None
    seconds: float

    @property
    def word(self) -> str:
        """The outcome as the report names it."""
        return {None: "left out", 0: "ok"}.get(self.status, f"FAILED ({self.status})")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if something differs or fails, 2 without a GPU."""

    def check(args: argparse.Namespace) -> bool:
        gpu, out = first_gpu(), args.out.resolve()
        works = [name for name, finding in find_engines().items() if finding.works]
        steps = list(plan(out, gpu, works, args.pairs, args.count))
        outcomes = []
        for outcome in run(steps, out):
            outcomes.append(outcome)
            write_report(out, gpu, outcomes, done=len(outcomes) == len(steps))
        fine = all(outcome.status == 0 for outcome in outcomes)
        print(f"gpu_check: {'all well' if fine else 'NOT all well'}; see {out / 'report.md'}")
        return fine

    stopped = "interrupted; report.md has the finished steps"
    return run_check(_parser(), argv, check, extra="cuda,export,calib,bench", interrupted=stopped)


def plan(out: Path, gpu: DeviceInfo, works: Sequence[str], pairs: Sequence[str], count: int) -> Iterator[Step]:
    """Yields all steps. works: backends whose libraries load. CUDA is checked in any case."""
    libraries = [name for name in ("tensorrt-rtx", "tensorrt") if name in works]
    if gpu.compute_capability not in RTX_GPUS and "tensorrt-rtx" in libraries:
        libraries.remove("tensorrt-rtx")
    yield Step("machine", ("-m", "eagle_tools.doctor", "--json"))
    yield Step("tests", ("-m", "pytest", "-m", "gpu", "-rs", "-s", "--rootdir", str(ROOT), str(ROOT / "tests" / "gpu")))
    for pair in pairs:
        folder = DEMO if pair == "demo" else out / "grown"
        if pair == "grown":
            heads = [str(DEMO / head) for head in HEADS]
            argv = (str(ROOT / "tools" / "grow.py"), str(DEMO / "target"), *heads, "-o", str(folder))
            yield Step("grow", (*argv, "--dtype", "fp16", *SHAPE.split()), makes=folder)
        for head in HEADS:
            yield from _pair_steps(out, f"{pair}-{head}", folder, head, libraries, count, gpu)


def tensorrt_precisions(gpu: DeviceInfo) -> tuple[str, ...]:
    """The precisions besides fp16 in which the TensorRT libraries are checked on a GPU."""
    has_fp8 = tuple(map(int, gpu.compute_capability.split("."))) >= LEAST_FOR_FP8
    return (*TENSORRT_PRECISIONS, "fp8") if has_fp8 else TENSORRT_PRECISIONS


def _pair_steps(
    out: Path, name: str, folder: Path, head: str, libraries: Sequence[str], count: int, gpu: DeviceInfo
) -> Iterator[Step]:
    """Yields the steps of one target with one head. Its fp16 bundle serves all engines."""
    needs = () if folder == DEMO else (folder,)
    target = folder / "target"
    fp16, int4 = out / f"{name}-fp16", out / f"{name}-int4"
    source = ("-m", "eagle_export.commands.cli", str(target), str(folder / head))
    for bundle, precision in ((fp16, "fp16"), (int4, "int4")):
        options = ("-o", str(bundle), "-p", precision, "--backend", "cuda")
        yield Step(f"export-{bundle.name}", (*source, *options), needs, bundle)
    bundles = {"cuda": [fp16, int4]}
    if libraries:
        plain, calibration = out / f"{name}-fp32", out / f"{name}-calibration"
        yield Step(f"export-{plain.name}", (*source, "-o", str(plain), "--no-certificate"), needs, plain)
        calibrate = ("-m", "eagle_calib.cli", str(plain), "-o", str(calibration))
        yield Step(f"calibrate-{name}", calibrate, (plain,), calibration)
    for library in libraries:
        bundles[library] = [fp16]
        for precision in tensorrt_precisions(gpu):
            bundle = out / f"{name}-{precision}-{library}"
            options = ("-o", str(bundle), "-p", precision, "--backend", library)
            needed = precision in CALIBRATED
            given = ("--calibration", str(calibration)) if needed else ()
            reads = (*needs, calibration) if needed else needs
            yield Step(f"export-{bundle.name}", (*source, *options, *given), reads, bundle)
            bundles[library].append(bundle)
        for bundle in bundles[library]:
            build = ("-m", "eagle_export.commands.cli", "engines", str(bundle), "--backend", library)
            capability = ("--compute-capability", gpu.compute_capability) if library == "tensorrt-rtx" else ()
            yield Step(f"engines-{bundle.name}-{library}", (*build, *capability), (bundle,))
    for backend, folders in bundles.items():
        for bundle in folders:
            doctor = ("-m", "eagle_tools.doctor", str(bundle), "--backend", backend, "--json")
            yield Step(f"doctor-{bundle.name}-{backend}", doctor, (bundle,))
        bench = ("-m", "eagle_tools.bench", *map(str, folders), "--backend", backend, "--prompts", str(HELDOUT))
        files = [("--output", f"bench-{name}-{backend}.jsonl"), ("--markdown", f"bench-{name}-{backend}.md")]
        more = [word for option, file in files for word in (option, str(out / file))]
        more += ["--count", str(count), "--methods", "vanilla,eagle", "--max-new-tokens", str(NEW_TOKENS)]
        if backend == "cuda" and head == HEADS[-1]:
            more += ["--vs-pytorch", str(target), "--pytorch-methods", TIMED]
        yield Step(f"bench-{name}-{backend}", (*bench, *more), tuple(folders))


def run(steps: Sequence[Step], out: Path) -> Iterator[Outcome]:
    """Run one after the other; a line for each on stdout."""
    for step in steps:
        started = time.perf_counter()
        status = None
        if all(path.exists() for path in step.needs):
            with (out / f"{step.name}.log").open("w", encoding="utf-8") as log:
                argv = [sys.executable, *step.argv]
                done = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, cwd=out, check=False)
            status = done.returncode
            if status == 0 and step.makes is not None and not step.makes.exists():
                status = 1
        outcome = Outcome(step.name, status, time.perf_counter() - started)
        print(f"{outcome.name:45} {outcome.word:12} {outcome.seconds:7.1f} s", flush=True)
        yield outcome


def write_report(out: Path, gpu: DeviceInfo, outcomes: Sequence[Outcome], done: bool) -> None:
    """Write report.json and report.md of the steps so far."""
    fine = done and all(outcome.status == 0 for outcome in outcomes)
    steps = [{**dataclasses.asdict(outcome), "log": f"{outcome.name}.log"} for outcome in outcomes]
    report = {"gpu": dataclasses.asdict(gpu), "ok": fine, "finished": done, "steps": steps}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(page(out, gpu, outcomes, done), encoding="utf-8")


def page(out: Path, gpu: DeviceInfo, outcomes: Sequence[Outcome], done: bool) -> str:
    """Returns the report in Markdown: the GPU, the outcome of every step, the checks of every engine, the bench's
    tables."""
    failed = sum(outcome.status != 0 for outcome in outcomes)
    verdict = "all well" if not failed else f"{failed} of {len(outcomes)} steps differ, fail or were left out"
    lines = [f"# eagle-edge on {gpu.name}", "", f"{gpu}.", "", verdict + ("." if done else " so far."), ""]
    lines += ["| step | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {outcome.name} | {outcome.word} | {outcome.seconds:.1f} |" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.name.startswith("doctor-"):
            lines += ["", f"## {outcome.name}", "", *_checks(out / f"{outcome.name}.log")]
        table = out / f"{outcome.name}.md"
        if outcome.name.startswith("bench-") and table.is_file():
            lines += ["", f"## {outcome.name}", "", table.read_text(encoding="utf-8").rstrip()]
    return "\n".join(lines) + "\n"


def _checks(log: Path) -> list[str]:
    """Returns the checks that eagle-doctor --json printed, a line each; the end of the log if there are none."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "left out"
    try:
        checks = json.loads(text.strip().splitlines()[-1])["checks"]
    except (ValueError, KeyError, IndexError, TypeError):
        return ["```", *text.strip().splitlines()[-5:], "```"]
    words = {True: "ok", False: "DIFFERS", None: "-"}
    return [f"- {check['name']}: {words[check['ok']]}; {check['says']}" for check in checks]


def _parser() -> Parser:
    parser = Parser(prog="gpu_check", description="Check eagle-edge on this machine's NVIDIA GPU.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the report; it exists")
    parser.add_argument(
        "--pairs", action=Listed, among=("demo", "grown"), default=["demo", "grown"], metavar="A,B", help="default: all"
    )
    parser.add_argument("--count", type=int, default=16, metavar="N", help="prompts of a bench (default 16)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
