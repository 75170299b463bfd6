"""Code and docs use the field's terms: the words that docs/dev/glossary.md lists as retired stay out of both.

`python tests/test_language.py` prints every place that still has one."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "calib", "export", "train", "tools", "studies", "tests", "docs")
WORDS = {
    "guess", "guesses", "guessed", "settled", "halves", "foresight", "sights", "arrivals", "rehearsal",
    "dear", "dearer", "dearest", "mend", "mends", "mended", "beside", "behind", "told", "hang", "hangs",
}  # fmt: skip
PHRASES = re.compile(r"\blooked[\s-]+up\b|\bby[\s-]+heads\b", re.I)
IDENTIFIERS = {"found"}
EXEMPT = {"docs/dev/glossary.md", "CHANGELOG.md", "tests/test_language.py"}  # these list or quote the words


def words(text: str) -> list[str]:
    """The words of a text, lower case, split at everything but letters and inside camelCase."""
    text = re.sub(r"\\[nrt]", " ", text)  # escapes in the source of a string
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


def retired_in_text(text: str) -> list[str]:
    """The retired words and phrases of a comment, a string or a page."""
    phrases = [" ".join(phrase.split()) for phrase in PHRASES.findall(text)]
    return [word for word in words(text) if word in WORDS] + phrases


def retired_in_code(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) of every retired word in identifiers, comments and strings. Comments on consecutive lines are one
    text, as phrases may cross the line's end."""
    comment: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != comment[-1].start[0] + 1:
                yield from _in_comment(comment)
                comment = []
            comment.append(token)
        elif token.type == tokenize.NAME:
            if token.string in IDENTIFIERS:
                yield token.start[0], token.string
            yield from ((token.start[0], word) for word in words(token.string) if word in WORDS)
        else:
            yield from ((token.start[0], word) for word in retired_in_text(token.string))
    yield from _in_comment(comment)


def _in_comment(lines: list[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    text = " ".join(line.string.lstrip("#") for line in lines)
    yield from ((lines[0].start[0], word) for word in retired_in_text(text))


def retired() -> Iterator[tuple[str, int, str]]:
    """(file, line, word) of every retired word of the project; line 0 in pages."""
    pages = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in sorted(pages + sources):
        name = path.relative_to(ROOT).as_posix()
        if name in EXEMPT:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            yield from ((name, 0, word) for word in retired_in_text(text))
        else:
            yield from ((name, line, word) for line, word in retired_in_code(text))


def test_retired_words_stay_out() -> None:
    places = [f"{name}:{line}: {word}" for name, line, word in retired()]
    assert not places, "\n".join(["retired words (docs/dev/glossary.md says what to write instead):", *places])


def test_retired_words_are_recognised() -> None:
    source = '''
def pick_beside(theSettled):  # what is
    """Looked
    up by the head."""        # told
    found = f"a {theSettled} guess"   # by
    # heads
    return found
'''
    assert sorted(word for _, word in retired_in_code(source)) == sorted(
        ["beside", "settled", "Looked up", "told", "found", "settled", "guess", "by heads", "found"]
    )
    assert list(retired_in_code("founder = tolder = 'hanging, behindhand' # mending\n")) == []


if __name__ == "__main__":
    for place in retired():
        print("{}:{}: {}".format(*place))
