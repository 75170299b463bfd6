"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with one line per row of cells; the last line ends with a newline."""
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in (titles, *rows))
    return "\n".join([head, "|---" * len(titles) + "|", *lines]) + "\n"
