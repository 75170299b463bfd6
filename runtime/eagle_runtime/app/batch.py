"""Answers to several requests at once: each in a thread and with caches of its own, so that they meet in rounds
(core.rounds), which verify all their trees in one forward pass where the engine can."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from eagle_runtime.app.result import Piece
from eagle_runtime.app.turn import Turn

Begin = Callable[[], Turn]
END = None  # in a queue: a thread has nothing more to do
PIECES = 64  # that wait for the consumer at most: eight cycles of eight requests


def pieces_of(begins: Sequence[Begin], width: int) -> Iterator[tuple[int, Piece]]:
    """Yields (number, piece) of turns as their pieces come, `width` turns at once; the last piece of each has its
    result. begins: each returns a turn; called once it is that turn's time. Raises what a turn raises, and then ends
    the others, as it does where the iteration is left early."""
    out: queue.Queue[tuple[int, Piece | BaseException] | None] = queue.Queue(PIECES)
    numbers = iter(range(len(begins)))
    running: dict[int, Turn] = {}
    lock, left = threading.Lock(), threading.Event()

    def work() -> None:
        while not left.is_set():
            with lock:
                if (number := next(numbers, None)) is None:
                    break
            try:
                with begins[number]() as turn:
                    with lock:
                        running[number] = turn
                    for piece in turn:
                        out.put((number, piece))
                        if left.is_set():
                            turn.cancel()
            except BaseException as error:
                out.put((number, error))
            finally:
                with lock:
                    running.pop(number, None)
        out.put(END)

    threads = [threading.Thread(target=work, name="eagle-batch", daemon=True) for _ in range(min(width, len(begins)))]
    for thread in threads:
        thread.start()
    busy = len(threads)
    try:
        while busy:
            if (item := out.get()) is END:
                busy -= 1
                continue
            number, piece = item
            if isinstance(piece, BaseException):
                raise piece
            yield number, piece
    finally:
        left.set()
        with lock:
            for turn in running.values():
                turn.cancel()
        while busy:  # threads that wait to put a piece go on
            busy -= out.get() is END
        for thread in threads:
            thread.join()
