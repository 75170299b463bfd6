"""Pieces of text are what decoding all tokens at once says, for every kind of tokenizer, wherever a prompt was cut."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.detokenizer import HELD, UNKNOWN, TextStream, Vocabulary
from tokenizer_kinds import BYTES, TOKENIZERS, byte_level, gemma, id_of, llama, metaspace_with_bytes

CHARACTERS = ["€", "é", "😀", "a", "\n", UNKNOWN, "ཀ"]
SEQUENCES = 10_000  # of each tokenizer: together about 20 seconds


def bytes_of(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Ids of single bytes, where the tokenizer has them."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [id_of(tokenizer, BYTES[byte]) for byte in raw]
    if tokenizer.token_to_id("Ġ") is not None:
        shown = {byte: letter for letter, byte in letters_of_bytes().items()}
        return [id_of(tokenizer, shown[byte]) for byte in raw]
    return []


@functools.cache
def letters_of_bytes() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as: printable ones as themselves, the rest from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def sequences(tokenizer: Tokenizer, rng: random.Random, count: int) -> Iterator[list[int]]:
    """Ids of all kinds: words, special and added tokens, ids that do not exist, characters as bytes, and parts of
    these."""
    size = tokenizer.get_vocab_size()
    for number in range(count):
        ids: list[int] = []
        for _ in range(rng.randint(0, 40 if number % 10 == 0 else 8)):
            raw = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 8))).encode()
            if rng.random() < 0.5:
                start = rng.randrange(len(raw))
                raw = raw[start : start + rng.randint(1, 8)]
            single = bytes_of(tokenizer, raw) if rng.random() < 0.4 else []
            ids += single or [rng.randrange(size + 3)]
        yield ids


def kept(vocabulary: Vocabulary, ids: Sequence[int]) -> list[int]:
    return [i for i in ids if vocabulary.token(i) is not None]


def bytes_at(vocabulary: Vocabulary, ids: Sequence[int]) -> list[int | None]:
    return [vocabulary.byte(str(vocabulary.token(i))) for i in ids]


def run_length(values: Sequence[int | None]) -> int:
    """Byte tokens that values begin with."""
    return next((i for i, value in enumerate(values) if value is None), len(values))


def expected(tokenizer: Tokenizer, vocabulary: Vocabulary, prompt: Sequence[int], output: Sequence[int]) -> str:
    """What decoding prompt and output at once says beyond the prompt: characters that the output completes."""
    before, after = kept(vocabulary, prompt), kept(vocabulary, output)
    whole: str = tokenizer.decode([*before, *after])
    values = bytes_at(vocabulary, [*before, *after])
    begun = run_length(values[: len(before)][::-1])
    added = run_length(values[len(before) :])
    if begun == 0 or added == 0:
        said = tokenizer.decode(before)
        if not whole.startswith(said):  # the character that the prompt's last bytes begin
            assert said.endswith(UNKNOWN) and whole.startswith(said[:-1])
            said = said[:-1]
    else:  # a run of byte tokens, part of it the prompt's: UTF-8, or one U+FFFD for each
        start = len(before) - begun
        raw = bytes(value for value in values[start : len(before) + added] if value is not None)
        try:
            raw.decode()
            characters = len(raw[:begun].decode(errors="ignore").encode())
            said = tokenizer.decode(before[: start + characters])
        except UnicodeDecodeError:
            said = tokenizer.decode(before[:start]) + begun * UNKNOWN
    assert whole.startswith(said)
    return whole[len(said) :]


def broken_late(vocabulary: Vocabulary, ids: Sequence[int]) -> bool:
    """Whether a run of byte tokens makes a mistake only after more tokens than are held back."""
    values = [*bytes_at(vocabulary, kept(vocabulary, ids)), None]
    while values:
        count = run_length(values)
        raw = bytes(value for value in values[:count] if value is not None)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            if error.end >= HELD:
                return True
        values = values[count + 1 :]
    return False


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_what_decoding_all_at_once_says(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(name)
    vocabulary = Vocabulary(tokenizer)
    held_back = late = 0
    for ids in sequences(tokenizer, rng, SEQUENCES):
        if broken_late(vocabulary, ids):
            late += 1
            continue
        cut = rng.randint(0, len(ids))
        prompt, output = ids[:cut], ids[cut:]
        stream = TextStream(vocabulary, prompt)
        pieces = []
        while output:
            count = rng.randint(1, 4)  # tokens of a cycle
            pieces.append(stream.feed(output[:count]))
            output = output[count:]
        end = stream.finish()
        held_back += bool(end)
        wanted = expected(tokenizer, vocabulary, prompt, ids[cut:])
        assert "".join([*pieces, end]) == wanted, (prompt, ids[cut:], pieces)
    assert late < SEQUENCES / 20
    assert held_back or not bytes_of(tokenizer, b"a")


@pytest.mark.parametrize("make", [llama, gemma, metaspace_with_bytes, byte_level])
@pytest.mark.parametrize("character", ["€", "😀", "é"])
def test_a_prompt_cut_within_a_character(make: Callable[[], Tokenizer], character: str) -> None:
    """The character belongs to the output, whole, and no U+FFFD is said before."""
    tokenizer = make()
    for text in (character, f"x{character}", f"{character}{character}"):
        ids = bytes_of(tokenizer, text.encode())
        for cut in range(len(text.encode()) - len(character.encode()) + 1, len(ids)):
            stream = TextStream(Vocabulary(tokenizer), [260, *ids[:cut]])
            pieces = [stream.feed([i]) for i in ids[cut:]] + [stream.finish()]
            assert "".join(pieces) == character and UNKNOWN not in pieces[:-1]
            stream = TextStream(Vocabulary(tokenizer), ids[:cut])
            assert stream.finish() == "", "what the prompt left open is not an output"


def test_the_prompt_is_never_repeated() -> None:
    """Llama-2 writes a line's end as a byte: a run of bytes that is open at every such prompt's end."""
    tokenizer = llama()
    newline = bytes_of(tokenizer, b"\n")
    stream = TextStream(Vocabulary(tokenizer), [*newline, *newline])
    assert [stream.feed(bytes_of(tokenizer, b"\xe2")), stream.feed([262])] == ["", UNKNOWN + "b"]
    stream = TextStream(Vocabulary(tokenizer), [*newline, *newline])
    assert [stream.feed(bytes_of(tokenizer, "€".encode())), stream.feed([262])] == ["", "€b"]


def test_a_long_run_of_bytes_is_not_held_back_for_ever() -> None:
    """Whole characters go out; a mistake later in the run takes nothing back."""
    tokenizer = llama()
    text = "ཀཁགངཅཆཇཉཏཐདན" * 8
    stream = TextStream(Vocabulary(tokenizer), [259])
    pieces = [stream.feed([i]) for i in bytes_of(tokenizer, text.encode())]
    waiting = longest = 0
    for piece in pieces:
        waiting = 0 if piece else waiting + 1
        longest = max(longest, waiting)
    assert longest < HELD and text.startswith("".join(pieces)) and len("".join(pieces)) > len(text) - HELD
    assert "".join(pieces) + stream.finish() == text
    stream = TextStream(Vocabulary(tokenizer), [259])
    said = stream.feed(bytes_of(tokenizer, text.encode() + b"\xff"))
    assert said.rstrip(UNKNOWN) and text.startswith(said.rstrip(UNKNOWN))


def test_special_tokens_are_no_context() -> None:
    """However many end a prompt, the first word is not taken for a text's beginning."""
    tokenizer = llama()
    word, end = id_of(tokenizer, "▁the"), id_of(tokenizer, "</s>")
    stream = TextStream(Vocabulary(tokenizer), [word, *[end] * 50, 10**6])
    assert stream.feed([word]) == " the"
    assert TextStream(Vocabulary(tokenizer), [end] * 50).feed([word]) == "the"


@pytest.mark.parametrize("name", ["byte fallback", "byte-level"])
def test_a_token_costs_the_same_after_ten_thousand(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary, rng = Vocabulary(tokenizer), random.Random(0)
    for ids in (
        [rng.randrange(tokenizer.get_vocab_size()) for _ in range(20_000)],
        [id_of(tokenizer, "b")] * 20_000,
    ):
        stream = TextStream(vocabulary, ids[:1000])
        took = []
        for start in range(0, len(ids), 2000):
            begun = time.process_time()
            for token in ids[start : start + 2000]:
                stream.feed([token])
            took.append(time.process_time() - begun)
        assert min(took[-3:]) < 3 * max(took[:3])


def test_a_token_that_says_nothing_does_not_grow_the_window() -> None:
    """As some control tokens that are not marked as special."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    stream = TextStream(Vocabulary(tokenizer), [0])
    took = []
    for _ in range(10):
        begun = time.process_time()
        assert [stream.feed([1]) for _ in range(2000)] == [""] * 2000
        took.append(time.process_time() - begun)
    assert stream.feed([0]) == "a" and min(took[-3:]) < 3 * max(took[:3])


class Broken:
    """A decoder that fails."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        if "b" in tokens:
            raise ValueError("no b")
        return tokens


def test_a_decoder_that_fails() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Decoder.custom(Broken())
    stream = TextStream(Vocabulary(tokenizer, "x/tokenizer.json"), [])
    assert stream.feed([id_of(tokenizer, "a")]) == "a"
    with pytest.raises(RequestError, match=r"x/tokenizer\.json cannot decode its tokens"):
        stream.feed([id_of(tokenizer, "b")])
