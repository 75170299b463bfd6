"""The table of docs/inspect.md against what `eagle-export inspect` says of headers like those of its models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle_export.inspection.facts import HeadFacts, TargetFacts
from eagle_export.inspection.report import Report, inspect
from eagle_export.inspection.tables import _count, _size
from known_models import COPIES, HEADS, LAYERS, TARGETS, target_tensors, write

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "inspect.md").read_text(encoding="utf-8")
RECORD = (DOCS / "dev" / "inspect.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w./-]+)` \| `([\w./-]+)` \| (.*) \|$", re.M)
ROWS = ROW.findall(PAGE)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of all models, in folders named as on the hub."""
    folder = tmp_path_factory.mktemp("known")
    for name, config in TARGETS.items():
        write(folder / name, config, target_tensors(config) | COPIES.get(name, {}) | LAYERS.get(name, {}))
    for name, head in HEADS.items():
        write(folder / name, *head)
    return folder


def cells(report: Report) -> list[str]:
    """What the table holds of a pair: layout, taps, draft vocabulary, parameters, bytes in int4, and the verdict."""
    target, head = report.target, report.head
    assert head is not None
    layout = "none" if head.layout is None else head.layout.producer
    taps = "" if head.config is None else ", ".join(map(str, head.config.taps))
    vocabulary = "" if head.config is None else str(head.config.draft_vocab_size)
    exported = not target.problems
    counts = [target.parameters] if exported else []
    counts += [] if head.layout is None else [head.parameters]
    int4 = [each for each in report.needs if (each.backend, each.precision) == ("cpu", "int4")]
    size = _size(int4[0].stored) if int4 and not head.problems else ""
    return [layout, taps, vocabulary, " + ".join(map(_count, counts)), size, verdict(target, head)]


def verdict(target: TargetFacts, head: HeadFacts) -> str:
    """The problems without the folders' names, up to the advice in them."""
    problems = [*target.problems, *head.problems]
    shortened = [re.sub(r"^/\S*?(: | )", "", each).split("; ")[0].split(", but only")[0] for each in problems]
    return "fits" if not problems else "; ".join(shortened)


@pytest.mark.parametrize(("target", "head", "rest"), ROWS, ids=[row[1] for row in ROWS])
def test_a_row_is_what_inspect_says(hub: Path, target: str, head: str, rest: str) -> None:
    report = inspect(str(hub / target), str(hub / head))
    assert [cell.strip() for cell in rest.split(" | ")] == cells(report)


def test_the_table_has_every_model_that_is_known_here() -> None:
    assert len(ROWS) >= 25
    assert {row[0] for row in ROWS} == set(TARGETS) and {row[1] for row in ROWS} == {*HEADS, *LAYERS}


def test_parameters_of_eagle_1_heads_are_those_of_their_readme() -> None:
    """SafeAILab/EAGLE README.md counts heads without the embedding, which they share with the target."""
    stated = {
        "llama2-chat-7B": 0.24,
        "llama2-chat-13B": 0.37,
        "mixtral-instruct-8x7B": 0.28,
        "LLaMA3-Instruct-8B": 0.25,
    }
    for name, billions in stated.items():
        config, tensors = HEADS[f"yuhuili/EAGLE-{name}"]
        counted = sum(
            shape[0] * (shape[1] if len(shape) > 1 else 1)
            for key, (_, shape) in tensors.items()
            if key != "embed_tokens.weight"
        )
        assert counted / 1e9 == pytest.approx(billions, abs=0.005), config


def test_parameters_of_qwen35_are_those_of_its_files(hub: Path) -> None:
    """Of the 2B's: of its language model and of its layer."""
    folder = str(hub / "Qwen/Qwen3.5-2B")
    report = inspect(folder, folder)
    assert report.head is not None
    assert (report.target.parameters, report.head.parameters) == (1881825088, 60828160)


def test_the_configurations_have_sources() -> None:
    """Every head of the table is in the list of where its configuration comes from."""
    _, sources = RECORD.split("## Where the configurations come from")
    named = set(re.findall(r"`([\w.-]+/[\w.-]+)`", sources))
    owners = {head.split("/")[0] for head in (*HEADS, *LAYERS)}
    assert owners <= {name.split("/")[0] for name in named} | set(re.findall(r"\*\*(\S+)\*\*", sources))
