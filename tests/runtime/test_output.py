"""Tokens are released as soon as their text is certain, and never text that a stop string then takes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from eagle_runtime.app.output import End, Output
from eagle_runtime.app.result import Piece, Stop
from eagle_runtime.text.detokenizer import UNKNOWN, TextStream, Vocabulary
from tokenizer_kinds import TOKENIZERS, byte_level, id_of

SEQUENCES = 10_000  # of all tokenizers together


def pieces_of(vocabulary: Vocabulary | None, ids: Sequence[int], end: End) -> tuple[list[Piece], Output]:
    output = Output(None if vocabulary is None else TextStream(vocabulary, []), end)
    pieces = []
    for token_id in ids:
        if not output.add(token_id, drafted=False):
            break
        pieces.append(output.release())
    output.finish("cancelled")
    pieces.append(output.release())
    return pieces, output


def first_stop(vocabulary: Vocabulary, ids: Sequence[int], strings: Sequence[str]) -> tuple[int, int, str] | None:
    """(tokens, place, string) of the stop string that is complete first, by the text of every beginning of the ids."""
    decoder, said = TextStream(vocabulary, []), ""
    for count, token_id in enumerate(ids, start=1):
        before = len(said)
        said += decoder.feed([token_id])
        matches = []
        for string in strings:
            starts = [s for s in range(len(said)) if said.startswith(string, s) and s + len(string) > before]
            matches += [(start + len(string), start, string) for start in starts[:1]]
        if matches:
            return count, min(matches)[1], min(matches)[2]
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_the_text_up_to_the_first_stop_string(name: str) -> None:
    tokenizer: Tokenizer = TOKENIZERS[name]()
    vocabulary, rng = Vocabulary(tokenizer), random.Random(5)
    size, stopped, held = tokenizer.get_vocab_size(), 0, 0
    for _ in range(SEQUENCES // len(TOKENIZERS)):
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 14))]
        whole = TextStream(vocabulary, [])
        text = whole.feed(ids) + whole.finish()
        strings = []
        for _ in range(rng.randint(0, 3)):
            start = rng.randrange(max(1, len(text)))
            strings.append(text[start : start + rng.randint(1, 5)] + rng.choice(["", "", "x"]))
        strings = [string for string in strings if string and UNKNOWN not in string]
        wanted = first_stop(vocabulary, ids, strings)
        pieces, output = pieces_of(vocabulary, ids, End(limit=1000, strings=tuple(strings)))
        assert "".join(piece.text for piece in pieces) == output.text
        assert [i for piece in pieces for i in piece.token_ids] == output.token_ids
        if wanted is None:
            assert output.stop == Stop("cancelled") and output.text == text and output.token_ids == ids
        else:
            count, place, string = wanted
            stopped += 1
            assert output.stop == Stop("stop_string", string) and output.token_ids == ids[:count]
            assert output.text == (text if count == len(ids) else TextStream(vocabulary, []).feed(ids[:count]))[:place]
        held += any(not piece.tokens for piece in pieces[:-1])
    assert stopped > 30 and held > 30


def test_a_token_waits_for_the_rest_of_its_character() -> None:
    tokenizer = byte_level()
    euro, part = id_of(tokenizer, "âĤ¬"), id_of(tokenizer, "âĤ")
    letter = id_of(tokenizer, "a")
    pieces, _ = pieces_of(Vocabulary(tokenizer), [letter, part, id_of(tokenizer, "¬"), euro], End(limit=9))
    assert [piece.text for piece in pieces] == ["a", "", "€", "€", ""]
    assert [len(piece.tokens) for piece in pieces] == [1, 0, 2, 1, 0]


def test_a_conversation_keeps_the_tokens_before_the_stop_string() -> None:
    tokenizer = byte_level()
    ids = [id_of(tokenizer, letter) for letter in "abcdef"]
    for strings, text, kept, taken in ((("d",), "abc", 3, 4), (("cd", "bcde"), "ab", 2, 4), (("ab",), "", 0, 2)):
        output = Output(TextStream(Vocabulary(tokenizer), []), End(limit=9, strings=strings))
        for token_id in ids:
            if not output.add(token_id, drafted=True):
                break
        assert output.kept == kept
        tokens = output.release().tokens
        assert (output.text, len(tokens)) == (text, taken)
        assert "".join(token.text for token in tokens) == text and output.kept_text == text


def test_kept_text_is_that_of_kept_tokens() -> None:
    """Where a stop string begins within a token, and where an answer ends within a character."""
    tokenizer = byte_level()
    pair, letter, part = id_of(tokenizer, "ab"), id_of(tokenizer, "c"), id_of(tokenizer, "âĤ")
    output = pieces_of(Vocabulary(tokenizer), [letter, pair, letter], End(limit=9, strings=("bc",)))[1]
    assert (output.text, output.kept_text, output.kept) == ("ca", "c", 1)
    output = pieces_of(Vocabulary(tokenizer), [letter, part], End(limit=2))[1]
    assert (output.text, output.kept_text, output.kept) == ("c\ufffd", "c", 1)
    output = pieces_of(Vocabulary(tokenizer), [letter, pair], End(limit=2))[1]
    assert (output.text, output.kept_text, output.kept) == ("cab", "cab", 2)


def test_what_ends_an_answer() -> None:
    end = End(limit=3, eos=frozenset([7]), stop_ids=frozenset([8]), least=0)
    for ids, stop in (([1, 7], Stop("eos", 7)), ([8], Stop("stop_token", 8)), ([1, 2, 3, 4], Stop("max_new_tokens"))):
        pieces, output = pieces_of(None, ids, end)
        assert output.stop == stop and output.token_ids == ids[:3] and output.kept == len(output.token_ids)
        assert output.text == "" and sum(len(piece.tokens) for piece in pieces) == len(output.token_ids)
    assert [Stop(kind).reason for kind in ("eos", "context_full", "cancelled")] == ["stop", "length", "cancelled"]
    pieces, output = pieces_of(None, [1, 1, 1], End(limit=2, limit_kind="context_full"))
    assert output.stop == Stop("context_full")


def test_stop_strings_do_not_count_before_the_least_number_of_tokens() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    ids = [id_of(tokenizer, letter) for letter in "ab ab ab".replace(" ", "c")]
    for least, text in ((0, ""), (1, ""), (2, "abc"), (4, "abc"), (5, "abcabc")):
        _, output = pieces_of(vocabulary, ids, End(limit=99, strings=("ab",), least=least))
        assert output.text == text, least
