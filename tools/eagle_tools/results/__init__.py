"""`make bench`: measures docs/results.md on SmolLM2-135M-Instruct with the shipped heads, and on its grown form."""

from eagle_tools.results.command import main

__all__ = ["main"]
