"""EagleModel: where outputs end, what happens at the edge of the context, streams, statistics, text."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from conftest import load_trace
from eagle_runtime import EagleModel, RequestError
from eagle_runtime.commands import cli
from eagle_runtime.core.generate import Cycle

SMALL: dict[str, Any] = {"total_token": 16, "depth": 3, "draft_top_k": 4}


@pytest.fixture
def recorded() -> dict[str, Any]:
    """Prompt 0 of the EAGLE-2 trace; its text ends with EOS at index 51 in the middle of an accepted run."""
    row: dict[str, Any] = load_trace("eagle2_tt16_d3_k4")["prompts"][0]
    return row


@pytest.mark.parametrize("method", ["eagle", "vanilla"])
def test_eos_ends_the_text_and_is_its_last_token(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any], method: Any
) -> None:
    result = model_of("eagle1").generate(recorded["prompt_ids"], method=method, **SMALL)
    assert list(result.token_ids) == recorded["output_ids_raw"][: recorded["eos_index"] + 1]
    assert result.finish_reason == "stop"


def test_eos_falls_inside_an_accepted_run(model_of: Callable[..., EagleModel], recorded: dict[str, Any]) -> None:
    cycles: list[Cycle] = []
    result = model_of("eagle1").generate(recorded["prompt_ids"], on_cycle=cycles.append, **SMALL)
    last = cycles[-1].step.tokens.tolist()
    assert 1 in last[:-1], "the recorded case has tokens accepted after EOS"
    assert result.usage.tau < result.usage.tau_untrimmed
    assert len(result.token_ids) == 1 + sum(len(c.step.tokens) for c in cycles) - (len(last) - 1 - last.index(1))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
def test_max_new_tokens_cuts_exactly(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any], length: int
) -> None:
    result = model_of("eagle1").generate(recorded["prompt_ids"], max_new_tokens=length, **SMALL)
    assert list(result.token_ids) == recorded["first_64"][:length]
    assert result.finish_reason == "length"
    assert result.usage.new_tokens == length


def test_every_token_of_the_stop_list_ends_the_text(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any]
) -> None:
    first_64 = recorded["first_64"]
    for stop in sorted(set(first_64[:30])):
        result = model_of("eagle1").generate(recorded["prompt_ids"], stop_token_ids=[stop, 250], **SMALL)
        assert list(result.token_ids) == first_64[: first_64.index(stop) + 1]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
def test_context_is_filled_to_the_last_token_and_never_beyond(
    bundle_of: Callable[..., Path], recorded: dict[str, Any], kind: str, tree: Any
) -> None:
    prompt = recorded["prompt_ids"]
    for context in (len(prompt) + 1, len(prompt) + 2, len(prompt) + 9, len(prompt) + 33):
        with EagleModel.load(bundle_of(kind), context=context, check_hashes=False) as model:
            cycles: list[Cycle] = []
            result = model.generate(prompt, tree=tree, ignore_eos=True, on_cycle=cycles.append)
        assert list(result.token_ids) == recorded["first_64"][: context - len(prompt)]
        assert result.finish_reason == "length"
        rows = len(prompt)
        for cycle in cycles:
            assert rows + cycle.tree.num_nodes <= context
            rows += len(cycle.step.path)


def test_long_prompts_are_read_in_chunks(
    model_of: Callable[..., EagleModel], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [token for prompt in prompts for token in prompt] * 8
    model = model_of("eagle3")
    whole = model.generate(long, max_new_tokens=24, ignore_eos=True, **SMALL)
    from eagle_runtime.core import target as module

    monkeypatch.setattr(module, "PREFILL_CHUNK", 50)
    cycles: list[Cycle] = []
    chunked = model.generate(long, max_new_tokens=24, ignore_eos=True, on_cycle=cycles.append, **SMALL)
    assert len(long) > 1000
    assert chunked.token_ids == whole.token_ids
    assert chunked.usage.target_passes == whole.usage.target_passes


def test_chain_equals_a_dynamic_tree_of_one_child(
    model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    for prompt in prompts:
        runs = []
        for options in ({"tree": "chain", "depth": 3}, {"draft_top_k": 1, "depth": 3, "total_token": 5}):
            cycles: list[Cycle] = []
            settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "on_cycle": cycles.append, **options}
            model_of("eagle1").generate(prompt, **settings)
            runs.append([(c.tree.tokens.tolist(), c.step.path.tolist()) for c in cycles])
        assert runs[0] == runs[1]
        assert all(len(tokens) == 5 for tokens, _ in runs[0])


def test_pieces_add_up(model_of: Callable[..., EagleModel], recorded: dict[str, Any]) -> None:
    pieces = list(model_of("eagle1").stream(recorded["prompt_ids"], **SMALL))
    result = pieces[-1].result
    assert result is not None
    assert all(piece.result is None for piece in pieces[:-1])
    assert tuple(token for piece in pieces for token in piece.token_ids) == result.token_ids
    assert result.text is None  # no tokenizer in this bundle
    stats = result.usage
    assert len(pieces) == stats.target_passes + 1
    assert stats.tau == (stats.new_tokens - 1) / stats.target_passes
    assert list(stats.accepted_per_depth) == sorted(stats.accepted_per_depth, reverse=True)
    assert sum(stats.accepted_per_depth) == round((stats.tau_untrimmed - 1) * stats.target_passes)


def test_an_abandoned_stream_leaves_the_model_usable(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any]
) -> None:
    model = model_of("eagle1")
    stream = model.stream(recorded["prompt_ids"], **SMALL)
    next(stream)
    result = model.generate(recorded["prompt_ids"], **SMALL)
    assert list(result.token_ids) == recorded["first_64"][:52]
    with pytest.raises(RequestError, match="another generation"):
        next(stream)


def test_twins_take_turns_and_emit_what_each_would_alone(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any]
) -> None:
    model, prompt = model_of("eagle1"), recorded["prompt_ids"]
    prompts = [prompt, prompt[: len(prompt) // 2], prompt[3:]]
    alone = [model.generate(tokens, **SMALL).token_ids for tokens in prompts]
    streams = [
        m.stream(tokens, **SMALL) for m, tokens in zip([model, model.twin(), model.twin()], prompts, strict=True)
    ]
    together: list[list[int]] = [[], [], []]
    for pieces in zip_longest(*streams):
        for tokens, piece in zip(together, pieces, strict=True):
            tokens += piece.token_ids if piece is not None else ()
    assert [tuple(tokens) for tokens in together] == alone and len(set(alone)) > 1


def test_the_time_that_a_consumer_takes_is_not_decoding(
    model_of: Callable[..., EagleModel], recorded: dict[str, Any]
) -> None:
    """A pause is a hundred times as long as all passes of another run of the same prompt."""
    model, prompt = model_of("eagle1"), recorded["prompt_ids"]
    usage = model.generate(prompt, max_new_tokens=6, method="vanilla").usage
    pause, pieces = 100 * (usage.prefill_s + usage.decode_s), []
    for piece in model.stream(prompt, max_new_tokens=6, method="vanilla"):
        pieces.append(piece)
        if len(pieces) == 3:
            time.sleep(pause)
    assert len(pieces) == 6 and pieces[-1].result is not None and pieces[-1].result.usage.decode_s < pause


def test_seeds_replay_and_are_reported(model_of: Callable[..., EagleModel], recorded: dict[str, Any]) -> None:
    model, prompt = model_of("eagle3"), recorded["prompt_ids"]
    drawn = model.generate(prompt, temperature=1.2, max_new_tokens=30)
    again = model.generate(prompt, temperature=1.2, max_new_tokens=30, seed=drawn.usage.seed)
    assert again.token_ids == drawn.token_ids


def test_settings_are_checked_before_any_work(model_of: Callable[..., EagleModel]) -> None:
    model = model_of("eagle1")
    for settings in ({"max_new_tokens": 0}, {"temprature": 1.0}, {"method": "medusa"}, {"tree": "bush"}, {"depth": -1}):
        with pytest.raises(RequestError, match=next(iter(settings))):
            model.stream([5, 6], **settings)


def test_text_in_text_out(text_bundle: Path, recorded: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "".join(chr(token - 3) for token in recorded["prompt_ids"])
    with EagleModel.load(text_bundle) as model:
        pieces = list(model.stream(prompt, **SMALL, temperature=0))
        result = pieces[-1].result
        assert result is not None
        assert result.text == recorded["text"].split("<eos>")[0]
        assert "".join(piece.text for piece in pieces) == result.text
        chat = [{"role": "user", "content": "hello"}]
        assert model.text.render(chat) == "U: hello</s>A:"
        assert model.text.encode(chat) == [88, 61, 35, *(ord(c) + 3 for c in "hello"), 1, 68, 61]
        assert model.generate(chat, max_new_tokens=4).usage.prompt_tokens == 11
    model.close()  # closed by the block already
    assert cli.main([str(text_bundle), "--prompt", prompt, "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == result.text + "\n"
    assert "per target pass" in captured.err


def test_streamed_text_keeps_spaces_and_flushes_broken_characters() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from eagle_runtime.text.detokenizer import TextStream, Vocabulary

    words = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("▁b", -1.0), ("c", -1.0)], unk_id=0))
    words.decoder = decoders.Metaspace()
    stream = TextStream(Vocabulary(words), prompt=[1])
    assert [stream.feed([2]), stream.feed([3, 2]), stream.finish()] == [" b", "c b", ""]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    [(euro, _)] = pre_tokenizers.ByteLevel(False).pre_tokenize_str("€")
    pieces = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    pieces.decoder = decoders.ByteLevel()
    first, second, third = (letters.index(letter) for letter in euro)
    stream = TextStream(Vocabulary(pieces), prompt=[letters.index("x")])
    assert [stream.feed([first]), stream.feed([second]), stream.feed([third])] == ["", "", "€"]
    assert [stream.feed([first, second]), stream.finish()] == ["", "\ufffd"]


@pytest.mark.parametrize("name", ["prompt.txt", "-"])
def test_a_prompt_file_is_read_as_it_stands(name: str, text_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Q: Ann has 3 apples and gets 4 more.", encoding="utf-8")
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", str(text_bundle), "--json", "--max-new-tokens", "5"]
    with file.open() as given:
        done = subprocess.run(
            [*command, "--prompt-file", name], stdin=given, cwd=tmp_path, capture_output=True, text=True, check=True
        )
    result = json.loads(done.stdout)
    assert set(result) == {"text", "token_ids", "finish_reason", "stop", "usage", "message"}
    assert result["message"] is None  # of a conversation, with the calls that it makes
    assert result["usage"]["prompt_tokens"] == 36
    assert result["text"] == "".join(chr(token - 3) for token in result["token_ids"])
