"""Names that docs/dev/glossary.md lists as retired stay out of code and pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "calib", "export", "train", "tools", "studies", "tests", "docs", "examples")
EXEMPT = ("docs/dev/glossary.md", "CHANGELOG.md", "tests/test_language.py")  # these list the names
# As words, and as parts of an identifier: `settled_rows`, `theGuess`.
RETIRED = re.compile(
    r"(?<![A-Za-z])(?i:guess(?:es|ed)?|settled|foresight|sights|arrivals|rehearsal|looked\s+up|by[\s-]heads)(?![a-z])"
    r"|(?<=[a-z])(?:Guess|Settled|Foresight|Sights|Arrivals|Rehearsal|ByHead)(?![a-z])"
)


def retired_in(text: str) -> list[str]:
    """The retired names of a page or a source, in which comments may break a line."""
    return [" ".join(name.split()) for name in RETIRED.findall(re.sub(r"\n\s*# ?", "\n", text))]


def test_retired_names_stay_out() -> None:
    files = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.[mp][dy]"))]
    assert len(files) > 500
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    places = {name: found for name, text in texts.items() if name not in EXEMPT and (found := retired_in(text))}
    assert not places, "docs/dev/glossary.md says what to write instead"


def test_retired_names_are_recognised() -> None:
    source = "rows_settled, theGuess = 3, 4  # looked\n    # up; cut by heads\nguessing = 'unsettled foresighted'\n"
    assert retired_in(source) == ["settled", "Guess", "looked up", "by heads"]
