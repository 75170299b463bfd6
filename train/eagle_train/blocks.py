"""Training of block heads: blocks after roots drawn from a text, all in one pass, and how their drafts are counted.

Row r of a block whose root is token i drafts token i + r + 1 from what decoding knows then: the target's states before
i, and token i. With transitions it also reads the token before the drafted one, which is the true one here
(DeepSpec, deepspec/modeling/dspark: teacher forcing). A row's loss is 0.3 cross-entropy + 0.7 total variation to the
target's own distribution (DeepSpec: 0.1 and 0.9), times exp(-r / 4): a draft counts if all before it are right. Rows
learn without their transitions too, with half of the weight: a drafter adds transitions to the likeliest tokens of a
row alone, so these have to contain the right one.

Shapes: b texts, T tokens, A blocks per text, B rows of a block, V vocabulary, Vd draft vocabulary, W width of all taps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_export.base.errors import ExportError
from eagle_export.heads.block import BlockHead, read_blocks
from eagle_export.heads.block_config import Block
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import DecoderLayer
from eagle_train.config import TrainConfig
from eagle_train.errors import TrainError
from eagle_train.linear_loss import linear_loss
from eagle_train.losses import masked_mean, shared
from eagle_train.metrics import Tally
from eagle_train.objective import Matches, Vocabulary
from eagle_train.rows import taken
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, Taught

ROW_DECAY = 4.0  # row r has the weight exp(-r / ROW_DECAY)
FREE = 0.5  # weight of the rows without their transitions
MEASURED = 32  # blocks that are measured in one pass


def block_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the taps of block heads trained here: EAGLE-3's three and the input of the last layer, as indices into
    hidden_states. A block has no other way to the target's last states.

    Raises ExportError below 7 layers, where they are not four ascending layers."""
    if num_layers < 7:
        raise ExportError(f"the target has {num_layers} layers, but a block head's four taps need 7 or more")
    return (2, num_layers // 2, num_layers - 3, num_layers - 1)


def block_shape(target: FrozenTarget, config: TrainConfig, draft_vocab_size: int) -> HeadConfig:
    """Returns the shape of a new block head. Raises ExportError for a target with too few layers."""
    plain = target.head_config("eagle1", draft_vocab_size)
    kv_heads = config.kv_heads or plain.num_kv_heads
    if plain.num_heads % kv_heads:
        raise TrainError(f"kv_heads is {kv_heads}, which {plain.num_heads} heads cannot share; give a divisor of it")
    return dataclasses.replace(
        plain,
        kind="block",
        num_layers=config.layers,
        num_kv_heads=kv_heads,
        intermediate_size=config.mlp or plain.intermediate_size,
        taps=block_taps(int(target.config.num_hidden_layers)),
        block=Block(config.block, True, True, None, config.markov_rank, True, reads_state=True),
    )


def start_block(head: BlockHead, target: FrozenTarget) -> None:
    """Set an untrained head to what the target offers: MLPs of its last layers if they have the head's size, the last
    tap as what is read, a mask as large as a token, and values that pass whole if there are as many key/value heads as
    heads. Transitions add nothing at first."""
    width, spread = target.hidden_size, float(target.model.model.embed_tokens.weight.float().std())
    whole = torch.eye(width, device=target.device)
    with torch.no_grad():
        head.fc.weight.mul_(0.3)
        head.fc.weight[:, -width:] += 0.5 * whole
        head.input_fc.weight.mul_(0.3)
        head.input_fc.weight[:, -width:] += 0.5 * spread * whole  # the state is larger than an embedding
        head.input_fc.weight[:, :width] += whole
        head.mask_embedding.normal_(0, spread)
        for attention in (cast(DecoderLayer, layer).self_attn for layer in head.layers):
            if attention.v_proj.weight.shape == attention.o_proj.weight.shape == whole.shape:
                attention.v_proj.weight.mul_(0.3).add_(whole)
                attention.o_proj.weight.mul_(0.3).add_(whole).mul_(spread)
        if head.markov_head is not None:
            head.markov_head.markov_w1.weight.normal_(0, head.markov_head.markov_w1.weight.shape[1] ** -0.5)
            head.markov_head.markov_w2.weight.zero_()
        for layer, source in zip(reversed(list(head.layers)), reversed(list(target.model.model.layers)), strict=False):
            theirs = source.state_dict()
            for name, value in layer.mlp.state_dict().items():  # type: ignore[union-attr]
                given = theirs.get(f"mlp.{name}")  # families with experts or joined matrices have none
                if given is not None and given.shape == value.shape:
                    value.copy_(given)


def draw_roots(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """Returns [b, A]: positions of roots, drawn among those whose next token carries loss."""
    follows = batch.loss_mask[:, 2:].to("cpu", torch.float32)
    drawn = torch.multinomial(follows, count, replacement=True, generator=generator)
    return (drawn + 1).to(batch.ids.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of blocks. hidden [b, A, B, H]: after the head's last norm. before [b, A, B]: the true token before each
    draft. teachers [b, A, B]: the target's rows, b * T + t, that the drafts learn from. counted [b, A, B] bool: rows
    whose token carries loss, as all tokens before it in the block do."""

    hidden: Tensor
    before: Tensor
    teachers: Tensor
    counted: Tensor

    def logits(self, head: BlockHead, transitions: bool = True) -> Tensor:
        """Returns the logits [b, A, B, Vd], with the transitions if asked for. The root is known, so its transition
        always counts."""
        free: Tensor = head.logits(self.hidden).float()
        if head.markov_head is None:
            return free
        added: Tensor = head.markov_head(self.before).float()
        return free + added if transitions else torch.cat([free[:, :, :1] + added[:, :, :1], free[:, :, 1:]], 2)


def draft_blocks(head: BlockHead, shape: HeadConfig, batch: Batch, taught: Taught, roots: Tensor) -> Drafted:
    """Returns the drafts of blocks at roots [b, A]."""
    assert shape.block is not None and taught.last is not None
    taps = torch.split(taught.features, shape.target_hidden_size, -1)
    hidden = read_blocks(head, shape, batch.ids, taps, taught.last, roots)
    places = roots[..., None] + torch.arange(shape.block.size, device=roots.device)
    last = batch.ids.shape[1] - 1
    known = places.clamp(max=last).flatten(1)
    before = batch.ids.gather(1, known).reshape(places.shape)
    drafted = (places + 1).clamp(max=last).flatten(1)
    counted = batch.loss_mask.gather(1, drafted).reshape(places.shape) & (places < last)
    texts = torch.arange(len(roots), device=roots.device)[:, None]
    teachers = (known + texts * batch.ids.shape[1]).reshape(places.shape)
    return Drafted(hidden, before, teachers, counted.cumprod(-1).bool())


def block_objective(
    head: BlockHead,
    shape: HeadConfig,
    batch: Batch,
    taught: Taught,
    vocabulary: Vocabulary | None,
    roots: Sequence[Tensor],
    tally: Tally,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss, and the mean losses of rows with their transitions and without. roots: of whole blocks [b, A]
    and, if there are two, of blocks of which the first row alone is drafted. The whole blocks are tallied."""
    assert shape.block is not None
    single = dataclasses.replace(shape, block=dataclasses.replace(shape.block, size=1))
    rows, weight = _Learning([], [], []), head.lm_head.weight
    if head.markov_head is not None:  # W h + W2 w1 = [W W2] [h w1]
        weight = torch.cat([weight, head.markov_head.markov_w2.weight], 1)
    whole, count = None, 0
    for each, some in zip((shape, single), roots, strict=False):
        drafted = draft_blocks(head, each, batch, taught, some)
        whole = whole or drafted
        count += rows.add(head, drafted)
    if head.markov_head is not None and shape.block.size > 1:
        assert whole is not None
        rows.add_free(head, whole)
    weights, teachers = torch.cat(rows.weights), torch.cat(rows.teachers)
    wanted, known = _wanted(taught.said.best.flatten()[teachers], vocabulary)
    kept = None if vocabulary is None else vocabulary.ids
    losses = linear_loss(
        torch.cat(rows.read),
        weight,
        # Not renormalised: the probability of tokens that the head does not know cannot be shared.
        lambda some: taught.said.probabilities(some, kept),
        teachers,
        wanted,
        weights / weights.sum().clamp(min=1),
    )
    assert whole is not None
    right = torch.zeros_like(whole.counted)
    right[whole.counted] = (losses.right & known)[: len(rows.weights[0])]
    _tally(whole.counted, right, tally)
    means = [masked_mean(losses.each[part], weights[part]) for part in (slice(count), slice(count, None))]
    return losses.total, dict(zip(("transitions", "free"), means, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _Learning:
    """Rows to learn, in parts of n: read [n, H + rank] what the LM head and the transitions read next to each other,
    teachers [n], weights [n]."""

    read: list[Tensor]
    teachers: list[Tensor]
    weights: list[Tensor]

    def add(self, head: BlockHead, drafted: Drafted) -> int:
        """Adds the rows of blocks with their transitions. Returns how many."""
        rows = torch.nonzero(drafted.counted.flatten()).flatten()
        states = taken(drafted.hidden.flatten(0, 2), rows)
        if head.markov_head is not None:
            added = head.markov_head.markov_w1(drafted.before.flatten()[rows])
            states = torch.cat([states, added.to(states.dtype)], 1)
        self._append(states, drafted, rows, 1.0)
        return len(rows)

    def add_free(self, head: BlockHead, drafted: Drafted) -> None:
        """Adds the rows of blocks after the first without their transitions."""
        assert head.markov_head is not None
        later = drafted.counted & (torch.arange(drafted.counted.shape[2], device=drafted.counted.device) > 0)
        rows = torch.nonzero(later.flatten()).flatten()
        states = pad(taken(drafted.hidden.flatten(0, 2), rows), (0, head.markov_head.markov_w1.weight.shape[1]))
        self._append(states, drafted, rows, FREE)

    def _append(self, states: Tensor, drafted: Drafted, rows: Tensor, share: float) -> None:
        self.read.append(states)
        self.teachers.append(drafted.teachers.flatten()[rows])
        self.weights.append(share * torch.exp(-(rows % drafted.counted.shape[2]) / ROW_DECAY))


def _wanted(best: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Returns the draft ids of the target's likeliest tokens [n], and which of them the head knows [n] bool."""
    if vocabulary is None:
        return best, torch.ones_like(best, dtype=torch.bool)
    places = torch.searchsorted(vocabulary.ids, best).clamp(max=len(vocabulary.ids) - 1)
    return places, vocabulary.member[best]


@torch.no_grad()
def measure_block(
    head: BlockHead,
    shape: HeadConfig,
    batch: Batch,
    taught: Taught,
    vocabulary: Vocabulary | None,
    tally: Tally,
    free: Tally,
) -> None:
    """Count the drafts of blocks at all roots of one text whose next token carries loss. tally: with transitions;
    free: without."""
    kept = None if vocabulary is None else vocabulary.ids
    roots = torch.nonzero(batch.loss_mask[0, 2:]).flatten() + 1
    for some in torch.split(roots, MEASURED):
        drafted = draft_blocks(head, shape, batch, taught, some[None])
        best = taught.said.best.flatten()[drafted.teachers]
        teacher = taught.said.probabilities(drafted.teachers.flatten(), kept).reshape(*drafted.teachers.shape, -1)
        for each, transitions in ((tally, True), (free, False)):
            logits = drafted.logits(head, transitions)
            proposal = logits.argmax(-1)
            right = (proposal if kept is None else kept[proposal]) == best
            _tally(drafted.counted, right, each, shared(logits, teacher))


def _tally(counted: Tensor, right: Tensor, tally: Tally, common: Tensor | None = None) -> None:
    """Count the rows [b, A, B]. right: whether the likeliest draft is the target's likeliest token. common: probability
    that head and target have in common."""
    run = Matches(counted[..., 0], tally)
    for row in range(right.shape[-1]):
        run.add(row, right[..., row], counted[..., row], None if common is None else common[..., row])
