"""A process that runs one engine for a comparison.

Each engine has threads of its own, and may bring a copy of a library that another engine has too. In a process of its
own it cannot disturb the others' libraries, and while it waits for its turn all of its threads sleep: its pools spin
for some milliseconds after a forward pass at most, which the pause between turns covers (eagle_tools/turns.py)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError, first_line
from eagle_tools.peers.engine import GENAI, LLAMA_CPP, Decoding, Engine, Logits

END = "end"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a generation did in one turn. seconds: its own time. passes: forward passes so far, without the prompt's."""

    tokens: tuple[int, ...]
    seconds: float
    passes: int


class Worker:
    """The process, as its user sees it. A process that ends by itself gives a RequestError."""

    def __init__(self, engine: str, path: Path, threads: int, context: int) -> None:
        """Raises RequestError if the engine cannot load the model."""
        self._name = f"{engine} with {path}"
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, engine, path, threads, context), daemon=True)
        self._process.start()
        other.close()
        self._receive()

    def start(self, key: str, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> None:
        """Prepare a generation, which `advance` finds under `key`, in place of an earlier one."""
        self._ask("start", key, mode, list(token_ids), max_new_tokens)

    def advance(self, key: str, seconds: float, most: int) -> Turn:
        """Let a generation go on until so many seconds have passed, or it has `most` tokens or more."""
        turn: Turn = self._ask("advance", key, seconds, most)
        return turn

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Logits]:
        """Yields the logits after tokens[first], tokens[first + 1], ... in arrays [R, V]."""
        self._send("score", list(tokens), first)
        while not isinstance(piece := self._receive(), str):
            yield piece

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        """Returns the seconds of each of `count` forward passes of `rows` tokens after `context` tokens."""
        times: list[float] = self._ask("pass_seconds", context, rows, count)
        return times

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, *request: object) -> Any:
        self._send(*request)
        return self._receive()

    def _send(self, *request: object) -> None:
        try:
            self._pipe.send(request)
        except OSError:
            self._fail()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._fail()
        if isinstance(answer, Exception):
            raise RequestError(f"{self._name}: {answer}") from None
        return answer

    def _fail(self) -> None:
        self._process.join(5)
        status = self._process.exitcode
        ended = f"with status {status}" if status is None or status >= 0 else f"by {signal.Signals(-status).name}"
        raise RequestError(f"{self._name}: its process ended {ended}") from None


def _serve(pipe: Connection, engine: str, path: Path, threads: int, context: int) -> None:
    """Answer requests until the other end is closed."""
    quiet = os.open(os.devnull, os.O_WRONLY)  # engines print what they do
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        server = _Server(pipe, engine, path, threads, context)
        pipe.send(END)
        while True:
            name, *arguments = pipe.recv()
            pipe.send(getattr(server, name)(*arguments))
    except (EOFError, OSError):
        return
    except Exception as error:  # engines raise many kinds
        pipe.send(RequestError(first_line(error)))


class _Server:
    def __init__(self, pipe: Connection, engine: str, path: Path, threads: int, context: int) -> None:
        self._pipe = pipe
        self._engine = open_engine(engine, path, threads, context)
        self._running: dict[str, tuple[Decoding, list[int]]] = {}

    def start(self, key: str, mode: str, token_ids: list[int], max_new_tokens: int) -> str:
        self._running[key] = (self._engine.decoding(mode, token_ids, max_new_tokens), [])
        return END

    def advance(self, key: str, seconds: float, most: int) -> Turn:
        decoding, tokens = self._running[key]
        before, started = len(tokens), time.perf_counter()
        while True:
            tokens += decoding.advance()
            took = time.perf_counter() - started
            if took >= seconds or len(tokens) >= most:
                return Turn(tuple(tokens[before:]), took, decoding.passes)

    def score(self, token_ids: list[int], first: int) -> str:
        for piece in self._engine.score(token_ids):
            if first < len(piece):
                self._pipe.send(piece[first:])
            first = max(0, first - len(piece))
        return END

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        return self._engine.pass_seconds(context, rows, count)


def open_engine(engine: str, path: Path, threads: int, context: int) -> Engine:
    """Returns a converted model, loaded. context: tokens of the longest generation."""
    if engine == LLAMA_CPP:
        from eagle_tools.peers.llama_cpp import LlamaCpp

        return LlamaCpp(path, threads, context)
    if engine == GENAI:
        from eagle_tools.peers.genai import GenAi

        return GenAi(path, threads)
    from eagle_tools.peers.openvino import OpenVino

    return OpenVino(path, threads)
