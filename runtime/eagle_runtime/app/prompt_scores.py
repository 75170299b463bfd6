"""How likely a model finds the tokens of a prompt, as evaluations ask of texts that they give."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_runtime.app.result import Token
from eagle_runtime.base.tree import Float
from eagle_runtime.sampling.sampler import LogProbs, log_probs_of
from eagle_runtime.text.tokenizer import Text


class PromptScores:
    """The log-probability of each token of a prompt but the first, after those before it; recorded while the prompt is
    read."""

    def __init__(self, prompt: Sequence[int], count: int, text: Text) -> None:
        """count: how many of the likeliest tokens are recorded for each position. text: of the bundle."""
        self._prompt, self._count, self._text = prompt, count, text
        self._records: list[LogProbs] = []

    def add(self, logits: Float) -> None:
        """Take the logits [R, V] after the next R tokens of the prompt."""
        for row, token in zip(logits, self._prompt[len(self._records) + 1 :], strict=False):
            self._records.append(log_probs_of(row, token, self._count))

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens that are read, each with the text that it completes; special ones as they are written."""
        texts = self._text.token_texts(self._prompt)
        first = Token(self._prompt[0], texts[0], drafted=False)
        others = zip(self._prompt[1:], texts[1:], self._records, strict=False)
        return (first, *(Token(token, text, False, *record) for token, text, record in others))
