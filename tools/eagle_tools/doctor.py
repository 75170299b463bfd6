"""eagle-doctor: which engines work on this machine, and whether a bundle on each of them agrees with its certificate
and with the CPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_calib.replay import compare, golden_prompts, mean_tau, replay
from eagle_runtime import BackendError, BundleError, EagleModel, Result
from eagle_runtime.base.backend_names import BACKENDS
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import bundle_file, file_sha256
from eagle_runtime.bundle.fidelity import FidelityWarning, compared, shortfall
from eagle_runtime.bundle.manifest import Certificate, Manifest, read_manifest
from eagle_runtime.commands.command import Parser
from eagle_runtime.core.session import Session
from eagle_runtime.opening.backends import PassedOver, reasons_text, unfit
from eagle_runtime.opening.loading import open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.check_command import run_check
from eagle_tools.compare_engines import Difference, compare_sessions
from eagle_tools.engines import find_engines, nvidia_gpu
from eagle_tools.ties import is_quantised, is_tie

AGREEMENT_LOST = 0.005  # maximum loss of top-1 agreement, as a share of all tokens, against the certificate
# The same of quantised targets, whose kernels round differently: of 97 certified rows int4 of SmolLM2-135M-Instruct
# ranks another token first in 7 with native operators than with the portable graph (86.6 and 89.7 % are right).
# Which of both is right there is chance, so the limit is this or two standard errors of the certified share.
QUANTISED_AGREEMENT_LOST = 0.03
# Maximum relative loss of tau, and that of quantised targets: the same pair has 3.26 and 3.88 over some 30 passes.
TAU_LOST, QUANTISED_TAU_LOST = 0.05, 0.2
LARGEST_DIFFERENCE = 0.05  # maximum difference by rounding, as a share of an output's largest number


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. ok: None if there is nothing to compare `measured` with. fatal: whether the bundle should
    not be used if the check fails. backend: the checked backend; None for a check of the bundle. wrong: word for a
    failed check."""

    name: str
    ok: bool | None
    says: str
    measured: float | None = None
    certified: float | None = None
    fatal: bool = True
    backend: str | None = None
    wrong: str = "differs"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if machine or bundle cannot be used, 2 for wrong input."""

    def check(args: argparse.Namespace) -> bool:
        if args.card is not None:
            from eagle_tools.card.command import report_card

            return report_card(args)
        if args.bundle is None and (args.backend, args.context) != (None, None):
            raise RequestError("--backend and --context say how a bundle is checked; name one")
        return report_machine(args.json) if args.bundle is None else report_bundle(args)

    return run_check(_parser(), argv, check, extra="cpu", interrupted="interrupted")


def report_machine(as_json: bool) -> bool:
    """Print the findings on the GPU and every engine; returns whether any engine can run bundles."""
    gpu = nvidia_gpu()
    engines = find_engines(gpu)
    fit = any(finding.works for finding in engines.values())
    if as_json:
        rows = [{"name": name, **dataclasses.asdict(finding)} for name, finding in engines.items()]
        print(json.dumps({"gpu": dataclasses.asdict(gpu), "backends": rows, "ok": fit}))
    else:
        for name, finding in {"gpu": gpu, **engines}.items():
            print(f"{name:12}  {'works' if finding.works else '-':5}  {finding.says}")
    return fit


def report_bundle(args: argparse.Namespace) -> bool:
    """Print one line per check as it is done; returns whether the bundle can be used."""
    started = time.perf_counter()
    warnings.simplefilter("ignore", FidelityWarning)  # one of the checks reports it
    done = []
    for check in check_bundle(Path(args.bundle), args.backend, args.context):
        done.append(check)
        if not args.json:
            word = {True: "ok", False: check.wrong, None: "-"}[check.ok]
            print(f"{check.name:11}  {word:7}  {check.says}", flush=True)
    fit = all(check.ok is not False for check in done if check.fatal)
    if args.json:
        rows = [dataclasses.asdict(check) for check in done]
        seconds = round(time.perf_counter() - started, 3)
        print(json.dumps({"bundle": str(args.bundle), "checks": rows, "ok": fit, "seconds": seconds}))
    return fit


def check_bundle(bundle: Path, backend: str | None = None, context: int | None = None) -> Iterator[Check]:
    """Yields all checks of a bundle on a backend, or on every backend that can run it. A changed file ends them.
    context: as of EagleModel.load. Raises BundleError, RequestError, and BackendError if no backend runs it."""
    if backend not in (None, *BACKENDS):
        raise BackendError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    manifest = read_manifest(bundle)
    changed = [name for name, digest in manifest.files.items() if file_sha256(bundle_file(bundle, name)) != digest]
    if changed:
        are = "is not the file that was" if len(changed) == 1 else "are not the files that were"
        yield Check("files", False, f"{', '.join(changed)} {are} exported; copy or export the bundle again")
        return
    yield Check("files", True, f"{len(manifest.files)} files have their SHA-256")
    if manifest.certificate is None:
        yield Check("certificate", None, "none; export without --no-certificate to have the source to compare with")
    else:
        yield _limits(manifest, manifest.certificate)
    # The CPU is first, since the other backends are compared with it, also if only one of them is checked.
    names = BACKENDS[::-1] if backend is None else tuple(dict.fromkeys(("cpu", backend)))
    passed_over: PassedOver = ()
    with contextlib.ExitStack() as stack:
        reference: OpenBundle | None = None
        for name in names:
            started = time.perf_counter()
            try:
                if backend is None and (reason := unfit(name, bundle, manifest)):
                    raise BackendError(reason)
                opened = open_bundle(bundle, name, context, None, check_hashes=False)
            except (BackendError, BundleError) as error:
                if name == backend:
                    raise
                passed_over += ((name, str(error)),)
                if backend is None:
                    yield Check(name, None, str(error), backend=name)
                continue
            model = stack.enter_context(EagleModel(opened))
            reference = opened if name == "cpu" else reference
            if backend not in (None, name):
                continue
            says = f"{name}: {_names(manifest)}, loaded in {time.perf_counter() - started:.1f} s"
            yield Check("engine", True, says, backend=name)
            if model.row_check is not None:
                yield Check(
                    "rows", model.row_check.padding is not None, str(model.row_check), backend=name, fatal=False
                )
            sessions = opened.engines.sessions
            for check in (*_check_model(model, manifest), *_graphs(manifest, sessions)):
                yield dataclasses.replace(check, backend=name)
            if reference is not None and reference is not opened:
                prompts, vocab_size = _prompts(model, manifest), manifest.target.vocab_size
                for difference in compare_sessions(reference.engines.sessions, sessions, vocab_size, prompts):
                    yield dataclasses.replace(_compared_with_cpu(difference), backend=name)
    if len(passed_over) == len(BACKENDS):
        raise BackendError(f"no backend runs {bundle}: {reasons_text(passed_over)}")


def _prompts(model: EagleModel, manifest: Manifest) -> list[list[int]]:
    """Those of the certificate, or what stands for them."""
    if manifest.certificate is None:
        return golden_prompts(model.text, manifest.target.vocab_size, model.context)
    return [list(golden.prompt) for golden in manifest.certificate.prompts]


def _check_model(model: EagleModel, manifest: Manifest) -> Iterator[Check]:
    """Yields the checks of a loaded model."""
    certificate, prompts = manifest.certificate, _prompts(model, manifest)
    plain, eagle = replay(model, prompts, drafts=False), replay(model, prompts, drafts=True)
    yield _lossless(plain, eagle, _ties(model, prompts, plain, eagle))
    if certificate is not None:
        yield from _as_certified(model, certificate)
    yield _tau(mean_tau(eagle), certificate, QUANTISED_TAU_LOST if is_quantised(manifest) else TAU_LOST)


def _names(manifest: Manifest) -> str:
    target = manifest.precision["target"]
    if manifest.head is None:
        return f"no draft head, {target}"
    draft = manifest.precision["draft"]
    return f"{manifest.head.kind} head, {target if target == draft else f'{target}, its head {draft}'}"


def _lossless(plain: Sequence[Result], eagle: Sequence[Result], ties: int = 0) -> Check:
    """ties: number of texts that differ only by rounding."""
    equal = sum(one.token_ids == other.token_ids for one, other in zip(plain, eagle, strict=True))
    count = len(plain)
    says = f"{equal} of {count} golden prompts continue with the same tokens with drafts and without"
    says += f", {ties} with tokens whose logits are equal up to rounding" if ties else ""
    return Check("lossless", equal + ties == count, says, measured=equal / count)


def _ties(model: EagleModel, prompts: Sequence[Sequence[int]], plain: Sequence[Result], eagle: Sequence[Result]) -> int:
    """Returns how many texts differ first at a token whose logit equals that of the other one up to rounding."""
    texts = zip(prompts, plain, eagle, strict=True)
    return sum(is_tie(model, prompt, one.token_ids, other.token_ids) for prompt, one, other in texts)


def _limits(manifest: Manifest, certificate: Certificate) -> Check:
    """The check against the limits when the bundle was exported. It is not fatal: a bundle below the limits is only
    exported if the user asks for it."""
    says = shortfall(manifest) or (
        f"it follows its source as closely as {manifest.precision['target']} should: "
        f"{compared(certificate.agreement, certificate.kl, certificate.limits)}"
    )
    return Check("limits", certificate.within_limits, says, measured=certificate.kl, fatal=False, wrong="below")


def _as_certified(model: EagleModel, certificate: Certificate) -> Iterator[Check]:
    here = compare(model, certificate.prompts)
    lost = _agreement_lost(certificate) if is_quantised(model.manifest) else AGREEMENT_LOST
    yield Check(
        "agreement",
        here.agreement >= certificate.agreement - lost,
        f"{here.agreement:.1%} of the source's tokens are ranked first (certified: {certificate.agreement:.1%})",
        here.agreement,
        certificate.agreement,
    )
    yield Check(
        "logits", None, f"the source's top logits are reproduced within {here.logit_error:.2g}", here.logit_error
    )


def _agreement_lost(certificate: Certificate) -> float:
    """What a quantised target may lose of its certified agreement."""
    share, tokens = certificate.agreement, sum(len(golden.continuation) for golden in certificate.prompts)
    return max(QUANTISED_AGREEMENT_LOST, 2 * math.sqrt(share * (1 - share) / tokens))


def _tau(tau: float, certificate: Certificate | None, lost: float) -> Check:
    """lost: the part of the certified tau that may be missing."""
    says = f"{tau:.2f} tokens per forward pass of the target"
    if certificate is None:
        return Check("tau", None, says, tau)
    near = tau >= certificate.tau * (1 - lost)
    return Check("tau", near, f"{says} (certified: {certificate.tau:.2f})", tau, certificate.tau, fatal=False)


def _graphs(manifest: Manifest, sessions: Sequence[Session]) -> Iterator[Check]:
    """A check per engine of a library that tells whether forward passes can be captured as CUDA graphs."""
    for name, session in zip(manifest.models, sessions, strict=True):
        capturable = getattr(session, "capturable", None)
        if capturable is not None:
            says = "are replayed as CUDA graphs" if capturable else "cannot be captured as CUDA graphs, so kernels wait"
            yield Check("graphs", capturable, f"the {name}'s forward passes {says}", fatal=False, wrong="slower")


def _compared_with_cpu(difference: Difference) -> Check:
    """The check of an output against the CPU's."""
    relative = difference.largest / max(difference.scale, 1e-30)
    says = f"{difference.graph}'s {difference.output} differ from the CPU's by up to {difference.largest:.2g}"
    says += f" of {difference.scale:.2g}"
    if difference.agreement is not None:
        says += f", {difference.agreement:.1%} of the rows rank the same token first"
    return Check("vs cpu", relative <= LARGEST_DIFFERENCE, says, difference.largest, fatal=False)


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-doctor",
        description="Which engines work on this machine and why the others do not; with a bundle, whether its files "
        "are unchanged, and whether its output on each engine agrees with its certificate and with the CPU.",
    )
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--backend", metavar="B", help="engine to run the bundle on (default: each that can)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of prompt and output to make room for")
    parser.add_argument("--card", metavar="KIT", help="check this machine's GPU with a kit (docs/backends.md)")
    parser.add_argument("-o", "--output", metavar="FILE", help="the report of --card (default card.json)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
