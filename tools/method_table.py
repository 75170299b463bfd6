"""Write the table of drafting methods into docs/trees.md, from the rows in the code.

python tools/method_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from eagle_runtime.drafting.methods import METHODS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "trees.md"
HEADER = "| `--method` | `--tree` | drafts | default |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEADER) + r"(?:\|.*\n)*")


def table() -> str:
    """Returns the table: a row per method and kinds of trees that it drafts in one way."""
    rows = [
        f"| `{method.name}` | {', '.join(f'`{kind}`' for kind in trees.kinds)} | {trees.drafts} | "
        f"{method.default if trees is method.trees[0] else ''} |\n"
        for method in METHODS
        for trees in method.trees
    ]
    return HEADER + "".join(rows)


def main() -> None:
    """Replace the table of the page."""
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
