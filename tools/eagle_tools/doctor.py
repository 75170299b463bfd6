"""eagle-doctor: which engines work on this machine, and whether a bundle still does here what its certificate says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime import EagleModel, Result
from eagle_runtime.command import Parser, run_command
from eagle_runtime.manifest import Certificate, Manifest, bundle_file, file_sha256, read_manifest
from eagle_runtime.replay import compare, golden_prompts, mean_tau, replay
from eagle_tools.engines import find_engines

AGREEMENT_LOST = 0.005  # of all tokens: a bundle that ranks fewer of the source's first is not what was certified
TAU_LOST = 0.05  # of tau: near ties fall otherwise on other processors, and cost no more than this


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. ok: None where there is nothing to hold `found` against. fatal: whether the bundle should
    not be used if it is not ok."""

    name: str
    ok: bool | None
    says: str
    found: float | None = None
    certified: float | None = None
    fatal: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if the machine or the bundle is not fit, 2 for input that is wrong."""
    fit = True

    def run(args: argparse.Namespace) -> None:
        nonlocal fit
        fit = report_machine(args.json) if args.bundle is None else report_bundle(args)

    status = run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")
    return status or (0 if fit else 1)


def report_machine(as_json: bool) -> bool:
    """Print what was found of every engine; returns whether bundles can be run at all."""
    engines = find_engines()
    if as_json:
        rows = [{"name": name, **dataclasses.asdict(found)} for name, found in engines.items()]
        print(json.dumps({"backends": rows, "ok": engines["cpu"].works}))
    else:
        for name, found in engines.items():
            print(f"{name:12}  {'works' if found.works else '-':5}  {found.says}")
    return engines["cpu"].works


def report_bundle(args: argparse.Namespace) -> bool:
    """Print one line per check as it is done; returns whether the bundle is fit."""
    started = time.perf_counter()
    done = []
    for check in check_bundle(Path(args.bundle), args.backend):
        done.append(check)
        if not args.json:
            word = {True: "ok", False: "differs", None: "-"}[check.ok]
            print(f"{check.name:11}  {word:7}  {check.says}", flush=True)
    fit = all(check.ok is not False for check in done if check.fatal)
    if args.json:
        rows = [dataclasses.asdict(check) for check in done]
        seconds = round(time.perf_counter() - started, 3)
        print(json.dumps({"bundle": str(args.bundle), "checks": rows, "ok": fit, "seconds": seconds}))
    return fit


def check_bundle(bundle: Path, backend: str = "cpu") -> Iterator[Check]:
    """All checks of a bundle; a file that was changed ends them. Raises BundleError, BackendError."""
    manifest = read_manifest(bundle)
    changed = [name for name, digest in manifest.files.items() if file_sha256(bundle_file(bundle, name)) != digest]
    if changed:
        are = "is not the file that was" if len(changed) == 1 else "are not the files that were"
        yield Check("files", False, f"{', '.join(changed)} {are} exported; copy or export the bundle again")
        return
    yield Check("files", True, f"{len(manifest.files)} files have their SHA-256")
    started = time.perf_counter()
    with EagleModel.load(bundle, backend=backend, check_hashes=False) as model:
        yield Check("engine", True, f"{backend}: {_names(manifest)}, loaded in {time.perf_counter() - started:.1f} s")
        certificate = manifest.certificate
        if certificate is None:
            yield Check("certificate", None, "none; export without --no-certificate to have the source to compare with")
            prompts = golden_prompts(model.text, manifest.target.vocab_size, model.context)
        else:
            prompts = [list(golden.prompt) for golden in certificate.prompts]
        plain, eagle = replay(model, prompts, "vanilla"), replay(model, prompts, "eagle")
        yield _lossless(plain, eagle)
        if certificate is not None:
            yield from _as_certified(model, certificate)
        yield _tau(mean_tau(eagle), certificate)


def _names(manifest: Manifest) -> str:
    target, draft = manifest.precision["target"], manifest.precision["draft"]
    return f"{manifest.head.kind} head, {target if target == draft else f'{target}, its head {draft}'}"


def _lossless(plain: Sequence[Result], eagle: Sequence[Result]) -> Check:
    alike = sum(one.token_ids == other.token_ids for one, other in zip(plain, eagle, strict=True))
    count = len(plain)
    says = f"{alike} of {count} golden prompts go on with the same tokens with drafts and without"
    return Check("lossless", alike == count, says, found=alike / count)


def _as_certified(model: EagleModel, certificate: Certificate) -> Iterator[Check]:
    here = compare(model, certificate.prompts)
    yield Check(
        "agreement",
        here.agreement >= certificate.agreement - AGREEMENT_LOST,
        f"{here.agreement:.1%} of the source's tokens are ranked first (certified: {certificate.agreement:.1%})",
        here.agreement,
        certificate.agreement,
    )
    yield Check("logits", None, f"the source's top logits are met to {here.logit_error:.2g}", here.logit_error)


def _tau(tau: float, certificate: Certificate | None) -> Check:
    says = f"{tau:.2f} tokens per pass of the target"
    if certificate is None:
        return Check("tau", None, says, tau)
    near = tau >= certificate.tau * (1 - TAU_LOST)
    return Check("tau", near, f"{says} (certified: {certificate.tau:.2f})", tau, certificate.tau, fatal=False)


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-doctor",
        description="Which engines work on this machine and why the others do not; with a bundle, whether its files "
        "are whole and it does here what its certificate says.",
    )
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--backend", default="cpu", help="engine to run the bundle on (default cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
