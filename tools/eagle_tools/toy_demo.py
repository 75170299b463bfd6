"""The demo without a network: exports the pair in tools/demo_pair, and compares decoding of held-out Python with and
without its heads.

The pair has 5.6 million parameters. It shows that the toolchain works, how many drafted tokens are accepted, and that
outputs are equal. A forward pass takes a millisecond or two, so it says little about the speed of real models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_calib.replay import mean_tau
from eagle_export.bundle import export
from eagle_runtime import EagleModel, Result
from eagle_tools.questions import read_questions

PAIR = Path(__file__).resolve().parents[1] / "demo_pair"
HEADS = {"EAGLE-1/2": "eagle1", "EAGLE-3": "eagle3"}
PROMPTS, NEW_TOKENS = 6, 96


def main(folder: Path = PAIR.parents[1] / ".demo", count: int = PROMPTS) -> int:
    """Write the bundles to `folder` and print the table, of `count` prompts; returns 1 if any output differs from plain
    decoding."""
    console = Console()
    folder.mkdir(exist_ok=True)
    prompts = [question.turns[0] for question in read_questions(PAIR / "heldout.jsonl", count)]
    table = Table("method", "tree", "tokens per target pass", "target passes", "output")
    table.title = f"{count} prompts that the pair was not trained on, greedy, {NEW_TOKENS} tokens each"
    plain: list[Result] = []
    equal = True
    for name, head in HEADS.items():
        console.print(f"eagle-export tools/demo_pair/target tools/demo_pair/{head} -o {folder.name}/{head}")
        export(PAIR / "target", PAIR / head, folder / head)
        with EagleModel.load(folder / head) as model:
            if not plain:
                plain = [
                    model.generate(prompt, max_new_tokens=NEW_TOKENS, method="vanilla", temperature=0)
                    for prompt in prompts
                ]
                console.print(Text(prompts[0], "bold"), Text(plain[0].text or ""), sep="")
                _row(table, "vanilla", "-", plain, plain)
            for tree in ("dynamic", "static", "chain"):
                results = [
                    model.generate(prompt, max_new_tokens=NEW_TOKENS, tree=tree, temperature=0) for prompt in prompts
                ]
                equal &= [r.token_ids for r in results] == [p.token_ids for p in plain]
                _row(table, name, tree, results, plain)
    console.print(table)
    return 0 if equal else 1


def _row(table: Table, method: str, tree: str, results: Sequence[Result], plain: Sequence[Result]) -> None:
    passes = sum(result.usage.target_passes for result in results)
    same = all(result.token_ids == other.token_ids for result, other in zip(results, plain, strict=True))
    table.add_row(method, tree, f"{mean_tau(results):.2f}", str(passes), "equal to vanilla" if same else "DIFFERS")


if __name__ == "__main__":
    sys.exit(main())
