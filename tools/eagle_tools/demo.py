"""`make demo`: export the tiny pair that ships with the tests, decode with and without its draft heads, compare.

The pair is a byte-level model of 0.4 million parameters: it shows that the path works and that outputs are equal. A
pass over it costs microseconds, so it says nothing about speed on real models.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eagle_export.bundle import export
from eagle_runtime import EagleModel, Result

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
PROMPT = "Q: Ann has 3 apples and gets 4 more."
HEADS = {"EAGLE-1/2": "head_eagle1", "EAGLE-3": "head_eagle3_dv44"}


def main(folder: Path = REPOSITORY / ".demo") -> int:
    """Write the bundles to `folder` and print the table; returns 1 if any output differs from plain decoding."""
    console = Console()
    folder.mkdir(exist_ok=True)
    target = _target_with_tokenizer(folder)
    table = Table("method", "tree", "tokens per target pass", "target passes", "output", title="The tiny pair, greedy")
    equal = True
    for name, head in HEADS.items():
        bundle = folder / head
        console.print(f"eagle-export {target.name} {head} -o {folder.name}/{head}")
        export(target, GOLDEN / head, bundle)
        with EagleModel.load(bundle) as model:
            plain = model.generate(PROMPT, method="vanilla")
            if not table.rows:
                console.print(f"[bold]{PROMPT}[/]{plain.text}")
                _row(table, "vanilla", "-", plain, plain)
            for tree in ("dynamic", "static", "chain"):
                result = model.generate(PROMPT, tree=tree)
                equal &= result.token_ids == plain.token_ids
                _row(table, name, tree, result, plain)
    console.print(table)
    return 0 if equal else 1


def _target_with_tokenizer(folder: Path) -> Path:
    """A copy of the golden target with a tokenizer.json for its bytes."""
    target = folder / "target"
    shutil.copytree(GOLDEN / "target", target, dirs_exist_ok=True)
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", target / "tokenizer.json")
    return target


def _row(table: Table, method: str, tree: str, result: Result, plain: Result) -> None:
    stats = result.stats
    same = "equal to vanilla" if result.token_ids == plain.token_ids else "DIFFERS"
    table.add_row(method, tree, f"{stats.tau:.2f}", str(stats.target_passes), same)


if __name__ == "__main__":
    sys.exit(main())
