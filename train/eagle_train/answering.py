"""Answers many prompts at once with the target's weights: as an answer ends, another prompt takes its place.

Keys and values are kept in buckets of equally long rows, where each row grows in place; one that outgrows its bucket
moves to the next. So attention of a short row does not read as far as that of a long one, and memory is taken for rows
that are there.

Shapes: N rows, T tokens of a prompt, L layers, D width of a head, A heads, K key/value heads, H hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from eagle_train.attention import FUSED
from eagle_train.config import Sampling
from eagle_train.decoder import Decoder
from eagle_train.errors import TrainError
from eagle_train.sampling import choose, loop_start
from eagle_train.target import FrozenTarget

BUCKET = 128  # tokens by which the lengths of two buckets differ
READ = {"cpu": 768}  # tokens of prompts, about, that are read in one pass
READ_ELSEWHERE = 16384
# cuDNN's attention is planned anew for every length, which takes more than a millisecond.
REFILL = 1 / 32  # share of the rows that must be free before prompts are read: a pass costs a GPU as much as a step


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue. number: of the answer among all, on which its random numbers depend."""

    ids: Sequence[int]
    number: int
    sampling: Sampling


def checked(request: Request, context: int) -> Request:
    """Returns the request. Raises TrainError for a prompt that a context of so many tokens does not hold."""
    if len(request.ids) >= context:
        raise TrainError(f"a prompt has {len(request.ids)} tokens, but the target's context is {context}; shorten it")
    return request


class Requests(Protocol):
    """Where prompts come from."""

    def take(self) -> Request | None:
        """Returns the next prompt, or None while there is none. Raises TrainError."""
        ...


class AnswerSampler(Protocol):
    """Continues prompts of token ids."""

    vocab_size: int
    context: int

    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        """Yields each request's new tokens, up to and including the one that ends the answer, in the order in which
        they end, until none is left: further requests may come while an answer is being handled."""
        ...


@dataclass(slots=True)
class Row:
    """An answer that is being written. length: tokens whose keys and values are kept; the last token's are not yet."""

    request: Request
    length: int
    tokens: list[int] = field(default_factory=list)


def take_in(row: Row, token: int, eos: Collection[int], context: int) -> bool:
    """Adds a token to an answer. Returns whether the answer has ended."""
    row.tokens.append(token)
    sampling, room = row.request.sampling, context - len(row.request.ids)
    start = loop_start(row.tokens) if sampling.cut_loops else None
    if start is not None:
        del row.tokens[start:]
    return start is not None or token in eos or len(row.tokens) >= min(sampling.max_new_tokens, room)


class Bucket:
    """The rows of at most `room` tokens, without gaps. keys, values [N or more, L, K, room, D]."""

    def __init__(self, room: int, like: Tensor) -> None:
        self.rows: list[Row] = []
        self.keys = self.values = like.new_empty(0, *like.shape[:2], room, like.shape[-1])

    def add(self, row: Row, keys: Tensor, values: Tensor) -> None:
        """Take a row in, with its keys and values [L, K, tokens, D]."""
        place = len(self.rows)
        if place == len(self.keys):
            self._resize(max(4, 2 * place))
        for part, new in ((self.keys, keys), (self.values, values)):
            part[place, :, :, : new.shape[2]] = new
            part[place, :, :, new.shape[2] :] = 0  # what is masked is read, and must be numbers
        self.rows.append(row)

    def remove(self, place: int) -> tuple[Tensor, Tensor]:
        """Returns copies of a row's keys and values; the last row gets its place."""
        length = self.rows[place].length
        taken = self.keys[place, :, :, :length].clone(), self.values[place, :, :, :length].clone()
        self.drop(place)
        return taken

    def drop(self, place: int) -> None:
        """Remove a row; the last row gets its place."""
        last = self.rows.pop()
        if place < len(self.rows):
            for part in (self.keys, self.values):
                part[place, :, :, : last.length] = part[len(self.rows), :, :, : last.length]
            self.rows[place] = last
        if 4 * len(self.rows) < len(self.keys):
            self._resize(2 * len(self.rows))

    def _resize(self, size: int) -> None:
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(size, *old.shape[1:])  # memory of the system's, taken only where it is written
            new[: len(self.rows)] = old[: len(self.rows)]
            setattr(self, name, new)


class TargetSampler:
    """An AnswerSampler that runs the target's weights. rows: answers that are written at once.

    On the CPU each of torch's threads has rows of its own: threads that share the rows wait for one another in every
    operator, which takes a third longer, and much longer while other programs use the cores."""

    def __init__(self, target: FrozenTarget, rows: int) -> None:
        self.vocab_size = target.vocab_size
        self.context = target.context
        self._target, self._threads = target, torch.get_num_threads()
        workers = min(self._threads, rows) if target.device.type == "cpu" else 1
        self._rows = -(-rows // workers)
        self._read = READ.get(target.device.type, READ_ELSEWHERE)
        self._decoder = Decoder(target)
        self._workers = range(workers)

    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        """Yields each request's new tokens as they end. Raises TrainError for a prompt that the context does not
        hold."""
        idle = [Slots(self._target, self._decoder) for _ in self._workers]
        running: dict[Future[list[Row]], Slots] = {}
        threads = 1 if len(idle) > 1 else self._threads
        try:
            with ThreadPoolExecutor(len(idle), initializer=torch.set_num_threads, initargs=(threads,)) as pool:
                while True:
                    waiting = []
                    for slots in idle:
                        room = self._rows - slots.count
                        new = self._next(requests, room) if room >= REFILL * self._rows else []
                        if new or slots.count:
                            running[pool.submit(slots.advance, new)] = slots
                        else:
                            waiting.append(slots)
                    if not running:
                        return
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    idle = [*waiting, *(running[future] for future in done)]
                    for row in [row for future in done for row in future.result()]:
                        yield row.request, row.tokens
                    for future in done:
                        del running[future]
        finally:
            torch.set_num_threads(self._threads)  # the number that a thread sets holds for MKL as a whole

    def _next(self, requests: Requests, room: int) -> list[Request]:
        """Returns prompts to read in one pass, at most `room`. Raises TrainError."""
        new: list[Request] = []
        while len(new) < room and sum(len(each.ids) for each in new) < self._read and (request := requests.take()):
            new.append(checked(request, self.context))
        return new


class Slots:
    """Answers that one thread writes, a token of each at a time."""

    def __init__(self, target: FrozenTarget, decoder: Decoder) -> None:
        self._target, self._decoder = target, decoder
        self._context = target.context
        self._kv_heads, self._group, self._width = decoder.kv_heads, decoder.group, decoder.width
        weight = target.model.model.embed_tokens.weight
        self._like = weight.new_empty(len(decoder.layers), self._kv_heads, 0, self._width)
        self._buckets: list[Bucket] = []

    @property
    def count(self) -> int:
        """Returns how many answers are being written."""
        return sum(len(bucket.rows) for bucket in self._buckets)

    @torch.no_grad()
    def advance(self, new: list[Request]) -> list[Row]:
        """Reads new prompts, if any, else writes a token of every answer. Returns the answers that ended."""
        with sdpa_kernel(FUSED):
            return self._read(new) if new else self._step()

    def _read(self, requests: list[Request]) -> list[Row]:
        """Reads prompts, one after another without padding, and takes their first tokens. Returns the answers that
        ended with them."""
        rows = [Row(request, len(request.ids)) for request in requests]
        lengths = [row.length for row in rows]
        ids = torch.tensor([token for request in requests for token in request.ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        kept = self._like.new_empty(2, len(self._decoder.layers), self._kv_heads, len(ids), self._width)

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept[0, number], kept[1, number] = keys.transpose(0, 1), values.transpose(0, 1)
            texts = zip(
                *(torch.split(part.transpose(0, 1), lengths, 1) for part in (queries, keys, values)), strict=True
            )
            return torch.cat([_causal(*(part[None] for part in text)) for text in texts])

        hidden = self._decoder.hidden(ids, positions, attend)
        last = torch.tensor(lengths).cumsum(0) - 1
        ended, staying = self._choose(hidden[last.to(hidden.device)], rows)
        texts = torch.split(kept, lengths, 3)
        for place in staying:
            self._bucket_of(rows[place]).add(rows[place], *texts[place])
        return ended

    def _bucket_of(self, row: Row) -> Bucket:
        number = row.length // BUCKET  # one more token fits
        while len(self._buckets) <= number:
            self._buckets.append(Bucket(BUCKET * (len(self._buckets) + 1), self._like))
        return self._buckets[number]

    def _step(self) -> list[Row]:
        """Writes one token of every answer. Returns those that ended."""
        buckets = [bucket for bucket in self._buckets if bucket.rows]
        rows = [row for bucket in buckets for row in bucket.rows]
        lengths = torch.tensor([row.length for row in rows])
        device = self._like.device
        parts = []
        start = 0
        for bucket in buckets:
            own = lengths[start : start + len(bucket.rows)]
            used = int(own.max()) + 1
            ends, places = own.to(device), torch.arange(len(own), device=device)
            hidden = (torch.arange(used, device=device) > ends[:, None])[:, None, None, :]
            mask = self._like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            parts.append((bucket, slice(start, start + len(own)), used, places, ends, mask))
            start += len(own)

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            """A group of query heads takes the place of rows of queries: its keys are read once."""
            queries = queries.view(len(rows), self._kv_heads, self._group, self._width)
            out = torch.empty_like(queries)
            for bucket, own, used, places, ends, mask in parts:
                own_keys, own_values = bucket.keys[:, number], bucket.values[:, number]
                own_keys[places, :, ends] = keys[own]
                own_values[places, :, ends] = values[own]
                count = len(places)
                out[own] = scaled_dot_product_attention(
                    queries[own], own_keys[:count, :, :used], own_values[:count, :, :used], attn_mask=mask
                )
            return out.view(len(rows), -1)

        ids = torch.tensor([row.tokens[-1] for row in rows])
        hidden = self._decoder.hidden(ids, lengths, attend)
        for row in rows:
            row.length += 1
        ended, _ = self._choose(hidden, rows)
        over = {id(row) for row in ended}
        moved = []
        for number, bucket in enumerate(self._buckets):
            for place in reversed(range(len(bucket.rows))):
                row = bucket.rows[place]
                if id(row) in over:
                    bucket.drop(place)
                elif row.length // BUCKET != number:
                    moved.append((row, bucket.remove(place)))
        for row, kept in moved:
            self._bucket_of(row).add(row, *kept)
        return ended

    def _choose(self, hidden: Tensor, rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
        """Gives each row its next token. Returns the answers that end with it, and the places of the others."""
        logits = self._target.logits(hidden)
        tokens = choose(logits, [(row.request.sampling, row.request.number, len(row.tokens)) for row in rows])
        ended, staying = [], []
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if take_in(row, token, self._target.eos, self._context):
                ended.append(row)
            else:
                staying.append(place)
        return ended, staying


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[1, A, T, D] and [1, K, T, D] of a text -> [T, A * D]."""
    out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
