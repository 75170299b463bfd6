"""Small tokenizers of every kind that the tokenizers library builds, by what they are known as."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_runtime.text.detokenizer import UNKNOWN

WORDS = ["▁the", "▁a", "▁", "b", "c", "é", "€", UNKNOWN, "▁▁", "s", "'", "▁'", "n't", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback(*steps: decoders.Decoder) -> Tokenizer:
    """A BPE tokenizer whose ids 3 to 258 are bytes, as Llama-2's."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", AddedToken("<|im|>", special=True)])
    return tokenizer


def llama() -> Tokenizer:
    """As Llama-2, Mistral, TinyLlama and Phi-3."""
    spaces = decoders.Replace("▁", " ")
    return byte_fallback(spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))


def gemma() -> Tokenizer:
    return byte_fallback(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def metaspace_with_bytes() -> Tokenizer:
    return byte_fallback(decoders.ByteFallback(), decoders.Metaspace())


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*letters, "Ġa", "ab", "âĤ¬", "âĤ"])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<é>"])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece(cleanup: bool) -> Tokenizer:
    pieces = ["[UNK]", "the", "##s", "##é", "a", ".", ",", "?", "'", "n't", "'s", "##n", "do", "not", " not"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece("##", cleanup)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def word_ends() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"lo</w>": 0, "hel": 1, "a</w>": 2, "</w>": 3}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte fallback": llama,
    "byte fallback, spaces kept": gemma,
    "byte fallback, Metaspace": metaspace_with_bytes,
    "byte-level": byte_level,
    "Unigram": unigram,
    "WordPiece": lambda: word_piece(False),
    "WordPiece, cleaned": lambda: word_piece(True),
    "word ends": word_ends,
    "no decoder": no_decoder,
}


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Of a token that there is."""
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id
