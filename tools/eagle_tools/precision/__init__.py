"""Quality and speed of one pair's bundles in several precisions, and of other engines on the same weights, compared
with the first bundle, the reference.

    eagle-precision BUNDLE... --prompts FILE.jsonl --text FILE --peer-target TARGET -o FOLDER

prints two tables, writes them to FOLDER/precision.md and their rows to precision.jsonl, and plots quality over speed in
precision.png.

    KL           mean KL(reference || compared) of the target's next-token distribution, in nats: over text that the
                 reference itself wrote, sampled at T = 1 (--own-temperature) from the prompts, and over a held-out text
    50, 95, 99   percentiles of the KL over the rows of its own text
    top-1        share of the rows that rank the same token first as the reference
    same start   median over the prompts of the greedy tokens before the first one that the reference does not write; an
                 answer without any counts with its length
    perplexity   of the held-out text, and its change against the reference
    MB           of the target; bits per weight with all scales, zeros and tables
    tau          tokens per forward pass of the target: greedy, dynamic trees of 16 nodes (without a head: chains of
                 n-gram matches)
    tok/s        decoding speed, vanilla and with the bundle's own tree (peers: their lookup), median over the prompts
    drafting     time of the head's forward passes for one tree of 16 nodes, median
    pass of n    time of the target's forward pass over n tokens, median

All are loaded at once and take turns (eagle_tools/turns.py).
"""

from eagle_tools.precision.cli import main

__all__ = ["main"]
