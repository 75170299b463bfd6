"""The report of `eagle-export inspect` for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from eagle_export.heads.assistant_config import Assistant
from eagle_export.heads.block_config import Block
from eagle_export.heads.kinds import KINDS
from eagle_export.inspection.facts import HeadFacts, TargetFacts
from eagle_export.inspection.report import GB, Need, Place, Report, fits, least_class, places

WIDTH = 120


def show(report: Report, machine: Place | None) -> None:
    """Prints the tables on stdout."""
    console = Console(width=WIDTH, highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in _target_lines(report.target, report.target_commit):
        say(line)
    if report.head is not None:
        for line in _head_lines(report.head, report.head_commit):
            say(line)
    for backend, title in (("cpu", "On a CPU"), ("tensorrt-rtx", "On a GPU")):
        rows = [need for need in report.needs if need.backend == backend]
        if rows:
            console.print(_table(title, rows, report.context, machine))
    if report.needs:
        say("ms per token: the target's weights read once, without drafts; n tokens per pass take an n-th of it.")


def _target_lines(target: TargetFacts, commit: str | None) -> list[str]:
    family = f"{target.family.name}, " if target.family is not None else ""
    active = "" if target.active == target.parameters else f" ({_count(target.active)} per token)"
    tied = ", tied embedding" if target.tied else ""
    lines = [
        f"target   {target.name}{_at(commit)}",
        f"         {family}model_type {target.model_type}, {_count(target.parameters)} parameters{active} in "
        f"{target.stored}, {_size(target.bytes)}",
        f"         {target.num_layers} layers of width {target.hidden_size}, {target.num_heads} heads "
        f"({target.num_kv_heads} key/value) of {target.head_dim}, MLP {target.intermediate_size}, vocabulary "
        f"{target.vocab_size}{tied}, context {target.context or 'not stated'}",
    ]
    if target.experts is not None:
        lines.append(f"         {target.experts[0]} experts per layer, {target.experts[1]} per token")
    lines += [f"         note: {note}" for note in target.notes]
    return lines + _verdict(target.problems, "can be exported", "cannot be exported")


def _head_lines(head: HeadFacts, commit: str | None) -> list[str]:
    lines = [f"head     {head.name}{_at(commit)}"]
    what = f"{_count(head.parameters)} parameters in {head.stored}, {_size(head.bytes)}"
    if head.layout is not None:
        lines.append(f"         {KINDS[head.layout.kind].title} in the layout of {head.layout.producer}, {what}")
    else:
        lines.append(f"         {what}")
    if head.config is not None:
        config = head.config
        taps = f", taps hidden_states {list(config.taps)}" if config.taps else ""
        part = "layer" if config.ahead is None else "head"
        width = config.hidden_size if config.assistant is None else config.assistant.width
        lines.append(
            f"         {config.num_layers} {part}{'s' if config.num_layers > 1 else ''} of width {width}, "
            f"draft vocabulary {config.draft_vocab_size} of {config.vocab_size}{taps}"
        )
        if config.block is not None:
            lines += [f"         {line}" for line in _block_lines(config.block)]
        if config.assistant is not None:
            lines.append(f"         {_assistant_line(config.assistant)}")
    if head.stated_target is not None:
        lines.append(f"         made for {head.stated_target}")
    lines += [f"         note: {note}" for note in head.notes]
    return lines + _verdict(head.problems, "fits the target", "does not fit the target")


def _block_lines(block: Block) -> tuple[str, str]:
    """What a block head drafts, and how."""
    state = " and the target's last state before the root" if block.reads_state else ""
    drafts = f"{block.size} tokens, the first from the root's row" if block.anchor else f"{block.size - 1} tokens"
    mask = "an embedding of its own" if block.mask_id is None else f"token {block.mask_id}"
    follows = f"transitions of rank {block.markov_rank}" if block.markov_rank else "no transitions"
    sees = "the rows before it" if block.causal else "all rows"
    return f"blocks of {block.size} rows draft {drafts}; each row sees {sees}{state}", f"mask: {mask}; {follows}"


def _assistant_line(own: Assistant) -> str:
    """What an assistant reads of its target, and which tokens it drafts."""
    shapes = " and ".join(
        f"{heads} x {width} ({kind})" for (heads, width), kind in zip(own.rows, own.kinds, strict=True)
    )
    groups = f"; drafts from {own.chosen} of {own.centroids} groups of tokens" if own.centroids else ""
    return f"reads the target's keys, {shapes}{groups}"


def _verdict(problems: tuple[str, ...], good: str, bad: str) -> list[str]:
    return [f"         {good}"] if not problems else [f"         {bad}:", *(f"         - {each}" for each in problems)]


def _table(title: str, rows: list[Need], context: int, machine: Place | None) -> Table:
    table = Table(title=f"{title}; caches of {context} tokens; ms per token by bandwidth", title_justify="left")
    table.add_column("precision")
    for name in ("target", "head", "cache", "memory", "least"):
        table.add_column(name, justify="right", no_wrap=True)
    where = places(rows[0], machine)
    for place in where:
        facts = f"{place.name}\n{place.memory / GB:.0f} GB\n{place.bandwidth / GB:.0f} GB/s"
        table.add_column(facts, justify="right", no_wrap=True)
    for need in rows:
        least = least_class(need)
        cells = [
            need.precision
            if need.draft_precision in (None, need.precision)
            else f"{need.precision}, head {need.draft_precision}"
        ]
        cells += [_size(need.target.stored), "" if need.draft is None else _size(need.draft.stored)]
        cells += [_size(need.cache), _size(need.memory), "> 32 GB" if least is None else f"{least} GB"]
        for place in where:
            milliseconds = 1e3 * need.seconds(place.bandwidth)
            cells.append(f"{milliseconds:.3g}" if fits(need, place) else "too large")
        table.add_row(*cells)
    return table


def _at(commit: str | None) -> str:
    return "" if commit is None else f" at {commit}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
