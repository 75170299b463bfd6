"""The GPU memory that a bundle takes: refusals name numbers and what to change, streamed weights leave room for scratch
memory."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_runtime.base.errors import BackendError
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt.execution import Execution
from eagle_runtime.trt.memory_budget import Needs, check_room, fit_streamed

GB = 1_000_000_000
CONTEXT = 8192
# An 8 B model in fp16 with 128 kB of keys and values per token, and a head.
TARGET = Needs(weights=16 * GB, cache=CONTEXT * 131072, token=131072, buffers=GB // 2, scratch=GB // 4)
HEAD = Needs(weights=GB // 2, cache=CONTEXT * 4096, token=4096, buffers=GB // 10, scratch=GB // 2)


def gpu(free: int) -> DeviceInfo:
    return DeviceInfo("Card", "8.9", "13.0", 24 * GB, free)


def message(free: int, *needs: Needs) -> str:
    with pytest.raises(BackendError) as error:
        check_room(needs, gpu(free), CONTEXT)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_fits_is_not_refused() -> None:
    total = 16 * GB + GB // 2 + CONTEXT * (131072 + 4096) + GB // 2 + GB // 10 + GB // 2
    check_room((TARGET, HEAD), gpu(total), CONTEXT)
    assert "this bundle takes 18.71 GB" in message(total - 1, TARGET, HEAD)


def test_the_largest_context_that_fits_is_named() -> None:
    text = message(18 * GB, TARGET, HEAD)
    assert text.startswith("Card has 18.00 of 24.00 GB free, but this bundle takes 18.71 GB: 16.50 GB of weights, ")
    assert "1.11 GB of keys and values for a context of 8192 tokens, 1.10 GB for a forward pass; load it with" in text
    match = re.search(r"a context of (\d+) tokens or less", text)
    assert match is not None
    fitting = int(match[1])
    assert fitting % 256 == 0 and fitting > 2000
    for context, fits in ((fitting, True), (fitting + 256, False)):
        total = 16.5 * GB + 1.1 * GB + context * (131072 + 4096)
        assert (total <= 18 * GB) == fits


def test_weights_that_do_not_fit_at_any_context_need_another_bundle() -> None:
    text = message(12 * GB, TARGET, HEAD)
    assert "use an int8 or int4 bundle, or build its engines with weight streaming (--weight-streaming), or end" in text


class Engine:
    """An engine whose scratch memory depends on the streamed weights that stay on the GPU."""

    def __init__(self, streamable: int, scratch: int, more: int) -> None:
        self.streamable, self.scratch, self.more = streamable, scratch, more
        self.kept = streamable

    def keep_on_gpu(self, nbytes: int) -> int:
        self.kept = max(0, min(nbytes, self.streamable))
        return self.kept

    @property
    def scratch_bytes(self) -> int:
        """More where weights are streamed: they pass through it."""
        return self.scratch + (self.more if self.kept < self.streamable else 0)


@given(
    streamable=st.integers(0, 20_000),
    scratch=st.integers(0, 3000),
    more=st.integers(0, 3000),
    other=st.integers(0, 3000),
    room=st.integers(-1000, 30_000),
)
def test_streamed_weights_leave_room_for_scratch_memory(
    streamable: int, scratch: int, more: int, other: int, room: int
) -> None:
    """And are kept as far as that allows."""
    target, head = Engine(streamable, scratch, more), Engine(500, other, 0)
    engines = cast(Any, (target, head))
    shared = fit_streamed(cast("tuple[Execution, ...]", engines), (True, False), room)
    assert shared == max(target.scratch_bytes, head.scratch_bytes) and head.kept == 500
    assert target.kept == 0 or target.kept + shared <= room
    best = max(0, min(streamable, room - max(scratch + more, other)))
    assert target.kept >= best, "no less than with the most scratch memory"
