"""The GPU memory that a bundle takes: compared with what is free before anything is loaded, and shared between scratch
memory and weights that are streamed from the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_runtime.base.errors import BackendError
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt.execution import Execution
from eagle_runtime.trt.fixed_shapes import PAST_STEP

# Chosen.
MARGIN = 256 << 20  # bytes left to the driver, and to kernels that are compiled here, where weights are streamed
ROUNDS = 8  # of fitting the weights that stay on the GPU: their number changes the scratch memory, and that the number


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one engine takes. weights: 0 where they are streamed, which can do without any on the GPU. cache: keys
    and values; token: those of one token. buffers: inputs and outputs. scratch: what a forward pass takes, which
    engines share; 0 where the build did not report it."""

    weights: int
    cache: int
    token: int
    buffers: int
    scratch: int


def check_room(needs: Sequence[Needs], gpu: DeviceInfo, context: int) -> None:
    """Raises BackendError if the GPU cannot hold these engines. context: tokens that their caches hold."""
    weights, cache = sum(one.weights for one in needs), sum(one.cache for one in needs)
    working = sum(one.buffers for one in needs) + max(one.scratch for one in needs)
    total = weights + cache + working
    if total <= gpu.available:
        return
    fitting = (gpu.available - weights - working) // max(1, sum(one.token for one in needs)) // PAST_STEP * PAST_STEP
    fitting = min(fitting, context - 1)
    advice = (
        f"load it with a context of {fitting} tokens or less"
        if fitting >= PAST_STEP
        else "use an int8 or int4 bundle, or build its engines with weight streaming (--weight-streaming)"
    )
    raise BackendError(
        f"{gpu.name} has {_gb(gpu.available)} of {_gb(gpu.total)} GB free, but this bundle takes {_gb(total)} GB: "
        f"{_gb(weights)} GB of weights, {_gb(cache)} GB of keys and values for a context of {context} tokens, "
        f"{_gb(working)} GB for a forward pass; {advice}, or end the process that holds the rest"
    )


def fit_streamed(executions: Sequence[Execution], streamed: Sequence[bool], room: int) -> int:
    """Set how many bytes of streamed weights stay on the GPU, and return the scratch memory that all engines then
    share. streamed: of which engines. room: bytes for both. The budget comes first, since scratch memory depends on
    it."""
    budget = room
    for _ in range(ROUNDS):
        kept = sum(one.keep_on_gpu(budget) for one, streams in zip(executions, streamed, strict=True) if streams)
        scratch = max(one.scratch_bytes for one in executions)
        if kept == 0 or kept + scratch <= room:
            break
        budget = min(kept - 1, room - scratch)
    return scratch


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"
