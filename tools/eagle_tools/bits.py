"""What a bundle computes here, to be compared with another machine: digests of logits and of answers.

    python -m eagle_tools.bits BUNDLE

Where two machines print the same line, one seed gives one text on both. On backend native that holds between all
processors for a bundle that leaves ONNX Runtime nothing to round (docs/dev/kernels.md). It needs only what the runtime
needs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.backend_names import AUTO, NATIVE
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser, run_command

TEMPERATURES = (0.0, 1.0)


def bits(bundle: Path, rows: int, tokens: int, backend: str = AUTO, threads: int | None = None) -> str:
    """Returns a line: the backend, a digest of the logits of `rows` random tokens, which are read at once, and one of
    the `tokens` that follow them at each temperature, drafted as by default. Raises EagleError."""
    with EagleModel.load(bundle, backend=backend, threads=threads) as model:
        if rows < 1 or tokens < 1 or rows + tokens > model.context:
            raise RequestError(
                f"rows are {rows} and tokens {tokens}, but must be 1 or more, together {model.context} at most"
            )
        prompt: list[int] = np.random.default_rng(0).integers(0, model.manifest.target.vocab_size, rows).tolist()
        said = [f"{model.backend}, logits {_digest(np.concatenate(list(model.score(prompt))))}"]
        for temperature in TEMPERATURES:
            answer = model.generate(
                prompt, sampling=SamplingParams(temperature=temperature), seed=1, max_new_tokens=tokens, ignore_eos=True
            )
            said.append(f"T={temperature:g} {_digest(np.array(answer.token_ids, np.int64))}")
    return ", ".join(said)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Print the line of each bundle."""
    for bundle in args.bundles:
        print(bits(Path(bundle), args.rows, args.tokens, args.backend, args.threads), flush=True)


def _parser() -> Parser:
    parser = Parser(prog="eagle_tools.bits", description="Print digests of what bundles compute on this machine.")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--rows", type=int, default=128, metavar="N", help="tokens that are read (default 128)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="new tokens of an answer (default 16)")
    parser.add_argument("--backend", choices=(AUTO, NATIVE, "cpu"), default=AUTO, help="form of the graphs that runs")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
