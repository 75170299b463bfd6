"""Tokenizers of GGUF files: ids and text are those of the tokenizer.json that the file was written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import GgufFile
from eagle_export.reading.gguf.tokenizer import CUTS, notes_of, special_ids, texts_of

DEMO = Path(__file__).parents[2] / "tools/demo_pair/target/tokenizer.json"
README = Path(__file__).parents[2] / "README.md"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, \ttab\n\n\nlines \r\n and an end   ",
    "I've seen HE'LL We'Re can't 'Quoted'",
    "1 22 333 4444 3.14159 ½ ²",
    "naïve café — 你好，世界 🙂👩‍👩‍👧 ﷽ e\u0301 \u00a0nbsp",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # ok\n",
    "a<|end|>b<|endoftext|> c <think>d</think>",
    "camelCaseWords ALLCAPS mixedUP/path/to//file_name.py\n",
    "<s> and </s> <unk>",
]


def file_of(metadata: dict[str, Any], architecture: str = "llama") -> GgufFile:
    """A file of a tokenizer alone."""
    return GgufFile(Path("some.gguf"), {"general.architecture": architecture, **metadata}, {})


def assert_same(metadata: dict[str, Any], original: Tokenizer, architecture: str = "llama") -> None:
    made = Tokenizer.from_str(texts_of(file_of(metadata, architecture))["tokenizer.json"].decode())
    for text in [*TEXTS, README.read_text(encoding="utf-8")]:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert made.encode(text, add_special_tokens=special).ids == ids, text
            for skip in (True, False):
                assert made.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
    assert made.get_added_tokens_decoder().keys() == original.get_added_tokens_decoder().keys()


def bpe_metadata(tokenizer: Tokenizer, pre: str, rows: int) -> dict[str, Any]:
    """A byte-level tokenizer as the converter lists it, for a model with so many rows."""
    content = json.loads(tokenizer.to_str())
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    kinds = {number: CONTROL if token.special else USER_DEFINED for number, token in added.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(number, f"[PAD{number}]") for number in range(rows)],
        "tokenizer.ggml.token_type": [kinds.get(number, NORMAL if number in tokens else 5) for number in range(rows)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


# Of the published tokenizer.json of HunyuanOCR, whose words Hunyuan's dense models have, and of zeta-2.1, a Seed-Coder;
# MiniCPM5's is quoted in llama.cpp (src/llama-vocab.cpp), and DeepSeek-Coder's gives the ids that llama.cpp keeps of it
# (models/ggml-vocab-deepseek-coder.gguf.out).
PUBLISHED = {
    "hunyuan-dense": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "minicpm5": (
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
}
SAME = {"stablelm2": "qwen2", "glm4": "llama3", "chatglm-bpe": "llama3"}  # as the table of transformers names them
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


@pytest.mark.parametrize("pre", [name for names in CUTS for name in names.split()])
def test_byte_level(pre: str) -> None:
    """The pieces are cut as published files or transformers' own table say, or as GPT-2 and StarCoder cut them."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    original = Tokenizer.from_file(str(DEMO))
    original.add_special_tokens(["<|end|>"])
    original.add_tokens(["<think>", "</think>"])
    pattern = mapping.GGUF_PRE_TOKENIZER_SPLITS.get(SAME.get(pre, pre))
    if patterns := PUBLISHED.get(pre, () if pattern is None else (pattern,)):
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
        original.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    else:
        original.pre_tokenizer = DIGITS if pre in ("smollm", "starcoder", "refact") else GPT2
    if pre in ("olmo", "qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "megrez", "seed-coder"):
        original.normalizer = normalizers.NFC()
    bos = ("<|endoftext|>", 0)
    with_bos = pre in ("tekken", "llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2")
    if with_bos or pre in ("glm4", "chatglm-bpe", "minicpm5"):
        content = json.loads(original.to_str())
        content["model"]["ignore_merges"] = True
        original = Tokenizer.from_str(json.dumps(content))
    if with_bos:
        original.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", pair="<|endoftext|> $A <|endoftext|>:1 $B:1", special_tokens=[bos]
        )
    assert_same(bpe_metadata(original, pre, 4200), original)


def test_a_file_without_bos_gets_none_by_default() -> None:
    """Falcon3's names none; what it states itself is still refused."""
    metadata = bpe_metadata(Tokenizer.from_file(str(DEMO)), "falcon3", 4200)
    del metadata["tokenizer.ggml.bos_token_id"]
    assert json.loads(texts_of(file_of(metadata))["tokenizer.json"])["post_processor"] is None
    with pytest.raises(ExportError, match="texts get a bos token, but the file does not say which"):
        texts_of(file_of({**metadata, "tokenizer.ggml.add_bos_token": True}))


def sentencepiece(prefix: bool, bos: bool = True) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as Llama-2 has it, and its metadata."""
    from transformers.tokenization_utils_base import generate_merges

    start = [normalizers.Prepend("▁")] if prefix else []
    normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizer
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, max_token_length=8, show_progress=False)
    trained.train_from_iterator(README.read_text(encoding="utf-8").splitlines(), trainer)
    ids = trained.get_vocab()
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])] + ["<|end|>", "<think>"]
    scores = [0.0] * len(specials) + [-float(number) for number in range(len(specials), len(tokens))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256)] + [NORMAL] * (len(tokens) - len(specials))
    kinds[-2:] = [CONTROL, USER_DEFINED]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    original = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    original.normalizer = normalizer
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    original.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>"])
    original.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        original.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
        )
    return original, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **({} if prefix else {"tokenizer.ggml.add_space_prefix": False}),
        **({} if bos else {"tokenizer.ggml.add_bos_token": False}),
    }


@pytest.mark.parametrize(("prefix", "bos"), [(True, True), (False, True), (True, False)])
def test_sentencepiece(prefix: bool, bos: bool) -> None:
    original, metadata = sentencepiece(prefix, bos)
    assert_same(metadata, original)


@pytest.mark.parametrize("scores", [[-1000.0], []])
def test_pieces_without_scores_are_merged_in_their_order(scores: list[float]) -> None:
    """As llama.cpp's converter lists a Llama-2 of which it has tokenizer.json alone."""
    _, metadata = sentencepiece(True)
    tokens = metadata["tokenizer.ggml.tokens"]
    runs = {number for number, token in enumerate(tokens) if set(token) == {"▁"}}
    ranked = [(-1e9 if number in runs else score) for number, score in enumerate(metadata["tokenizer.ggml.scores"])]
    assert len(runs) > 1
    expected = texts_of(file_of({**metadata, "tokenizer.ggml.scores": ranked}))
    file = file_of({**metadata, "tokenizer.ggml.scores": scores * len(tokens)})
    merges = [json.loads(texts["tokenizer.json"])["model"]["merges"] for texts in (texts_of(file), expected)]
    spaces = [[merge for merge in each if not set("".join(merge)) <= {"▁"}] for each in merges]
    assert spaces[0] == spaces[1] and len(merges[0]) == len(merges[1])
    assert {"".join(merge) for merge in merges[0][len(spaces[0]) :]} == {tokens[number] for number in runs} - {"▁"}
    (note,) = notes_of(file)
    assert note.startswith("some.gguf: all pieces of its tokenizer have the same score")
    assert notes_of(file_of(metadata)) == ()


def test_gemma_puts_no_space_in_front_where_a_file_does_not_say() -> None:
    """As of Ollama's converter."""
    original, metadata = sentencepiece(False)
    del metadata["tokenizer.ggml.add_space_prefix"]
    assert_same(metadata, original, "gemma3")


def test_gemma_has_tokens_of_several_spaces() -> None:
    original, metadata = sentencepiece(False)
    runs = [number for number, token in enumerate(metadata["tokenizer.ggml.tokens"]) if set(token) == {"▁"}]
    for number in runs[1:]:  # as the converter writes them
        metadata["tokenizer.ggml.tokens"][number] = " " * len(metadata["tokenizer.ggml.tokens"][number])
    assert len(runs) > 1
    assert_same(metadata, original, "gemma2")


def test_gemma_merges_runs_of_spaces_from_the_long_ones_on() -> None:
    """In its tokenizer.json they have one score, above all others; 33 spaces are a token of 31 and one of 2 there."""
    from transformers.tokenization_utils_base import generate_merges

    tokens = ["<unk>", *("▁" * count for count in range(2, 32)), "▁", "a", "b"]
    vocab = {token: number for number, token in enumerate(tokens)}
    scores = {token: 0.0 if "▁▁" in token else -1.0 - number for token, number in vocab.items()}
    original = Tokenizer(models.BPE(vocab, generate_merges(vocab, scores), unk_token="<unk>"))
    original.normalizer = normalizers.Replace(" ", "▁")
    metadata = {"model": "llama", "tokens": tokens, "scores": list(scores.values()), "add_bos_token": False}
    metadata |= {"token_type": [UNKNOWN, *([NORMAL] * (len(tokens) - 1))]}
    file = file_of({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, "gemma3")
    made = Tokenizer.from_str(texts_of(file)["tokenizer.json"].decode())
    for count in range(80):
        text = "a" + " " * count + "b"
        assert made.encode(text).tokens == original.encode(text).tokens, count


GEMMA4_TEXTS = ("<|turn>user\nHi  you\n\n\n\n there<turn|>\n<|turn>model\n", "<eos>é<|channel>a\tb<|tool_response>")
VISIBLE = ("<|channel>", "<|tool_response>")  # which the converter lists as the user's


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as Gemma-4's instruct models have it, and its metadata: class Gemma4Model of llama.cpp's
    conversion/gemma.py asks the same classes of the package gguf. Its end is that of a turn, so that <eos> is a piece
    of text there."""
    gguf = pytest.importorskip("gguf")
    from transformers import GemmaTokenizer

    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", *VISIBLE]
    specials = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, max_token_length=8, show_progress=False)
    trained.train_from_iterator(README.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    original = GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        add_bos_token=True,
        extra_special_tokens={
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
            "soc_token": "<|channel>",
            "str_token": "<|tool_response>",
        },
    )
    folder = tmp_path_factory.mktemp("gemma4")
    original.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<turn|>"}))
    listed, scores, kinds = zip(*gguf.LlamaHfVocab(folder).all_tokens(), strict=True)
    tokens = [token.decode() for token in listed]
    special = gguf.SpecialVocab(folder, load_merges=True)
    return original.backend_tokenizer, {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [
            USER_DEFINED if token in VISIBLE else int(kind) for token, kind in zip(tokens, kinds, strict=True)
        ],
        "tokenizer.ggml.merges": special.merges,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in special.special_token_ids.items()},
        "tokenizer.ggml.unknown_token_id": special.special_token_ids["unk"],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tokenizer.ggml.add_bos_token": False},  # of older files
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "gemma4",
            "tokenizer.ggml.add_bos_token": False,
        },  # Ollama's
    ],
)
def test_gemma4_has_its_merges(gemma4: tuple[Tokenizer, dict[str, Any]], changed: dict[str, Any]) -> None:
    original, metadata = gemma4
    metadata = {**metadata, **changed}
    assert_same(metadata, original, "gemma4")
    made = Tokenizer.from_str(texts_of(file_of(metadata, "gemma4"))["tokenizer.json"].decode())
    for text in GEMMA4_TEXTS:
        assert made.encode(text).ids == original.encode(text).ids
    assert made.decode(made.encode("a<|channel>b<turn|>").ids) == "a<|channel>b"


def test_gemma4_ends_with_three_tokens(gemma4: tuple[Tokenizer, dict[str, Any]]) -> None:
    """Those of its generation_config.json, of which the file calls two a piece of text and the user's."""
    _, metadata = gemma4
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    found = {token: kinds[tokens.index(token)] for token in ("<eos>", "<turn|>", "<|tool_response>", "</s>")}
    assert found == {"<eos>": NORMAL, "<turn|>": CONTROL, "<|tool_response>": USER_DEFINED, "</s>": NORMAL}
    ids = special_ids(file_of(metadata, "gemma4"))
    assert [tokens[number] for number in ids["eos_token_id"]] == ["<turn|>", "<eos>", "<|tool_response>"]
    assert tokens[ids["bos_token_id"]] == "<bos>"
    assert notes_of(file_of(metadata, "gemma4")) == ()


def test_gemma4_without_merges_is_refused(gemma4: tuple[Tokenizer, dict[str, Any]]) -> None:
    metadata = {name: value for name, value in gemma4[1].items() if name != "tokenizer.ggml.merges"}
    with pytest.raises(ExportError, match=r"metadata tokenizer\.ggml\.merges is missing"):
        texts_of(file_of(metadata, "gemma4"))


def test_template_and_ids_of_special_tokens() -> None:
    original = Tokenizer.from_file(str(DEMO))
    original.add_special_tokens(["<|end|>", "<|eot_id|>"])
    original.add_tokens(["<|im_end|>"])  # no control token, so no end
    metadata = bpe_metadata(original, "gpt-2", 4200)
    metadata |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 4097}
    texts = texts_of(file_of(metadata))
    assert texts["chat_template.jinja"] == b"{{ messages }}"
    settings = json.loads(texts["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    assert special_ids(file_of(metadata)) == {"bos_token_id": 0, "eos_token_id": [0, 4097, 4096]}
    several = {**metadata, "tokenizer.ggml.eos_token_ids": [0, 7, 9999]}  # as Ollama's converter lists them
    assert special_ids(file_of(several))["eos_token_id"] == [0, 4097, 7, 4096]
    original.add_special_tokens(["<|return|>", "<|call|>"])  # of gpt-oss, in whose answers <|end|> ends a message
    metadata = bpe_metadata(original, "gpt-4o", 4200)
    assert special_ids(file_of(metadata)) == {"bos_token_id": 0, "eos_token_id": [0, 4097, 4099, 4100]}
    assert texts_of(file_of({})) == texts_of(file_of({"tokenizer.ggml.model": "none"})) == {}


MARKED = "<start_of_turn>user\\n{{ messages[0]['content'] }}[0] {{ '<end_of_turn>' }}<think></s>"


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_markers_of_a_template_are_control_tokens(model: str, kind: int) -> None:
    """Some exporters list them as pieces of text or as the user's; what no template writes stays what it is."""
    if model == "gpt2":
        metadata = bpe_metadata(Tokenizer.from_file(str(DEMO)), "gpt-2", 4096)
    else:
        _, metadata = sentencepiece(False)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    names = ["<start_of_turn>", "<end_of_turn>", "<b>", "[0]", "<eos>", "<think>"]
    ids = {name: len(tokens) + number for number, name in enumerate(names)}
    tokens += names
    kinds += [kind, kind, NORMAL, NORMAL, NORMAL, USER_DEFINED]
    if model == "llama":
        metadata["tokenizer.ggml.scores"] += [-1e6] * len(names)
        del tokens[-1], kinds[-1], metadata["tokenizer.ggml.scores"][-1]  # it is there already
    plain = file_of(metadata)
    assert notes_of(plain) == ()
    assert ids["<end_of_turn>"] not in special_ids(plain)["eos_token_id"]
    file = file_of({**metadata, "tokenizer.chat_template": MARKED})
    assert ids["<end_of_turn>"] in special_ids(file)["eos_token_id"]
    assert ids["<eos>"] not in special_ids(file)["eos_token_id"]
    made = Tokenizer.from_str(texts_of(file)["tokenizer.json"].decode())
    added = {token.content: token.special for token in made.get_added_tokens_decoder().values()}
    assert added["<end_of_turn>"] and not added["<think>"] and not {"<b>", "[0]", "<eos>"} & added.keys()
    assert added.get("<start_of_turn>") == (kind == NORMAL)
    found = made.encode("<start_of_turn>a<end_of_turn>", add_special_tokens=False).ids
    assert (found[0], found[-1]) == (ids["<start_of_turn>"], ids["<end_of_turn>"])
    (note,) = notes_of(file)
    assert note.startswith("some.gguf: the chat template writes ") and "'<end_of_turn>'" in note


def test_phi3_special_tokens_swallow_spaces() -> None:
    _, metadata = sentencepiece(True)
    made = Tokenizer.from_str(texts_of(file_of(metadata, "phi3"))["tokenizer.json"].decode())
    flags = {token.content: token.rstrip for token in made.get_added_tokens_decoder().values()}
    assert flags == {"<unk>": False, "<s>": False, "</s>": True, "<|end|>": True, "<think>": True}


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("pre", "kimi-k2"), "cuts text as 'kimi-k2'"),
        (change("pre", "exaone4"), "supported; give the Hugging Face folder that the file was made from"),
        (change("pre", None), "does not say how its tokenizer cuts text"),
        (change("merges", ["a b c"]), "merge 'a b c' has not two parts"),
        (change("merges", []), "tokenizer.ggml.merges is missing"),
        (change("eos_token_id", "two"), "eos_token_id is 'two', but must be a whole number"),
        (change("token_type", [1, 2]), "their kinds are not as many"),
        (change("tokens", ["a", "a"]), "its tokens are not distinct"),
        (
            lambda metadata: metadata.update(
                {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": None}
            ),
            "texts get a eos token, but the file does not say which",
        ),
        (change("model", "bert"), "tokenizer of kind 'bert' is not supported"),
    ],
)
def test_refusals(changed: Callable[[dict[str, Any]], None], message: str) -> None:
    metadata = bpe_metadata(Tokenizer.from_file(str(DEMO)), "gpt-2", 4200)
    changed(metadata)
    with pytest.raises(ExportError) as raised:
        texts_of(file_of(metadata))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def llama_cpp_vocabulary(path: Path, metadata: dict[str, Any]) -> Any:
    """llama.cpp's own reader of a file of a tokenizer alone."""
    gguf, llama_cpp = pytest.importorskip("gguf"), pytest.importorskip("llama_cpp")
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["sentencepiece", "without a space in front", *(names.split()[0] for names in CUTS)])
def test_llama_cpp_gives_the_same_ids(tmp_path: Path, pre: str) -> None:
    """But for letters in two parts, which llama.cpp does not put together where the published tokenizers do."""
    if pre in ("sentencepiece", "without a space in front"):
        _, metadata = sentencepiece(pre == "sentencepiece")
    else:
        original = Tokenizer.from_file(str(DEMO))
        original.add_special_tokens(["<|end|>"])
        original.add_tokens(["<think>", "</think>"])
        metadata = bpe_metadata(original, pre, 4200)
    theirs = llama_cpp_vocabulary(tmp_path / "tokens.gguf", metadata)
    ours = Tokenizer.from_str(texts_of(file_of(metadata))["tokenizer.json"].decode())
    for text in [*TEXTS, README.read_text(encoding="utf-8")]:
        text = text.replace("e\u0301", "")
        for bos in (True, False):
            expected = theirs.tokenize(text.encode(), add_bos=bos, special=True)
            assert ours.encode(text, add_special_tokens=bos).ids == expected, text
