"""Other engines as contenders (eagle_tools/peers): each model in a process of its own, asked to go on when its turn
comes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_runtime.machine.user_cache import cache_folder
from eagle_tools.bench.rows import Asked, Row, Setup, foreign_row
from eagle_tools.peers.convert import Converted, convert
from eagle_tools.peers.engine import LLAMA_CPP, MODES, Format, check_installed
from eagle_tools.peers.source import Source, open_source
from eagle_tools.peers.worker import Worker
from eagle_tools.turns import TURN


@dataclass(frozen=True, slots=True)
class Stored:
    """What a target takes on the disk. bits: per weight of the source, tables, scales and zeros included; None if
    the number of weights is unknown."""

    bytes: int
    bits: float | None


class PeerContender:
    """A converted model and a mode of its engine."""

    def __init__(self, worker: Worker, form: Format, bundle: str, mode: str) -> None:
        """bundle: the source's name, which is in the rows."""
        self.setup = Setup(mode, form.name, form.engine, bundle, 0.0)
        self.pass_bytes = 0  # unknown: the file's tables are not read whole
        self._worker, self._mode = worker, mode

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        key = f"{self._mode} {place}"
        self._worker.start(key, self._mode, asked.token_ids, max_new_tokens)
        first = self._worker.advance(key, 0.0, 1)
        tokens, decode_s, passes = list(first.tokens), 0.0, 0
        yield len(tokens)
        while len(tokens) < max_new_tokens:
            turn = self._worker.advance(key, TURN, max_new_tokens)
            tokens += turn.tokens
            decode_s, passes = decode_s + turn.seconds, turn.passes
            yield len(tokens)
        row = foreign_row(self.setup, asked, tokens, len(first.tokens), passes, first.seconds, decode_s)
        # A last draft may exceed the limit; its tokens took time too.
        return replace(row, new_tokens=max_new_tokens, token_ids=row.token_ids[:max_new_tokens])


@dataclass(frozen=True, slots=True)
class Peers:
    """The loaded peers of a run. workers: one per format. sizes: (precision, backend) -> size on the disk."""

    source: Source
    workers: Mapping[Format, Worker]
    sizes: Mapping[tuple[str, str], Stored]

    def contenders(self) -> Iterator[PeerContender]:
        """Yields a contender for each format and each mode of its engine."""
        for form in self.workers:
            yield from self.contenders_of(form)

    def contenders_of(self, form: Format) -> Iterator[PeerContender]:
        """Yields a contender for each mode of a format's engine, the one without drafts first."""
        for mode in MODES[form.engine]:
            yield PeerContender(self.workers[form], form, self.source.folder.absolute().name, mode)


def check_peers(folder: Path, formats: Sequence[Format]) -> Source:
    """Returns the source. Raises RequestError if it is not converted, or a peer is not installed."""
    source = open_source(folder)
    other = [str(form) for form in formats if source.is_gguf and form.engine != LLAMA_CPP]
    if other:
        raise RequestError(f"{folder} is a GGUF file, which {other[0]} is not made from; name formats of llama.cpp")
    for engine in dict.fromkeys(form.engine for form in formats):
        check_installed(engine)
    return source


def converted_peers(
    source: Source, formats: Sequence[Format], work: Path | None, threads: int, say: Callable[[str], None]
) -> list[Converted]:
    """Returns the source in the peers' formats. work: None for a folder in the user's cache."""
    return convert(source, formats, work or cache_folder() / "peers", threads, say)


def load_peers(
    source: Source,
    models: Sequence[Converted],
    threads: int,
    context: int,
    stack: ExitStack,
    say: Callable[[str], None],
) -> Peers:
    """Returns the peers, loaded; the stack ends their processes. One that does not decode here is left out, which is
    said. Raises RequestError if none does."""
    workers, sizes, weights = {}, {}, source.num_weights()
    for model in models:
        form = model.format
        try:
            workers[form] = _tried(stack, form, model.path, threads, context)
        except RequestError as error:
            if model is models[-1] and not workers:
                raise
            say(f"{form} is left out: {error}")
            continue
        sizes[form.name, form.engine] = Stored(model.stored, 8 * model.stored / weights)
    return Peers(source, workers, sizes)


def _tried(stack: ExitStack, form: Format, path: Path, threads: int, context: int) -> Worker:
    """Returns a model's process, which has decoded two tokens. Raises RequestError."""
    worker = Worker(form.engine, path, threads, context)
    stack.callback(worker.close)
    worker.start("trial", MODES[form.engine][0], range(1, 9), 2)
    worker.advance("trial", 0.0, 2)
    return worker


def stored_target(bundle: Path, graph: str, weights: int | None) -> Stored:
    """Returns the size of a bundle's target. graph: its file. weights: number of the source's weights, None if it
    is unknown."""
    size = sum(path.stat().st_size for path in (bundle / graph).parent.iterdir())
    return Stored(size, 8 * size / weights if weights else None)
