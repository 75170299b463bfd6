"""`make bench`: measures what docs/results.md tells, on the shipped pair and on it grown to 16 layers x 2048."""

from eagle_tools.results.command import main

__all__ = ["main"]
