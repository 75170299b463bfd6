"""Figures in the pages on precisions and calibration are those of the code's constants."""

from __future__ import annotations

import contextlib
import io
import re
from importlib import resources
from pathlib import Path

import pytest

from eagle_calib import cli as calib_cli
from eagle_calib.calibrate import MAX_TOKENS, NEW_TOKENS, WINDOW
from eagle_calib.calibration import LEAST_ROWS, SCHEMA_VERSION
from eagle_calib.observe import SAMPLE_ROWS
from eagle_calib.replay import GOLDEN_TEXTS, GOLDEN_TOKENS
from eagle_export.bundle import TOP_K
from eagle_export.checking.limits import LIMITS
from eagle_export.checking.worst_layers import WORST
from eagle_export.commands import cli as export_cli
from eagle_export.recipes.attention import RECENT
from eagle_export.recipes.int8 import LM_HEAD_PARTS, PRODUCT_PARTS
from eagle_export.recipes.plan import HEAD, INT4, INT8, MIXED, TABLES
from eagle_export.recording.self_calibration import KEPT
from eagle_runtime.base.tree import MAX_DEPTH

DOCS = Path(__file__).parents[2] / "docs"
TEXT_KB = round(len((resources.files("eagle_calib") / "text.txt").read_bytes()) / 1000)
PROMPTS = len(GOLDEN_TEXTS)
WORDS = {3: "three", 4: "four"}


def text(page: str) -> str:
    """The page with single spaces."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("dev/families.md", f"One with fewer than {LEAST_ROWS} recorded rows is rounded to nearest"),
        ("precision.md", f"The default is a text of {TEXT_KB} KB in the package"),
        ("dev/calibration.md", f"The first {MAX_TOKENS} tokens (`--tokens`) are read in windows of {WINDOW}."),
        ("dev/calibration.md", f"After each window the pair decodes {NEW_TOKENS} tokens"),
        ("dev/calibration.md", f"a uniform sample of at most {SAMPLE_ROWS} rows"),
        ("dev/calibration.md", f"| up to {SAMPLE_ROWS} rows, each drawn with the same probability |"),
        ("dev/calibration.md", f"holds `schema_version` ({SCHEMA_VERSION})"),
        ("precision.md", f"| `int8` | weights and activations in blocks of {INT8.size} |"),
        (
            "precision.md",
            f"blocks of {INT4.size}; narrow k and v as in `int8`; LM head and embedding in blocks of {TABLES.size} |",
        ),
        ("dev/precision.md", f"layers are recorded, {KEPT} rows each"),
        ("precision.md", f"| `int4-int8` | q, gate and up in blocks of {MIXED.size}; the others as `int8-token` |"),
        ("precision.md", f"weights in blocks of {MIXED.size}; LM head fp16 |"),
        ("dev/precision.md", f"**The head** has blocks of {HEAD.size} in int4"),
        ("dev/precision.md", f"cut into {PRODUCT_PARTS} parts and that of the LM head into {LM_HEAD_PARTS}"),
        ("dev/precision.md", f"keys {RECENT} or more positions back"),
        ("dev/precision.md", f"no tree is deeper than {MAX_DEPTH} levels"),
        ("precision.md", f"up to {WORDS[WORST]} worst layers"),
        ("dev/precision.md", f"{PROMPTS} prompts with {GOLDEN_TOKENS} tokens each are {PROMPTS * GOLDEN_TOKENS} rows"),
    ],
)
def test_a_sentence_has_the_figure_of_the_code(page: str, sentence: str) -> None:
    assert sentence in text(page)


def test_the_table_of_limits_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (`.*`) \| ([\d.]+) % \| ([\d.]+) \|$", (DOCS / "precision.md").read_text("utf-8"), re.M)
    listed = {
        name: (float(agreement) / 100, float(kl))
        for names, agreement, kl in rows
        for name in re.findall(r"`(.*?)`", names)
    }
    assert listed == {name: (limits.agreement, limits.kl) for name, limits in LIMITS.items()}


def test_the_commands_state_their_defaults() -> None:
    assert calib_cli._parser().get_default("tokens") == MAX_TOKENS
    assert f"(default {MAX_TOKENS})" in calib_cli._parser().format_help()
    assert f"(default {TOP_K})" in " ".join(_help_of_make().split())


def _help_of_make() -> str:
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        export_cli.main(["make", "--help"])
    return out.getvalue()
