"""eagle-bench: compares decoding methods, and PyTorch, on a question set (docs/bench.md)."""

from eagle_tools.bench.cli import main

__all__ = ["main"]
