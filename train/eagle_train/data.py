"""Reads training text as token ids with a loss mask, and cuts it into windows, kept on disk to save memory."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_calib.text_files import text_lines
from eagle_calib.texts import joined
from eagle_export.reading.checkpoint import is_gguf
from eagle_export.reading.gguf.checkpoint import open_gguf
from eagle_runtime.base.errors import first_line
from eagle_train.config import ALL_FILES
from eagle_train.data_rows import Message, Tools, completion_of, is_chat, messages_of, rows_of, tools_of
from eagle_train.errors import RowError, TrainError

WINDOW_FILES = ("ids.bin", "mask.bin", "starts.bin", "digest")  # of a folder of windows
APART = 1 << 23  # bytes of files that are worth starting processes for
DAY = "26 Jul 2024"  # Llama-3's templates write today's, which a run that is resumed tomorrow would read as other data
BLOCK_CHARS = 1 << 20  # of a plain text file, tokenised at a time


@dataclass(frozen=True, slots=True)
class Example:
    """One text. mask: which ids carry loss. prefix: ids that begin every window of it (a text's bos). begun: how many
    of the ids are that prefix."""

    ids: Sequence[int]
    mask: Sequence[bool]
    prefix: Sequence[int] = ()
    begun: int = 0


class TextReader:
    """Reads data files as examples, encoded by the target's tokenizer.

    skipped, skip_reason: number of rows that cannot be used, as those that the chat template refuses, and why the first
    one cannot; such rows are left out."""

    def __init__(self, target: Path, vocab_size: int, eos: Sequence[int], pattern: str = ALL_FILES) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._eos = frozenset(eos)
        self._pattern = pattern
        self._tokenizer: Any = None
        self.skipped = 0
        self.skip_reason = ""

    def read(self, paths: Iterable[Path]) -> Iterator[Example]:
        """Yields the examples of all files in order; of a folder those that match the pattern, sorted by name.

        Raises TrainError for a file that is missing or no text, and where every row of all files is left out."""
        before, used = self.skipped, False
        for example in self._all(list(data_files(paths, self._pattern))):
            used = True
            yield example
        if not used and self.skipped > before:
            others = self.skipped - before - 1
            also = f", and {others} more rows cannot be used" if others else ""
            raise TrainError(f"{self.skip_reason}{also}; there is nothing to learn from")

    def _all(self, files: Sequence[Path]) -> Iterator[Example]:
        """Yields the examples of files; large ones are read by several processes at once."""
        if len(files) < 2 or sum(path.stat().st_size for path in files) < APART:
            for path in files:
                yield from self._file(path)
            return
        workers, context = min(len(files), os.cpu_count() or 1), multiprocessing.get_context("spawn")
        one = TextReader(self._target, self._vocab_size, tuple(self._eos), self._pattern)
        with ProcessPoolExecutor(workers, context) as pool:
            for examples, skipped, reason in pool.map(one.of_file, files):
                self.skipped, self.skip_reason = self.skipped + skipped, self.skip_reason or reason
                yield from examples

    def of_file(self, path: Path) -> tuple[list[Example], int, str]:
        """Returns a file's examples, how many rows were left out, and why the first was."""
        self.skipped, self.skip_reason = 0, ""
        return list(self._file(path)), self.skipped, self.skip_reason

    def _file(self, path: Path) -> Iterator[Example]:
        rows = rows_of(path, self._leave_out)
        if rows is None:
            blocks = joined(text_lines(path, TrainError, newline=""), BLOCK_CHARS)
            rows = ((str(path), {"text": block}) for block in blocks)
        for where, row in rows:
            try:
                for example in self._row(where, row):
                    yield self._checked(where, example)
            except RowError as error:
                self._leave_out(str(error))

    def _leave_out(self, reason: str) -> None:
        self.skipped += 1
        self.skip_reason = self.skip_reason or reason

    def _row(self, where: str, row: Mapping[str, Any]) -> list[Example]:
        if "ids" in row:
            return [self._ids(where, row)]
        if isinstance(row.get("text"), str) and not is_chat(row):
            return [self._plain(where, row["text"])]
        if (pair := completion_of(row)) is not None:
            return [self._completed(where, *pair)]
        return self._conversation(where, messages_of(where, row), tools_of(where, row))

    def _checked(self, where: str, example: Example) -> Example:
        """Returns an example whose windows all begin with the bos if its text does. Raises RowError."""
        if (largest := max(example.ids, default=0)) >= self._vocab_size:
            raise RowError(
                f"{where}: the tokenizer gives the id {largest}, but the target knows {self._vocab_size}; use the "
                "tokenizer.json of this target"
            )
        bos = self._bos
        return replace(example, prefix=bos, begun=1) if bos and [*example.ids[:1]] == bos else example

    @functools.cached_property
    def _bos(self) -> list[int]:
        """The bos; none of a target without a tokenizer."""
        self._tokenizer = self._tokenizer or find_tokenizer(self._target)
        return [] if self._tokenizer is None else [self._tokenizer.bos_token_id]

    def _ids(self, where: str, row: Mapping[str, Any]) -> Example:
        ids = ids_of(where, row["ids"], self._vocab_size)
        prompt = row.get("prompt_tokens", 0)
        if type(prompt) is not int or not 0 <= prompt <= len(ids):
            raise RowError(f"{where}: prompt_tokens is {prompt!r}, but must be a number up to {len(ids)}")
        return Example(ids, [i >= prompt for i in range(len(ids))])

    def _plain(self, where: str, text: str) -> Example:
        tokenizer = self.tokenizer(where)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Example(ids, [True] * len(ids), self._begin(where))

    def _begin(self, where: str) -> Sequence[int]:
        """The bos that the tokenizer puts before every text, if it does."""
        tokenizer = self.tokenizer(where)
        begin: list[int] = tokenizer("a")["input_ids"][:1]
        return begin if begin == [tokenizer.bos_token_id] else ()

    def _completed(self, where: str, prompt: str, completion: str) -> Example:
        """A prompt and its completion, which alone carries loss."""
        text = prompt + completion
        example = self._masked(self.tokenizer(where), text, [(len(prompt), len(text))])
        return Example(example.ids, example.mask, self._begin(where))

    def _conversation(self, where: str, messages: list[Message], tools: Tools) -> list[Example]:
        """Returns one example, or one per answer if the template rewrites earlier turns."""
        tokenizer = self.tokenizer(where)
        if not tokenizer.chat_template:
            raise TrainError(f"{where}: {self._target} has no chat template; give plain text or ids")
        try:
            parts = _rendered(tokenizer, messages, tools)
        except Exception as error:  # a template may raise any exception
            raise RowError(f"{where}: the chat template refuses it ({first_line(error)})") from None
        if not parts:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "others"
            raise RowError(f"{where}: no message of the assistant follows one of the user (the roles are {roles})")
        return [self._masked(tokenizer, text, spans) for text, spans in parts]

    def _masked(self, tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        """Returns an example whose tokens carry loss where they touch a span [start, end) of characters. In each span
        the first end-of-text token is the last one: a target never writes what the template adds after it."""
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, mask = encoded["input_ids"], [False] * len(encoded["input_ids"])
        for start, end in spans:
            for i, (first, last) in enumerate(encoded["offset_mapping"]):
                if first < end and last > start:
                    mask[i] = True
                    if ids[i] in self._eos:
                        break
        return Example(ids, mask)

    def tokenizer(self, where: str) -> Any:
        """Returns the target's tokenizer, loaded when first needed. Raises TrainError if there is none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._target, where)
        return self._tokenizer


def load_tokenizer(target: Path, where: str) -> Any:
    """Returns transformers' tokenizer of a target. Raises TrainError, in which `where` names what needs it."""
    if (tokenizer := find_tokenizer(target)) is None:
        raise TrainError(f"{where}: {target} has no tokenizer.json to encode text with; give rows of ids instead")
    return tokenizer


def find_tokenizer(target: Path) -> Any:
    """Returns transformers' tokenizer of a folder or a GGUF file, None of one that has none. Raises TrainError, and
    ExportError for a GGUF file that cannot be read."""
    with _text_files(target) as folder:
        if not (folder / "tokenizer.json").is_file():
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises bare Exception
            raise TrainError(f"{target}: the tokenizer does not load ({first_line(error)})") from None


@contextmanager
def _text_files(target: Path) -> Iterator[Path]:
    """Gives the folder with the files of a target's tokenizer, for a GGUF file one that is made of it."""
    if not is_gguf(target):
        yield target
        return
    with TemporaryDirectory() as folder:
        for name, content in (open_gguf(target).texts or {}).items():
            (Path(folder) / name).write_bytes(content)
        yield Path(folder)


def special_ids(target: Path) -> tuple[int, ...]:
    """Returns the ids of special tokens (bos, eos, ...) of a target's tokenizer; none without one."""
    tokenizer = find_tokenizer(target)
    return () if tokenizer is None else tuple(tokenizer.all_special_ids)


def data_files(paths: Iterable[Path], pattern: str) -> Iterator[Path]:
    """Yields the files as given, and the files of folders that match the pattern. Raises TrainError for a missing
    one."""
    for path in paths:
        if path.is_dir():
            yield from (file for file in sorted(path.glob(pattern)) if file.is_file())
        elif path.is_file():
            yield path
        else:
            raise TrainError(f"{path} does not exist; give files or folders of training text")


def ids_of(where: str, ids: Any, vocab_size: int) -> list[int]:
    """Returns ids if it is a list of token ids. Raises TrainError."""
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RowError(f"{where}: ids must be a list of whole numbers from 0 to {vocab_size - 1}; correct the file")
    return ids


def chat_of(tokenizer: Any, messages: Sequence[Message], tools: Tools, **options: Any) -> Any:
    """Returns what the chat template makes of a conversation, on the same day each time."""
    return tokenizer.apply_chat_template(messages, tools=tools, date_string=DAY, **options)


def _rendered(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> list[tuple[str, list[tuple[int, int]]]]:
    """Returns (text, spans of its answers in characters) of a conversation, by rendering every prefix of it.

    An answer of which the template leaves thoughts out, as in the turns of a chat, stands as the target wrote it."""

    def render(count: int, **kwargs: Any) -> str:
        return str(chat_of(tokenizer, messages[:count], tools, tokenize=False, **kwargs))

    answers = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked, answered = render(i, add_generation_prompt=True), render(i + 1)
            content = message["content"] or ""
            if content.strip() not in answered and not message.get("tool_calls"):
                answered = asked + content[_opened(asked, content) :] + (tokenizer.eos_token or "")
            answers.append((answered, (_shared_length(asked, answered), len(answered))))
    if not answers:
        return []
    longest = answers[-1][0]
    if all(longest.startswith(text) for text, _ in answers):
        return [(longest, [span for _, span in answers])]
    return [(text, [span]) for text, span in answers]


def _opened(asked: str, content: str) -> int:
    """How many characters of an answer the prompt ends with, as with an opening tag of thoughts. Few of its beginnings
    end as the prompt does, and only these are compared: an answer may have tens of thousands of characters."""
    sizes = range(min(len(asked), len(content)), 0, -1)
    return next((n for n in sizes if content[n - 1] == asked[-1] and asked.endswith(content[:n])), 0)


def _shared_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Windows:
    """N windows of ids, on disk. starts [N + 1] into ids [tokens] int32 and mask [tokens] bool. digest: sha256 over
    all three."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def window(self, index: int) -> slice:
        """Returns the slice of ids and mask that the window consists of."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def digests(self) -> Iterator[bytes]:
        """Yields what tells the ids of each window apart."""
        for index in range(len(self)):
            yield hashlib.blake2b(self.ids[self.window(index)].tobytes(), digest_size=16).digest()

    def loss_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Returns [V]: how often each id carries loss."""
        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self.ids), 1 << 22):
            part = slice(start, start + (1 << 22))
            counts += np.bincount(self.ids[part][self.mask[part]], minlength=vocab_size)
        return counts


def write_windows(examples: Iterable[Example], folder: Path, seq_len: int, name: str) -> Windows:
    """Cut examples into windows of at most seq_len tokens, write them into a folder and open them.

    A window is kept if a token after its second carries loss. name: of the data, for the TrainError that is raised
    if no window is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    starts, end, digest = [0], 0, hashlib.sha256()
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "mask.bin").open("wb") as mask_file:
        for example in examples:
            prefix = list(example.prefix)
            step = seq_len - len(prefix)
            for first in range(example.begun, len(example.ids), step):
                ids = np.array([*prefix, *example.ids[first : first + step]], np.int32)
                mask = np.array([*[False] * len(prefix), *example.mask[first : first + step]], np.bool_)
                if not mask[2:].any():
                    continue
                for file, array in ((ids_file, ids), (mask_file, mask)):
                    data = array.tobytes()
                    file.write(data)
                    digest.update(data)
                end += len(ids)
                starts.append(end)
    if end == 0:
        raise TrainError(f"{name} holds nothing to learn from: no text of 3 tokens or more that carries loss")
    offsets = np.array(starts, np.int64)
    offsets.tofile(folder / "starts.bin")
    digest.update(offsets.tobytes())
    (folder / "digest").write_text(digest.hexdigest(), encoding="ascii")
    return open_windows(folder)


def open_windows(folder: Path) -> Windows:
    """Returns what write_windows wrote, mapped into memory."""
    return Windows(
        ids=np.memmap(folder / "ids.bin", np.int32, "r"),
        mask=np.memmap(folder / "mask.bin", np.bool_, "r"),
        starts=np.fromfile(folder / "starts.bin", np.int64),
        digest=(folder / "digest").read_text(encoding="ascii"),
    )
