"""Build the documentation's site from docs/, with the pages that are made from the code; every link is checked.

python tools/site_pages.py FOLDER

Needs Sphinx and MyST (extra dev). Exits with 1 where a link leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "https://github.com/eagle-edge/eagle-edge/blob/main/"  # what a page names outside of docs/
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
MADE = ("commands", "api")


def page(text: str, folder: Path) -> str:
    """Returns a page whose links to files outside of docs/ lead to the repository. folder: where the page stands."""

    def linked(match: re.Match[str]) -> str:
        name, anchor = match[1], match[2] or ""
        target = (folder / name).resolve()
        if re.match(r"[a-z]+:", name) or target.is_relative_to(ROOT / "docs"):
            return match[0]
        return f"]({ELSEWHERE}{target.relative_to(ROOT).as_posix()}{anchor})"

    return LINK.sub(linked, text)


def contents(index: str) -> str:
    """Returns the table of contents: the pages in the order in which the index links them, then those that are made."""
    names = [name.removesuffix(".md") for name, _ in LINK.findall(index) if ":" not in name and ".." not in name]
    return "\n".join(["```{toctree}", ":hidden:", "", *dict.fromkeys(names), *MADE, "```"])


def build(out: Path) -> int:
    """Write the site to a folder; returns 0, or 1 after a warning, such as a link that leads nowhere."""
    from sphinx.application import Sphinx

    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "docs"
        shutil.copytree(ROOT / "docs", source)
        for path in source.rglob("*.md"):
            folder = ROOT / "docs" / path.relative_to(source).parent
            path.write_text(page(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
        reference.main(source)
        index = source / "index.md"
        index.write_text(
            f"{index.read_text(encoding='utf-8')}\n{contents(index.read_text(encoding='utf-8'))}\n", encoding="utf-8"
        )
        settings = {
            "project": "eagle-edge",
            "extensions": ["myst_parser"],
            "myst_heading_anchors": 4,
            "html_theme": "alabaster",
            "html_theme_options": {"description": "Lossless speculative decoding on ONNX", "page_width": "1100px"},
            "html_copy_source": False,
            "highlight_language": "none",
        }
        app = Sphinx(
            source, None, out, Path(made) / "trees", "html", settings, status=None, warningiserror=True, parallel=2
        )
        app.build()
    return int(app.statuscode)


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
