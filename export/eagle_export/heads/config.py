"""The kind and sizes of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle_export.heads.ahead_reader import Ahead
from eagle_export.heads.assistant_config import Assistant
from eagle_export.heads.block_config import Block
from eagle_export.heads.layout import OutputNorm
from eagle_runtime.bundle.manifest import HeadKind

if TYPE_CHECKING:
    from transformers import LlamaConfig

TapNorm = Literal["none", "each", "all"]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes of a head. hidden_size: its own width; target_hidden_size: width of the features or taps that it reads.

    taps: for EAGLE-3 indices into the target's hidden_states (0: embeddings), else empty. rope: as in a Llama config
    (rope_theta, rope_scaling). draft_vocab_size: width of its logits. qk_norm: whether queries and keys are normalised
    per head. gated: whether gates multiply what attention reads, and a part of each head alone is rotated. For EAGLE-3:
    normed_residual: whether the residual is the normalised feature; tap_norm: what is normalised before fc (nothing,
    each tap, or all taps as one); output_norm: where the last norm stands (before the LM head alone, also before the
    head's own next step, or nowhere). For multi-token prediction (mtp): hidden_first: whether
    the feature comes before the embedding in what fc reads; masks_first: whether the embedding in the row of position 0
    is zero. own_lm_head: whether there is an LM head of its own; a block's is in `block`, and ahead's in `ahead`. An
    assistant has the target's width here, and its own sizes in `assistant`. Defaults are those of heads without
    attention of their own."""

    kind: HeadKind
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 0
    rope: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    fc_bias: bool = False
    taps: tuple[int, ...] = ()
    o_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    normed_residual: bool = False
    tap_norm: TapNorm = "none"
    output_norm: OutputNorm = "logits"
    hidden_first: bool = False
    masks_first: bool = False
    block: Block | None = None
    ahead: Ahead | None = None
    assistant: Assistant | None = None
    own_lm_head: bool = True

    @property
    def borrows(self) -> bool:
        """Whether the head has the target's LM head, and reads the target's last hidden state."""
        return not self.taps and self.ahead is None and self.assistant is None

    @property
    def borrows_lm_head(self) -> bool:
        """Whether the head has the target's LM head."""
        if self.ahead is not None:
            return not self.ahead.own_lm_heads
        own = self.own_lm_head if self.block is None else self.block.own_lm_head
        return self.borrows or not own

    @property
    def embeds(self) -> bool:
        """Whether the head reads embeddings of tokens."""
        return self.ahead is None or self.ahead.grounded

    @property
    def feature_size(self) -> int:
        """Width of a feature, as the target's graph returns them."""
        if self.assistant is not None:
            return self.hidden_size + self.row_size
        return self.hidden_size if self.block is None else self.row_size + self.state_size

    @property
    def row_size(self) -> int:
        """How many numbers the keys and values of a row are in the head's cache."""
        shapes = ((self.num_kv_heads, self.head_dim),) * self.num_layers
        return sum(2 * heads * width for heads, width in (self.assistant.rows if self.assistant else shapes))

    @property
    def state_size(self) -> int:
        """Width of the target's last state among the features of a block head; 0 if it does not read that."""
        return self.target_hidden_size if self.block is not None and self.block.reads_state else 0

    @property
    def own_mask(self) -> bool:
        """Whether a block head has an embedding of its own for masked rows."""
        return self.block is not None and self.block.mask_id is None

    @property
    def markov_rank(self) -> int:
        """Rank of a block head's transitions; 0 without them."""
        return 0 if self.block is None else self.block.markov_rank

    def llama(self) -> LlamaConfig:
        """The config with which transformers builds this head's norm, MLP and rotary tables."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            vocab_size=self.vocab_size,
            **self.rope,
        )
