"""The table of the methods that EAGLE's papers compare, measured on one runtime, by question set and precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.head import FORMS, HeadKind
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_tools.bench.estimate import Estimate
from eagle_tools.bench.identity import FOREIGN
from eagle_tools.bench.methods import DATASTORE, VANILLA
from eagle_tools.bench.plan import bundle_names
from eagle_tools.bench.published import PUBLISHED, SETS, published_json, published_table
from eagle_tools.bench.rows import Row, Setup
from eagle_tools.bench.summary import ratio_text, summarise
from eagle_tools.markdown import markdown_table

NOTE = (
    "Measured: answers of the target itself, sampled at each temperature with one seed. Every ratio is a median over "
    "prompts against vanilla of the same bundle, brackets hold 95 % intervals, and tau counts the target's own token. "
    "{targets} Ratios depend on the model, the machine and the text: those of a small model say nothing about one of 8 "
    "billion parameters. The pair that this project ships (8 layers of width 256, 5.6 million parameters) completes "
    "code and does not chat: to the six sets' questions it answers with code."
)
WITHOUT_HEAD = {  # method -> name of the drafter, key in PUBLISHED
    "draft-model:chain": ("draft model, chain", "SpS"),
    "draft-model:cost-aware": ("draft model, tree sized by costs", "SpS"),
    "lookahead": ("lookahead", "Lookahead"),
    "lookup:chain": ("prompt lookup, chain", "PLD"),
    "lookup": ("prompt lookup, sized by costs", "PLD"),
    DATASTORE: ("datastore, tree", "REST"),
    "recycling": ("recycling, sized by costs", "Recycling"),
}
WITH_HEAD = {  # method -> what it adds to the head's name
    "eagle:static": "EAGLE-1's static tree",
    "eagle:dynamic": "EAGLE-2's dynamic tree",
    "eagle:cost-aware": "tree sized by costs",
    "eagle+lookup": "with lookup, sized by costs",
}


@dataclass(frozen=True, slots=True)
class HeadRow:
    """How a kind of head stands in the table. name: its own; "": as in messages. static: whether its paper drafts a
    static tree. published: keys in PUBLISHED, by method, "" for all others."""

    name: str = ""
    static: bool = False
    published: Mapping[str, str] = field(default_factory=dict)


HEADS: Mapping[HeadKind, HeadRow] = {
    "eagle1": HeadRow("EAGLE-1", True, {"eagle:static": "EAGLE", "eagle+lookup": "SAMD", "": "EAGLE-2"}),
    "eagle3": HeadRow("EAGLE-3", published={"": "EAGLE-3"}),
    "block": HeadRow("block head", published={"": "DFlash"}),
    "medusa": HeadRow("Medusa-1", True, {"": "Medusa"}),
    "hydra": HeadRow("Hydra", True, {"": "Hydra"}),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One drafter at one temperature on one set. drafter: its name. published: its key among the published figures, ""
    for none. prompt_set: "" for all sets together. vs_vanilla: None where vanilla has no speed. same: prompts whose
    tokens equal vanilla's, and number compared."""

    drafter: str
    published: str
    setup: Setup
    prompt_set: str
    vs_vanilla: Estimate | None
    tau: float
    same: tuple[int, int] | None

    @property
    def precision(self) -> str:
        """That of the target."""
        return self.setup.precision.split(",")[0]


@dataclass(frozen=True, slots=True)
class SeedsTable:
    """The table of some bundles. methods: of each."""

    folders: tuple[Path, ...]
    manifests: tuple[Manifest, ...]
    methods: tuple[tuple[str, ...], ...]

    def bundles(self, more: Sequence[str]) -> tuple[tuple[Path, tuple[str, ...]], ...]:
        """Returns the bundles with their methods, for a Plan. more: methods that each bundle is to run before them."""
        pairs = zip(self.folders, self.methods, strict=True)
        return tuple((folder, tuple(dict.fromkeys([*more, *methods]))) for folder, methods in pairs)

    def figures(self, rows: Sequence[Row]) -> list[Figure]:
        heads = [None if manifest.head is None else manifest.head.kind for manifest in self.manifests]
        return figures(rows, dict(zip(bundle_names(self.folders), heads, strict=True)))

    def markdown(self, rows: Sequence[Row]) -> str:
        """Returns what was measured, and what was published."""
        sizes = dict.fromkeys((manifest.target.num_layers, manifest.target.hidden_size) for manifest in self.manifests)
        targets = ", ".join(f"{layers} layers of width {width}" for layers, width in sizes)
        return seeds_tables(self.figures(rows), f"The target here has {targets}.") + "\n" + published_table()

    def as_json(self, rows: Sequence[Row]) -> dict[str, object]:
        """Returns the same as data."""
        return {"table": [figure_json(one) for one in self.figures(rows)], "published": list(published_json())}

    def draw(self, rows: Sequence[Row], path: Path) -> None:
        """Draw the speed-ups over all sets. Raises RequestError."""
        from eagle_tools.plots import ratio_plot

        panels: dict[str, list[tuple[str, float, float, float]]] = {}
        for one in self.figures(rows):
            if not one.prompt_set and (ratio := one.vs_vanilla) is not None:
                panel = panels.setdefault(f"{one.precision}, T = {one.setup.temperature:g}", [])
                panel.append((one.drafter, ratio.value, ratio.low, ratio.high))
        try:
            ratio_plot(panels, "times the speed of plain decoding", path)
        except OSError as error:
            raise RequestError(f"{path} cannot be written ({error.strerror})") from None


def open_table(folders: Sequence[Path], draft_model: bool, datastore: bool) -> SeedsTable:
    """Returns the table of bundles. Raises BundleError."""
    manifests = [read_manifest(folder) for folder in folders]
    return SeedsTable(tuple(folders), tuple(manifests), tuple(seed_methods(manifests, draft_model, datastore)))


def seed_methods(manifests: Sequence[Manifest], draft_model: bool, datastore: bool) -> list[tuple[str, ...]]:
    """Returns the table's methods for each bundle: those of its head, and for the first bundle of each precision those
    that need no head. draft_model, datastore: whether there is one."""
    methods, precisions = [], set()
    for manifest in manifests:
        mine = [VANILLA]
        if manifest.precision["target"] not in precisions:
            precisions.add(manifest.precision["target"])
            absent = [*(() if draft_model else ("draft-model",)), *(() if datastore else (DATASTORE,))]
            mine += [method for method in WITHOUT_HEAD if method.split(":")[0] not in absent]
        if manifest.head is not None:
            row = HEADS.get(manifest.head.kind, HeadRow())
            mine += [method for method in WITH_HEAD if row.static or method != "eagle:static"]
        methods.append(tuple(mine))
    return methods


def figures(rows: Sequence[Row], kinds: Mapping[str, HeadKind | None]) -> list[Figure]:
    """Returns the figures over all sets, then those of each set. kinds: of the bundles' heads, by name of the bundle;
    of a bundle without a head None."""
    known = list(SETS)
    sets = sorted(
        {row.prompt_set for row in rows},
        key=lambda name: (name not in known, name in known and known.index(name), name),
    )
    return [
        Figure(*drafter_of(s.setup, kinds.get(s.setup.bundle)), s.setup, name, s.vs_vanilla, s.tau, s.same)
        for name in ("", *(sets if len(sets) > 1 else ()))
        for s in summarise([row for row in rows if not name or row.prompt_set == name], {}, {}, {})
        if s.setup.method != VANILLA and s.setup.backend not in FOREIGN
    ]


def drafter_of(setup: Setup, kind: HeadKind | None) -> tuple[str, str]:
    """Returns the name of a drafter, and its key among the published figures. kind: of the bundle's head."""
    if setup.method in WITHOUT_HEAD:
        return WITHOUT_HEAD[setup.method]
    if kind is None or setup.method not in WITH_HEAD:
        return f"{setup.bundle}, {setup.method}", ""
    row = HEADS.get(kind, HeadRow())
    published = row.published.get(setup.method, row.published.get("", ""))
    return f"{row.name or FORMS[kind].title}, {WITH_HEAD[setup.method]}", published


def seeds_tables(measured: Sequence[Figure], targets: str) -> str:
    """Returns Markdown: a table per precision and temperature. targets: a sentence on the bundles' targets."""
    parts = []
    for precision, temperature in dict.fromkeys((one.precision, one.setup.temperature) for one in measured):
        some = [one for one in measured if (one.precision, one.setup.temperature) == (precision, temperature)]
        parts.append(f"Drafters in {precision}, temperature {temperature:g}:\n\n{_table(some)}")
    return "\n".join([*parts, NOTE.format(targets=targets) + "\n"])


def _table(some: Sequence[Figure]) -> str:
    sets = [name for name in dict.fromkeys(one.prompt_set for one in some) if name]
    cells = {(one.setup, one.prompt_set): one for one in some}
    lines = []
    for one in some:
        if not one.prompt_set:
            line = [one.drafter, ratio_text(one.vs_vanilla), f"{one.tau:.2f}"]
            line += [_cell(cells.get((one.setup, name))) for name in sets]
            line += ["-" if one.same is None else f"{one.same[0]}/{one.same[1]}"]
            lines.append([*line, PUBLISHED[one.published].name if one.published else "-"])
    names = [SETS.get(name, name) for name in sets]
    return markdown_table(["drafter", "x vanilla", "tau", *names, "same tokens", "published as"], lines)


def _cell(one: Figure | None) -> str:
    ratio = None if one is None else one.vs_vanilla
    return "-" if one is None or ratio is None else f"{ratio.value:.2f}x, {one.tau:.2f}"


def figure_json(one: Figure) -> dict[str, object]:
    """Returns a figure as data for --json."""
    return {**one.setup._asdict(), **{key: value for key, value in asdict(one).items() if key != "setup"}}
