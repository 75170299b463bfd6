"""eagle-bench: decoding methods side by side on a question set, and beside PyTorch (docs/bench.md)."""

from eagle_tools.bench.cli import main

__all__ = ["main"]
