"""The shipped pair: small enough, complete, as good on held-out text as its card says, and the same when grown."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.drafting.coupling import GumbelRanker
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter
from eagle_runtime.sampling.sampler import Sampler
from eagle_tools.grow.shape import Shape
from eagle_tools.questions import read_questions
from eagle_tools.toy_demo import PAIR
from grow import grow
from insides import bundle_in

HEADS = ("eagle1", "eagle3")
LARGE = Shape(16, 2048, 32, 8, 64, 8192)  # Llama-3.2-1B but for the vocabulary
NEW_TOKENS = 24


def test_it_is_small_and_in_fp16() -> None:
    files = [path for path in PAIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 22_000_000
    assert {path.relative_to(PAIR).as_posix() for path in files} == {
        "README.md",
        "edits.jsonl",
        "heldout.jsonl",
        "target/chat_template.jinja",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        *(f"{head}/{name}" for head in (*HEADS, "block") for name in ("config.json", "model.safetensors")),
    }
    for folder in ("target", *HEADS, "block"):
        with safe_open(PAIR / folder / "model.safetensors", "pt") as tensors:
            types = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        assert types <= {"F16", "I64", "BOOL"} and "F16" in types


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """head -> bundle of the pair."""
    folder = tmp_path_factory.mktemp("demo")
    return cache(lambda head: export(PAIR / "target", PAIR / head, folder / head, Settings(certify=False)).bundle)


def card(head: str, tree: str, temperature: int) -> float:
    """tau of a row of the card's table."""
    row = re.search(
        rf"^\| {head} \| {temperature} \| {tree} \| (\d\.\d\d) \|",
        (PAIR / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    assert row is not None
    return float(row[1])


def tau_of(model: EagleModel, count: int, tree: str, temperature: int, max_new_tokens: int) -> float:
    """Tokens per forward pass over the first `count` held-out prompts."""
    sampling = SamplingParams(temperature=temperature, seed=0)
    settings: dict[str, Any] = {"tree": tree, "sampling": sampling, "max_new_tokens": max_new_tokens}
    questions = read_questions(PAIR / "heldout.jsonl", count)
    usages = [model.generate(question.turns[0], method="eagle", **settings).usage for question in questions]
    return sum(usage.new_tokens - 1 for usage in usages) / sum(usage.target_passes for usage in usages)


def test_its_chat_template_makes_code_to_complete(bundle: Callable[[str], Path]) -> None:
    """The bundle's prompts are those of transformers; code goes in as it stands, so that figures are those of text."""
    source = AutoTokenizer.from_pretrained(PAIR / "target")
    system = {"role": "system", "content": "Be brief.\n\nNo classes."}
    question, answer = {"role": "user", "content": ' Say """hi""". '}, {"role": "assistant", "content": "\n    pass\n"}
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}
    asked = "def answer(x):\n    \"\"\"Say '''hi'''.\"\"\""
    chats: dict[str, list[Any]] = {
        f"<|endoftext|>{asked}": [question],
        f"<|endoftext|># Be brief.\n# \n# No classes.\n{asked}": [system, question],
        f"<|endoftext|>{asked}\n    pass\n<|endoftext|>{asked}": [question, answer, question],
        f"def f(x):\n    pass\n<|endoftext|>{asked}": [parts, answer, question],
        f"<|endoftext|>{asked}<|endoftext|>def f(x):": [question, parts],
    }
    with EagleModel.load(bundle("eagle1")) as model:
        for prompt, chat in chats.items():
            assert model.text.render(chat) == prompt
            assert source.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
        for name in ("heldout.jsonl", "edits.jsonl"):
            for text in (row.turns[0] for row in read_questions(PAIR / name)):
                assert model.text.encode([{"role": "user", "content": text}]) == model.text.encode(text)
        with pytest.raises(RequestError, match=r"chat_template\.jinja refuses the messages: .*, not tool"):
            model.text.render([question, {"role": "tool", "content": "7"}])
        body = model.generate([{"role": "user", "content": "Print hello."}], max_new_tokens=96)
    assert body.finish_reason == "stop"
    ast.parse(f'def answer(x):\n    """Print hello."""{body.text}')


@pytest.mark.parametrize("head", HEADS)
def test_a_few_prompts_are_drafted_about_as_the_card_says(head: str, bundle: Callable[[str], Path]) -> None:
    with EagleModel.load(bundle(head)) as model:
        assert tau_of(model, 8, "dynamic", 0, 64) == pytest.approx(card(head, "dynamic", 0), rel=0.25)


@pytest.mark.parametrize("head", HEADS)
def test_knowing_the_random_numbers_saves_passes(head: str, bundle: Callable[[str], Path]) -> None:
    passes = {True: 0, False: 0}
    with EagleModel.load(bundle(head), threads=1) as model:
        prompts = [model.text.encode(question.turns[0]) for question in read_questions(PAIR / "heldout.jsonl", 6)]
        for coupled, (seed, prompt) in itertools.product(passes, enumerate(prompts)):
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), prompt, model.manifest.target.vocab_size)
            ranker = GumbelRanker(sampler) if coupled else None
            drafter = EagleDrafter(model.head, DynamicTree(), ranker)
            emitted = 0
            state = DecodingState(bundle_in(model).target, model.head)
            for cycle in itertools.islice(generate(state, drafter, sampler, prompt), 1, None):
                passes[coupled] += 1
                emitted += len(cycle.step.tokens)
                if emitted > 96:
                    break
    assert passes[True] < 0.92 * passes[False]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("head", HEADS)
def test_the_card_is_true(head: str, temperature: int, bundle: Callable[[str], Path]) -> None:
    with EagleModel.load(bundle(head)) as model:
        for tree in ("chain", "static", "dynamic"):
            assert tau_of(model, 40, tree, temperature, 96) == pytest.approx(card(head, tree, temperature), abs=0.02)


@pytest.mark.slow
def test_grown_to_a_billion_parameters_it_says_and_drafts_the_same(
    bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    grow(PAIR / "target", [PAIR / head for head in HEADS], tmp_path / "grown", LARGE, "fp32")
    prompts = [question.turns[0] for question in read_questions(PAIR / "heldout.jsonl", 32)]
    texts = []
    with EagleModel.load(bundle("eagle1")) as model:
        ids = [model.text.encode(prompt) for prompt in prompts]
    for folder in (PAIR / "target", tmp_path / "grown" / "target"):
        source: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        answers = (source.generate(torch.tensor([row]), max_new_tokens=NEW_TOKENS, do_sample=False) for row in ids)
        texts.append([answer[0, len(row) :].tolist() for answer, row in zip(answers, ids, strict=True)])
        del source
    assert texts[0] == texts[1]
    for head in HEADS:
        taus = []
        grown = tmp_path / f"{head}.bundle"
        export(tmp_path / "grown" / "target", tmp_path / "grown" / head, grown, Settings(certify=False))
        for drafted in (bundle(head), grown):
            tokens, passes = 0, 0
            with EagleModel.load(drafted, context=512) as model:
                for row, text in zip(ids, texts[0], strict=True):
                    result = model.generate(row, tree="dynamic", max_new_tokens=NEW_TOKENS)
                    assert list(result.token_ids) == text
                    tokens, passes = tokens + result.usage.new_tokens - 1, passes + result.usage.target_passes
            taus.append(tokens / passes)
        assert taus[1] == pytest.approx(taus[0], rel=0.01)
        print(f"{head}: tau {taus[0]:.3f}, grown {taus[1]:.3f}")
