"""Answers many prompts at once on a GPU: a step of all rows is one captured graph, so that it costs what the GPU
computes and not what the host launches.

Rows have places in caches of one length. A few steps are taken before the host looks at the tokens; then the places of
answers that have ended are given to new prompts, which are read in batches of similar length.

Shapes: N places, R tokens that a place holds, L layers, A query heads, K key/value heads, G = A / K, D width of a head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from eagle_train.answering import Request, Requests, Row, checked
from eagle_train.attention import FUSED, gpu_flash_takes
from eagle_train.batches import padded
from eagle_train.config import Sampling
from eagle_train.decoder import Decoder
from eagle_train.sampling import cut_loop, drawn, loop_start, uniform
from eagle_train.target import FrozenTarget

STEPS = 16  # between two looks of the host at the tokens
ROOM = 128  # by which the lengths of two graphs, and of caches, differ
PROMPTS = 64  # read in one pass
FLASH = torch.ops.aten._flash_attention_forward
Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
FITTING = 0.97  # share of the first requests for which caches are long enough; the others come afterwards


class GraphedSampler:
    """An AnswerSampler that runs the target's weights on a GPU. rows: answers that are written at once."""

    def __init__(self, target: FrozenTarget, rows: int) -> None:
        self.vocab_size = target.vocab_size
        self.context = target.context
        self._target, self._decoder, self._rows = target, Decoder(target), rows

    @torch.no_grad()
    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        """Yields each request's new tokens as they end. Raises TrainError for a prompt that the context does not
        hold."""
        waiting: deque[Request] = deque()
        while True:
            while len(waiting) < self._rows and (request := requests.take()) is not None:
                waiting.append(checked(request, self.context))
            if not waiting:
                return
            needs = sorted(self._needs(request) for request in waiting)
            room = needs[int(FITTING * (len(needs) - 1))]
            with sdpa_kernel(FUSED):
                waiting = yield from self._wave(requests, waiting, min(-(-room // ROOM) * ROOM, self.context))

    def _needs(self, request: Request) -> int:
        """Returns the tokens that a request may take in all."""
        return min(len(request.ids) + request.sampling.max_new_tokens, self.context)

    def _wave(
        self, requests: Requests, waiting: deque[Request], room: int
    ) -> Generator[tuple[Request, list[int]], None, deque[Request]]:
        """Answers all requests for which `room` tokens are enough. Returns the others."""
        others: deque[Request] = deque()
        places = Places(self._target, self._decoder, min(self._rows, len(waiting)), room)
        rows: list[Row | None] = [None] * places.count
        while True:
            free = [place for place, row in enumerate(rows) if row is None]
            new: list[tuple[int, Row]] = []
            while free and (request := waiting.popleft() if waiting else requests.take()) is not None:
                if self._needs(checked(request, self.context)) > room:
                    others.append(request)
                else:
                    new.append((free.pop(), Row(request, len(request.ids))))
            new.sort(key=lambda each: each[1].length)
            for start in range(0, len(new), PROMPTS):
                places.read(new[start : start + PROMPTS])
            for place, started in new:
                rows[place] = started
            if all(row is None for row in rows):
                return others
            tokens = places.write(rows)
            for place, row in enumerate(rows):
                if row is not None and self._ends(row, tokens[place]):
                    rows[place] = None
                    yield row.request, row.tokens

    def _ends(self, row: Row, new: Sequence[int]) -> bool:
        """Adds what was written to an answer. Returns whether it has ended."""
        sampling = row.request.sampling
        limit = min(sampling.max_new_tokens, self.context - len(row.request.ids))
        over = False
        for token in new:
            row.tokens.append(token)
            row.length += 1
            if over := token in self._target.eos or len(row.tokens) >= limit:
                break
        if sampling.cut_loops and loop_start(row.tokens) is not None:
            row.tokens = cut_loop(row.tokens)
            return True
        return over


class Places:
    """Caches of the rows that are being written, and the graphs that write a token of each.

    A row's token is written from `tokens`, at `lengths` of its cache. What empty places write is not looked at."""

    def __init__(self, target: FrozenTarget, decoder: Decoder, count: int, room: int) -> None:
        self._target, self._decoder, self._device = target, decoder, target.device
        self.count, self._room = count, room
        self._kv_heads, self._group, self._width = decoder.kv_heads, decoder.group, decoder.width
        like = target.model.model.embed_tokens.weight
        shape = (len(decoder.layers), count, room, self._kv_heads, self._width)
        self._keys, self._values = like.new_zeros(shape), like.new_zeros(shape)
        self._tokens = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._lengths = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._places = torch.arange(count, device=self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, Tensor] = {}

    def read(self, rows: Sequence[tuple[int, Row]]) -> None:
        """Reads the prompts of rows but for their last token, which the first step writes from."""
        prompts = [row.request.ids for _, row in rows]
        places = torch.tensor([place for place, _ in rows], device=self._device)
        ids = torch.from_numpy(padded([np.array(prompt, np.int64) for prompt in prompts])).to(self._device)
        longest = ids.shape[1]
        positions = torch.arange(longest, device=self._device)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(len(rows), longest, -1, self._width) for x in (q, k, v))
            self._keys[number][places, :longest] = k
            self._values[number][places, :longest] = v
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(len(rows) * longest, -1)

        self._decoder.hidden(ids.flatten(), positions.repeat(len(rows)), attend)
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        self._tokens[places] = ids.gather(1, lengths[:, None])[:, 0]
        self._lengths[places] = lengths

    def write(self, rows: Sequence[Row | None]) -> list[list[int]]:
        """Writes STEPS tokens of all rows. Returns those of each place [N][STEPS]."""
        alive = [row for row in rows if row is not None]
        reach = max(row.length for row in alive) + STEPS
        used = self._room if self._fused() else min(-(-reach // ROOM) * ROOM, self._room)
        groups, points = _groups(rows, self._device)
        written = torch.empty(STEPS, self.count, dtype=torch.int64, device=self._device)
        for step in range(STEPS):
            logits = self._target.logits(self._step(used))
            torch.argmax(logits, -1, out=written[step])
            for (temperature, top_p, top_k), places in groups.items():
                scaled = logits[places] / temperature
                written[step, places] = drawn(scaled, top_p, top_k, points[step, places])
            self._tokens.copy_(written[step])
            self._lengths.add_(1).clamp_(max=self._room - 1)
        new: list[list[int]] = written.T.tolist()
        return new

    def _step(self, used: int) -> Tensor:
        """Returns the hidden states [N, H] of one token per row; caches are read as far as `used`."""
        if self._device.type != "cuda":
            return self._token_pass(used)
        if used not in self._graphs:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._token_pass(used)  # kernels are chosen before they are captured
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._hidden[used] = self._token_pass(used)
            self._graphs[used] = graph
        self._graphs[used].replay()
        return self._hidden[used]

    def _token_pass(self, used: int) -> Tensor:
        attended = self._varlen() if self._fused() else self._masked(used)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """A group of query heads takes the place of rows of queries: its keys are read once."""
            keys, values = self._keys[number], self._values[number]
            keys[self._places, self._lengths] = k
            values[self._places, self._lengths] = v
            return attended(q.reshape(self.count, self._kv_heads, self._group, self._width), keys, values)

        return self._decoder.hidden(self._tokens, self._lengths, attend)

    def _fused(self) -> bool:
        """Returns whether flash attention computes a step, which reads each row's cache as far as it is filled."""
        return gpu_flash_takes(self._keys)

    def _varlen(self) -> Attended:
        """A place's cache is a sequence of `room` keys, of which `filled` count; its query heads' groups are another of
        `group` queries, which all see them."""
        ends = torch.arange(self.count + 1, device=self._device, dtype=torch.int32)
        filled = (self._lengths + 1).to(torch.int32)

        def attended(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            flat = q.transpose(1, 2).reshape(-1, self._kv_heads, self._width)
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            sizes = ends * self._group, ends * self._room, self._group, self._room
            out: Tensor = FLASH(flat, keys, values, *sizes, 0.0, False, False, seqused_k=filled)[0]
            return out.view(self.count, self._group, self._kv_heads, -1).transpose(1, 2).reshape(self.count, -1)

        return attended

    def _masked(self, used: int) -> Attended:
        hidden = torch.arange(used, device=self._device) > self._lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._keys.dtype, device=self._device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None].expand(-1, self._kv_heads, self._group, -1)

        def attended(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            k, v = (x[:, :used].transpose(1, 2) for x in (keys, values))
            return scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(self.count, -1)

        return attended


def _groups(rows: Sequence[Row | None], device: torch.device) -> tuple[dict[tuple[float, float, int], Tensor], Tensor]:
    """Returns which places are sampled at each temperature, top_p and top_k, and random points [STEPS, N] for all."""
    groups: dict[tuple[float, float, int], list[int]] = {}
    keys = np.zeros((STEPS, len(rows), 3), np.uint64)
    for place, row in enumerate(rows):
        if row is None or not row.request.sampling.temperature > 0:
            continue
        sampling: Sampling = row.request.sampling
        groups.setdefault((sampling.temperature, sampling.top_p, sampling.top_k), []).append(place)
        keys[:, place, 0], keys[:, place, 1] = sampling.seed % (1 << 64), row.request.number
        keys[:, place, 2] = np.arange(len(row.tokens), len(row.tokens) + STEPS)
    points = uniform(keys.reshape(-1, 3)).reshape(STEPS, len(rows)).astype(np.float32)
    return {key: torch.tensor(places, device=device) for key, places in groups.items()}, torch.from_numpy(points).to(
        device
    )
