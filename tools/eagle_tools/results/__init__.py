"""`make bench`: measures docs/results.md on the shipped pair, and on the same pair grown to 16 layers x 2048."""

from eagle_tools.results.command import main

__all__ = ["main"]
