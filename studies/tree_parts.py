"""EAGLE-2's trees with a part left out, as in Table 3 of its paper (arXiv 2406.16858, section 5.3).

    python -m studies tree_parts BUNDLE --prompts FILE.jsonl

Prints tau and the speed beside plain decoding, by turns. The trees are shapes like the runtime's own and their drafts
are verified like any other: they affect speed, not output.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from eagle_runtime import EagleModel, Result, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Float, Int, Tree, best_first, subtree
from eagle_runtime.commands.command import Parser
from eagle_runtime.core.head import DraftHead, Proposal
from eagle_runtime.drafting.head import Scratch
from eagle_tools.markdown import markdown_table
from eagle_tools.turns import by_turns, generation, starting_order
from studies.harness import add_prompts, prompts_of

Rank = Literal["value", "confidence"]
Keep = Literal["best", "grown"]


@dataclass(frozen=True, slots=True)
class Pool:
    """All M candidates of a growing tree, level by level, in the order of parent rank, then child rank.

    tokens [M]. parents [M]: pool indices, -1 below the root. confidences [M]: log-probability of each node given its
    parent. values [M]: log-probability of the path to it. grown: for each level the nodes that were grown, or would be
    next, best first."""

    tokens: Int
    parents: Int
    confidences: Float
    values: Float
    grown: tuple[Int, ...]


@dataclass(frozen=True, slots=True)
class AblatedTree:
    """A DynamicTree in one of the four forms of the paper's table; sizes are as of DynamicTree.

    rank: how nodes to grow and to keep are chosen: by value, or ("w/o value") by confidence. keep: the best of all
    candidates, or ("w/o rerank") the nodes that were grown, level by level."""

    num_nodes: int
    depth: int
    top_k: int
    rank: Rank = "value"
    keep: Keep = "best"

    @property
    def children(self) -> int:
        return self.top_k

    @property
    def scratch(self) -> int:
        return self.depth * self.top_k

    def grow(self, head: DraftHead, root: int, first: Proposal, max_nodes: int) -> Tree:
        pool = self._pool(head, first)
        count = min(self.num_nodes, max_nodes) - 1
        if self.keep == "grown":
            kept = np.concatenate(pool.grown)[:count]
        else:
            ranks = pool.values if self.rank == "value" else pool.confidences
            kept = connected(best_first(ranks, len(ranks)), pool.parents, count)
        return subtree(root, pool.tokens, pool.parents, pool.values, np.sort(kept))

    def _pool(self, head: DraftHead, first: Proposal) -> Pool:
        k = self.top_k
        tokens, confidences = [first.tokens[0, :k]], [first.log_probs[0, :k]]
        values = [confidences[0]]
        parents: list[Int] = [np.full(k, -1, np.int64)]
        grown: list[Int] = [np.arange(k, dtype=np.int64)]
        scratch_parents = np.full(k, -1, np.int64)
        hidden = first.hidden[np.zeros(k, np.int64)]
        size = k
        with Scratch(head) as scratch:
            for level in range(self.depth):
                frontier = grown[-1] - (size - len(tokens[-1]))  # rows of the newest level
                proposal = scratch.feed(tokens[-1][frontier], hidden, scratch_parents)
                own = proposal.log_probs[:, :k]
                values.append((values[-1][frontier, None] + own).ravel())
                parents.append(np.repeat(grown[-1], k))
                tokens.append(proposal.tokens[:, :k].ravel())
                confidences.append(own.ravel())
                best = best_first(values[-1] if self.rank == "value" else confidences[-1], k)
                grown.append(size + best)
                scratch_parents = level * k + best // k
                hidden = proposal.hidden[best // k]
                size += len(tokens[-1])
        columns = np.concatenate(tokens), np.concatenate(parents), np.concatenate(confidences), np.concatenate(values)
        return Pool(*columns, tuple(grown))


def connected(order: Int, parents: Int, count: int) -> Int:
    """Returns up to `count` nodes, sorted: the first of `order`, each with its ancestors, if they still fit.

    Ranked by value, a node always comes after its ancestors, so these are the first `count` nodes; ranked by confidence
    it may come before them. parents [M]: pool indices, -1 below the root."""
    kept: set[int] = set()
    for index in order.tolist():
        line: list[int] = []
        while index >= 0 and index not in kept:
            line.append(index)
            index = int(parents[index])
        if len(kept) + len(line) <= count:
            kept.update(line)
        if len(kept) == count:
            break
    return np.array(sorted(kept), np.int64)


def ablations(num_nodes: int, depth: int, top_k: int) -> Sequence[tuple[str, AblatedTree]]:
    """Returns (name, tree) for each row of Table 3 that leaves something out."""
    size = (num_nodes, depth, top_k)
    return (
        ("no-value-no-rerank", AblatedTree(*size, "confidence", "grown")),
        ("no-value", AblatedTree(*size, "confidence", "best")),
        ("no-rerank", AblatedTree(*size, "value", "grown")),
    )


def add_options(parser: Parser) -> None:
    """What the table is made of."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    add_prompts(parser)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="per prompt (default 96)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a pass (default: the engine's choice)")


def report(args: argparse.Namespace) -> str:
    """Returns a table of tau and speed-up of each tree, medians over prompts. Raises RequestError for a bundle without
    a head, and where an output is not plain decoding's."""
    with ExitStack() as stack:
        model = stack.enter_context(EagleModel.load(args.bundle, threads=args.threads))
        if model.manifest.head is None:
            raise RequestError(f"{args.bundle} has no head whose trees could be compared; give a pair")
        defaults = model.manifest.tree_defaults
        sizes = defaults.total_token, defaults.depth, min(defaults.draft_top_k, model.manifest.head.top_k)
        forms: dict[str, dict[str, Any]] = {"plain": {"method": "vanilla"}}
        forms |= {name: {"method": "eagle", "tree": tree} for name, tree in ablations(*sizes)}
        forms["whole"] = {"method": "eagle", "tree": AblatedTree(*sizes)}
        twins = {name: stack.enter_context(model.twin()) for name in forms}
        compared = []
        for number, prompt in enumerate(prompts_of(args.prompts, args.count)):
            names = [list(forms)[index] for index in starting_order(len(forms), number)]
            sampling = SamplingParams(temperature=args.temperature)
            settings = {"sampling": sampling, "max_new_tokens": args.max_new_tokens, "seed": number}
            runs = [generation(twins[name], prompt, **forms[name], **settings) for name in names]
            results: dict[str, Result] = {names[index]: result for index, result in by_turns(runs)}
            if len({result.token_ids for result in results.values()}) > 1:
                raise RequestError(f"prompt {number}: output with drafts is not that of plain decoding")
            compared.append({name: result.usage for name, result in results.items()})
    lines = []
    for name in forms:
        ratios = [each[name].tokens_per_s / each["plain"].tokens_per_s for each in compared]
        lines.append([name, f"{median(each[name].tau for each in compared):.2f}", f"{median(ratios):.2f}x"])
    return markdown_table(["tree", "tau", "speed-up"], lines)
