"""Train the demo pair: a small Llama and its EAGLE-1 and EAGLE-3 heads, on the Python standard library's own sources.

    python tools/train_demo_pair.py data -w WORK                 # tokenizer, token files, held-out prompts
    python tools/train_demo_pair.py target -w WORK --minutes 60  # the same command continues an interrupted run
    python tools/train_demo_pair.py edits -w WORK                # prompts whose answers repeat what stands in them
    python tools/train_demo_pair.py answers -w WORK              # answers by the target, for the heads
    python tools/train_demo_pair.py heads -w WORK --minutes 30   # both heads; caches 10 GB of features

Every machine with Python has the text, so that the training can be repeated anywhere; the text differs a little between
Python releases. Whole files are held out, chosen by a hash of their path.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import keyword
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import EagleError
from eagle_runtime.commands.command import Listed
from eagle_tools.questions import read_questions
from small_llama import CONFIG, TrainError, log, machine, train_target

PAIR = Path(__file__).parent / "demo_pair"
EOS = "<|endoftext|>"
HELD_OUT = 3  # percent of the files
PROMPTS, PROMPT_TOKENS = 80, (40, 120)
EDITED_TOKENS = 64  # tokens of the answer that an edit prompt contains
DISTINCT = 0.6  # minimum share of distinct token pairs in an answer: a small model often repeats itself

# Left out of the text: tables of numbers, third-party packages, generated files.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "encodings"}
SKIPPED_FOLDERS |= {"pydoc_data", "lib-dynload", "_bundled"}
TEST_FOLDERS = {"test", "tests", "idle_test"}  # most of the text, and repetitive: the tokenizer is trained on the rest
LONGEST = 600_000  # characters of a file; longer ones are tables

KINDS = ("eagle1", "eagle3")
GREEDY, SAMPLED, ANSWER_TOKENS = 4000, 3200, 192  # number of prompts, maximum tokens of an answer
FAR, FAR_TOKENS = 64, 3328  # windows of training text at whose length the heads learn to draft
HEAD_BATCH = {"eagle1": 8, "eagle3": 2}  # answers per step: unrolled heads learn slowly, so they step often
DRAFT_VOCAB, TTT_STEPS = 2816, 5  # EAGLE-3: tokens that the head knows, unrolled steps
# For a head that continues from an earlier one: the weight of EAGLE-1's cross-entropy, higher since the head predicts
# features well; EAGLE-3's answers per step and unrolled steps, since later steps gain if the first one is right.
CLASSIFICATION = 1.0
LATER_BATCH, LATER_TTT_STEPS = 8, 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train_demo_pair.py", description=(__doc__ or "").splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    parsers = {}
    for name, text in (
        ("data", "tokenizer, token files, prompts"),
        ("target", "the small Llama"),
        ("edits", "prompts whose answers repeat what stands in them"),
        ("answers", "text that the target writes, for the heads"),
        ("heads", "both heads"),
    ):
        parsers[name] = stage = stages.add_parser(name, help=text)
        stage.add_argument("-w", "--work", type=Path, required=True, help="folder of tokens, checkpoints and logs")
        stage.add_argument("-o", "--out", type=Path, default=PAIR, help="folder of the pair (default: %(default)s)")
    for name in ("target", "heads"):
        parsers[name].add_argument("--minutes", type=float, default=60, help="training time, all runs together")
    parsers["heads"].add_argument("--init", type=Path, metavar="PAIR", help="go on from the heads of an earlier pair")
    parsers["heads"].add_argument(
        "--kinds", action=Listed, among=KINDS, default=KINDS, metavar="A,B", help="default: both"
    )
    parsers["target"].add_argument("--workers", type=int, default=os.cpu_count(), help="processes, one core each")
    args = parser.parse_args(argv)
    try:
        if args.stage == "data":
            make_data(args.work, args.out)
        elif args.stage == "target":
            train_target(args.work, args.out / "target", args.minutes * 60, args.workers)
        elif args.stage == "edits":
            make_edits(args.work, args.out)
        elif args.stage == "answers":
            write_answers(args.work, args.out)
        else:
            train_heads(args.work, args.out, args.minutes, args.init, args.kinds)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_data(work: Path, out: Path) -> None:
    """Write the tokenizer to out/target, train.bin and heldout.bin (uint16 ids) to work, heldout.jsonl to out."""
    work.mkdir(parents=True, exist_ok=True)
    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    train: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for path, text in sources():
        (held_out if is_held_out(path) else train).append((path, text))
    tokenizer = train_tokenizer([text for path, text in train if TEST_FOLDERS.isdisjoint(Path(path).parts)])
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "model_max_length": CONFIG.max_position_embeddings,
    }
    write_json(target / "tokenizer_config.json", settings)
    eos = tokenizer.token_to_id(EOS)
    counts = {}
    for name, texts in (("train", train), ("heldout", held_out)):
        rows = [[*tokenizer.encode(text).ids, eos] for _, text in texts]
        ids = np.array([token for row in rows for token in row], np.uint16)
        ids.tofile(work / f"{name}.bin")
        write_rows(work / f"{name}.jsonl", ({"ids": row} for row in rows))  # for eagle-train
        counts[name] = {"files": len(texts), "characters": sum(len(text) for _, text in texts), "tokens": len(ids)}
    prompts = openings(tokenizer, train)
    for name, part in (("greedy", prompts[:GREEDY]), ("sampled", prompts[GREEDY : GREEDY + SAMPLED])):
        write_rows(work / f"{name}-prompts.jsonl", ({"prompt": prompt} for prompt in part))
    ids = np.fromfile(work / "train.bin", np.uint16)
    starts = np.linspace(0, len(ids) - FAR_TOKENS, FAR).astype(int)
    write_rows(work / "far.jsonl", ({"ids": ids[start : start + FAR_TOKENS].tolist()} for start in starts))
    known = [text for _, text in train]  # some functions stand in two files
    unseen = (prompt for prompt in openings(tokenizer, held_out) if not any(prompt in text for text in known))
    unseen_prompts = itertools.islice(unseen, PROMPTS)
    questions = [
        {"question_id": number, "category": "python", "turns": [prompt]} for number, prompt in enumerate(unseen_prompts)
    ]
    write_rows(out / "heldout.jsonl", questions)
    log(work / "data.log.jsonl", machine() | counts | {"prompts": len(questions)})


def sources() -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the standard library's modules and their tests, in the same order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts[:-1]) and not name.name.startswith("_sysconfigdata"):
            try:
                text = path.read_text(encoding="utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about escapes in the text
                    ast.parse(text)
            except (UnicodeDecodeError, SyntaxError, ValueError):  # some test files are wrong on purpose
                continue
            if len(text) < LONGEST:
                yield name.as_posix(), text


def is_held_out(path: str) -> bool:
    """Returns whether a file is held out; the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100 < HELD_OUT


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Returns a byte-level BPE: it encodes any text, and runs of spaces (Python's indents) as one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def openings(tokenizer: Tokenizer, files: list[tuple[str, str]]) -> list[str]:
    """Returns the first lines of all functions and classes, PROMPT_TOKENS long, in an order that mixes the files."""
    low, high = PROMPT_TOKENS
    rng = np.random.default_rng(0)
    starts = []
    for _, text in files:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            wanted, prompt = int(rng.integers(low, high)), ""
            for line in lines[node.lineno - 1 : node.end_lineno]:
                if len(tokenizer.encode(prompt + line).ids) > high:
                    break
                prompt += line
                if len(tokenizer.encode(prompt).ids) >= wanted:
                    break
            if len(tokenizer.encode(prompt).ids) >= low:
                starts.append(prompt.rstrip() + "\n")
    return sorted(set(starts), key=lambda text: hashlib.sha256(text.encode()).digest())


def make_edits(work: Path, out: Path) -> None:
    """Write out/edits.jsonl: held-out prompts, each followed by the target's answer and by the prompt again with a name
    changed, as in an edit that renames something. Prompts whose answer repeats itself are left out."""
    work.mkdir(parents=True, exist_ok=True)
    bundle = work / "edits.bundle"
    if bundle.exists():
        shutil.rmtree(bundle)
    export(out / "target", None, bundle, Settings(certify=False))
    rows = []
    with EagleModel.load(bundle) as model:
        for question in read_questions(out / "heldout.jsonl"):
            text = question.turns[0]
            answer = model.generate(text, max_new_tokens=EDITED_TOKENS, temperature=0)
            pairs = list(itertools.pairwise(answer.token_ids))
            if len(set(pairs)) > DISTINCT * EDITED_TOKENS:
                prompt = f"{text}{(answer.text or '').rstrip()}\n\n\n{renamed(text)}"
                rows.append({"question_id": question.id, "category": "edit", "turns": [prompt]})
    write_rows(out / "edits.jsonl", rows)


def renamed(text: str) -> str:
    """Returns code with its most frequent name of four letters or more changed, except `self`."""
    names = [name for name in re.findall(r"[A-Za-z_]\w{3,}", text) if not keyword.iskeyword(name) and name != "self"]
    if not names:
        return text
    return re.sub(rf"\b{Counter(names).most_common(1)[0][0]}\b", "other", text)


def write_answers(work: Path, out: Path) -> None:
    """Let the target answer training prompts, greedily and by sampling, as data for the heads.

    Both runs at once, each on half of the cores."""
    runs = []
    for name, temperature in (("greedy", "0"), ("sampled", "1")):
        arguments = ["generate", str(out / "target"), "--data", str(work / f"{name}-prompts.jsonl")]
        arguments += ["--temperature", temperature, "-o", str(work / f"{name}.jsonl")]
        arguments += ["--max-new-tokens", str(ANSWER_TOKENS), "--batch-size", "64"]
        runs.append((name, arguments))
    in_parallel(runs, work)


def train_heads(work: Path, out: Path, minutes: float, init: Path | None, kinds: Sequence[str]) -> None:
    """Train heads of these kinds at once with eagle-train, that many minutes each. Continues what is in `work`, or
    starts from the heads in the folder `init` or from untrained ones."""
    runs = []
    for kind in kinds:
        data = [work / "greedy.jsonl", work / "sampled.jsonl", work / "far.jsonl"]
        arguments = head_arguments(kind, out, data, work / kind, None if init is None else init / kind)
        arguments += ["--minutes", str(minutes), "--eval-data", str(work / "heldout.jsonl")]
        arguments += ["--cache", str(work / "cache")]
        if (work / kind / "training").is_dir():
            arguments.append("--resume")
        runs.append((kind, arguments))
    in_parallel(runs, work)
    for kind in kinds:
        (out / kind).mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(work / kind / name, out / kind / name)


def head_arguments(kind: str, out: Path, data: list[Path], folder: Path, init: Path | None = None) -> list[str]:
    """Returns the arguments of eagle-train without its budget. init: a head to continue from."""
    arguments = ["head", str(out / "target"), "--kind", kind, "-o", str(folder), "--data", *map(str, data)]
    batch, unrolled = HEAD_BATCH[kind], TTT_STEPS
    if init is not None:
        batch, unrolled = LATER_BATCH, LATER_TTT_STEPS
        arguments += ["--init", str(init)]
    arguments += ["--seq-len", str(FAR_TOKENS), "--batch-size", str(batch)]
    if kind == "eagle3":
        arguments += ["--draft-vocab", str(DRAFT_VOCAB), "--ttt-steps", str(unrolled)]
    elif init is not None:
        arguments += ["--classification", str(CLASSIFICATION)]
    return arguments


def in_parallel(runs: Sequence[tuple[str, list[str]]], work: Path) -> None:
    """Run eagle-train several times at once, each on its share of the cores. The output goes to work/NAME.out. Raises
    TrainError if one fails."""
    threads = ["--threads", str(max(1, (os.cpu_count() or 1) // len(runs)))]
    with contextlib.ExitStack() as stack:
        started = []
        for name, arguments in runs:
            file = stack.enter_context((work / f"{name}.out").open("a", encoding="utf-8"))
            command = [sys.executable, "-m", "eagle_train.cli", *arguments, *threads]
            started.append((name, stack.enter_context(subprocess.Popen(command, stderr=file))))
        failed = [name for name, process in started if process.wait()]
    if failed:
        last = (work / f"{failed[0]}.out").read_text(encoding="utf-8").splitlines()[-1:]
        raise TrainError(f"{failed[0]} did not reach its end ({' '.join(last)}); see {work / failed[0]}.out")


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
