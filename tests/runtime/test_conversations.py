"""A conversation answers as a new one with the same messages would, and reads no more than what is new."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import put_listed, put_tokenizer
from eagle_runtime import BusyError, ClosedError, ContextError, EagleModel, MemoryLimitError, RequestError, Result
from eagle_runtime.app.conversation import Conversation
from eagle_runtime.app.output import Output
from eagle_runtime.app.turn import Turn
from eagle_runtime.core.decoding_state import common_prefix
from eagle_runtime.core.target import Target
from insides import turns_of
from patience import PATIENCE_S
from thread_calls import Thread

TEMPLATES = {
    "special tokens": "{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}",
    "words alone": "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}assistant> ",
    "trimmed": "{% for m in messages %}<pad>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}<pad>assistant\n",
}
WORDS = ("what", "is", "a", "tree", "def f(x):", "return", "and then", "why", "no", "List", "of", "3", "words")
OPERATIONS = ("send", "cancel", "regenerate", "edit", "rollback", "fork", "save", "load", "drop")
DRAWN: list[dict[str, Any]] = [{}, {"temperature": 1.0}]
BUDGET = 1300  # tokens whose keys and values two of six conversations take


@pytest.fixture(scope="module")
def chat_bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """precision, name of a template -> a bundle of the golden pair that takes text and messages."""
    made: dict[tuple[str, str], Path] = {}

    def bundle(precision: str = "int8", template: str = "special tokens") -> Path:
        key = (precision, template)
        if key not in made:
            folder = tmp_path_factory.mktemp("chat") / "bundle"
            shutil.copytree(bundle_of("eagle1", precision), folder)
            put_tokenizer(folder)
            put_listed(folder, "chat_template.jinja", TEMPLATES[template].encode())
            put_listed(folder, "tokenizer_config.json", b'{"eos_token": "</s>"}')
            made[key] = folder
        return made[key]

    return bundle


@pytest.fixture
def model(chat_bundle: Callable[..., Path]) -> Iterator[EagleModel]:
    with EagleModel.load(chat_bundle(), threads=1, check_hashes=False) as loaded:
        yield loaded


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that targets read of prompts, pass by pass."""
    rows: list[int] = []
    read = Target.read

    def counted(target: Target, tokens: Any, last: int = 1) -> Any:
        rows.append(len(tokens))
        return read(target, tokens, last)

    monkeypatch.setattr(Target, "read", counted)
    return rows


def question(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def end(chat: Conversation) -> None:
    """See that no turn goes on that was cancelled and is not asked for a piece any more."""
    with chat._free(wait=True):
        pass


def answer(chat: Conversation, text: str, **settings: Any) -> tuple[int, ...]:
    pieces = list(chat.send(text, **settings))
    assert pieces[-1].result is not None
    return pieces[-1].result.token_ids


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("precision", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_twenty_turns(precision: str, template: str, chat_bundle: Callable[..., Path], rows_read: list[int]) -> None:
    """Acceptance: equal to new conversations and to vanilla, rows read are those that are new, as many cycles."""
    with EagleModel.load(chat_bundle(precision, template), threads=1, check_hashes=False) as model:
        for drawn in DRAWN:
            rng = random.Random(len(template))
            drafted, plain = model.conversation(), model.conversation()
            reused = anew = 0
            for seed in range(20):
                text = question(rng)
                # Trees that do not depend on the clock, so that cycles can be compared.
                common = {"max_new_tokens": 12, "ignore_eos": seed % 3 > 0, "seed": seed, "tree": "dynamic", **drawn}
                before = drafted._slot.state.tokens.copy()
                rows_read.clear()
                result = list(drafted.send(text, **common))[-1].result
                assert result is not None
                prompt = list(drafted.token_ids[: result.usage.prompt_tokens])
                known = max(0, min(common_prefix(before, prompt), len(prompt)) - 1)
                assert sum(rows_read) == result.usage.prefilled_tokens == len(prompt) - known
                assert answer(plain, text, method="vanilla", **common) == result.token_ids
                again = model.generate(prompt, **common)
                assert again.token_ids == result.token_ids
                reused += result.usage.target_passes
                anew += again.usage.target_passes
            assert reused <= 1.03 * anew and anew < 20 * 11
            assert plain.messages == drafted.messages and len(drafted.messages) == 40


def test_an_answer_is_kept_as_it_was_drawn(model: EagleModel) -> None:
    """Its ids go on as they are, though encoding its text again might give others."""
    chat = model.conversation([{"role": "system", "content": "brief"}])
    emitted = answer(chat, "what is", max_new_tokens=12, ignore_eos=True, temperature=1.5, seed=3)
    before = chat.token_ids
    assert before[-12:] == emitted and chat.messages[-1]["role"] == "assistant"
    answer(chat, "and", max_new_tokens=4)
    assert chat.token_ids[: len(before)] == before
    assert chat.turns[0].seed == 3 and chat.turns[0].stop.kind == "max_new_tokens"
    assert chat.room == model.context - len(chat.token_ids)


def test_stop_strings_leave_no_trace(model: EagleModel) -> None:
    free = model.conversation()
    answer(free, "def f(x):", max_new_tokens=30, ignore_eos=True)
    text = str(free.messages[-1]["content"])
    chat = model.conversation()
    emitted = answer(chat, "def f(x):", max_new_tokens=30, ignore_eos=True, stop=text[9:12])
    assert chat.messages[-1]["content"] == text[: text.index(text[9:12])]
    assert len(emitted) > len(text[: text.index(text[9:12])])
    other = model.conversation([{"role": "user", "content": "def f(x):"}, chat.messages[-1]])
    assert answer(chat, "more", max_new_tokens=9) == answer(other, "more", max_new_tokens=9)


def test_a_stop_string_within_a_token(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text before it stays, though the token goes: as a conversation with the same messages reads it."""
    chat = model.conversation()
    monkeypatch.setattr(Output, "kept", property(lambda output: len(output.token_ids) - 2))
    monkeypatch.setattr(Output, "kept_text", property(lambda output: output.text[:-2]))
    answer(chat, "def f(x):", max_new_tokens=9, ignore_eos=True)
    monkeypatch.undo()
    other = model.conversation(chat.messages)
    assert answer(chat, "more", max_new_tokens=9) == answer(other, "more", max_new_tokens=9)
    assert chat.token_ids == other.token_ids


def test_closing_within_a_step_does_not_wait(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = model.conversation()
    monkeypatch.setattr(Turn, "wait", lambda *_: pytest.fail("waits for itself"))
    turn = chat.send("what", max_new_tokens=9, ignore_eos=True, on_cycle=lambda _: chat.close())
    *_, last = turn
    assert last.result is not None and last.result.finish_reason == "cancelled"
    other = model.conversation()

    def again(_: object) -> None:
        turn.cancel()
        with pytest.raises(BusyError):
            other.send("is")

    turn = other.send("what", max_new_tokens=9, ignore_eos=True, on_cycle=again)
    list(turn)


def test_editing_going_back_and_answering_again(model: EagleModel) -> None:
    chat = model.conversation()
    for number, text in enumerate(("what is", "a tree", "of words")):
        answer(chat, text, max_new_tokens=8, seed=number, temperature=1.0)
    again = list(chat.regenerate(seed=2, temperature=1.0, max_new_tokens=8))[-1].result
    assert again is not None and len(chat.messages) == 6 and again.usage.prefilled_tokens == 1
    assert again.text == chat.messages[-1]["content"] and chat.turns[-1].usage == again.usage
    seeds = {list(chat.regenerate(temperature=1.0, max_new_tokens=2))[-1].result.seed for _ in range(3)}  # type: ignore[union-attr]
    assert len(seeds) == 3
    chat.edit(2, "the list")
    chat.rollback(to=3)
    assert [message["content"] for message in chat.messages][2] == "the list"
    result = list(chat.regenerate(max_new_tokens=8))[-1].result
    fresh = model.conversation(chat.messages[:3])
    other = list(fresh.regenerate(max_new_tokens=8))[-1].result
    assert result is not None and other is not None and result.token_ids == other.token_ids
    assert result.usage.cached_tokens > 0 and other.usage.cached_tokens == 0
    chat.rollback(to=0)
    for call in (lambda: chat.regenerate(), lambda: chat.edit(0, "x"), lambda: chat.rollback(to=1)):
        with pytest.raises(RequestError):
            call()


def test_forks_copy_the_rows_and_go_their_own_ways(model: EagleModel) -> None:
    chat = model.conversation()
    answer(chat, "what is a tree of words", max_new_tokens=20, ignore_eos=True)
    fork, later = chat.fork(), chat.fork()
    one = list(chat.send("and then", max_new_tokens=9))[-1].result
    two = list(fork.send("and then", max_new_tokens=9))[-1].result
    three = list(later.send("why", max_new_tokens=9))[-1].result
    assert one is not None and two is not None and three is not None
    assert one.token_ids == two.token_ids
    assert two.usage.prefilled_tokens <= one.usage.prefilled_tokens < 20
    assert three.usage.cached_tokens >= one.usage.cached_tokens - 1
    chat.drop_kv()
    assert chat.kv_rows == 0 and chat.kv_status == "dropped by drop_kv" and chat.kv_bytes < fork.kv_bytes
    assert answer(chat, "no", max_new_tokens=9) == answer(fork, "no", max_new_tokens=9)
    assert chat.kv_status == "resident"


def test_a_turn_that_is_left_keeps_what_was_answered(model: EagleModel) -> None:
    long: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    whole = model.conversation()
    answer(whole, "def f(x):", **long)
    text = str(whole.messages[-1]["content"])
    for end in ("cancel", "close", "drop"):
        chat = model.conversation()
        turn = chat.send("def f(x):", **long)
        shown = "".join(next(turn).text for _ in range(3))
        with pytest.raises(BusyError, match="the conversation is in a turn"):
            chat.send("more")
        if end == "cancel":
            turn.cancel()
        elif end == "close":
            turn.close()
        else:
            del turn
            gc.collect()
        said = answer(chat, "more", max_new_tokens=9)
        kept = str(chat.messages[1]["content"])
        assert kept.startswith(shown) and text.startswith(kept) and len(chat.messages) == 4, end
        other = model.conversation(chat.messages[:2])
        assert answer(other, "more", max_new_tokens=9) == said


def test_a_turn_without_a_token_leaves_the_messages_as_they_were(model: EagleModel) -> None:
    chat = model.conversation()
    turn = chat.send("what is")
    assert len(chat.messages) == 1
    turn.close()
    assert chat.messages == [] and chat.turns == ()
    with pytest.raises(RequestError, match="unknown setting"):
        chat.send("what is", nothing=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="must be a dict with a role"):
        chat.send({"content": "x"})
    with pytest.raises(ContextError, match="tokens, but the context holds") as raised:
        chat.send("word " * 2000)
    assert raised.value.needed > raised.value.available == model.context and raised.value.code == "context"
    assert chat.messages == []


def test_turns_wait_where_they_are_asked_to(model: EagleModel) -> None:
    chat = model.conversation()
    turn = chat.send("what is", max_new_tokens=20, ignore_eos=True)
    next(turn)
    second = Thread(lambda: answer(chat, "and", max_new_tokens=6, wait=True))
    assert not second._outcome.qsize()
    list(turn)
    assert len(second.result()) <= 6 and len(chat.messages) == 4


def test_closed_conversations_say_so(model: EagleModel) -> None:
    with model.conversation() as chat:
        turn = chat.send("what is", max_new_tokens=50)
        next(turn)
    chat.close()
    assert turn.done
    with pytest.raises(ClosedError, match="the conversation is closed"):
        chat.send("more")
    other = model.conversation()
    model.close()
    with pytest.raises(ClosedError):
        other.send("more")
    other.close()


def test_the_budget_drops_the_conversation_that_was_used_longest_ago(chat_bundle: Callable[..., Path]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    with EagleModel.load(chat_bundle(), threads=1, check_hashes=False) as model:
        one = model.conversation()
        answer(one, "what is", **settings)
        size = one.kv_bytes
    with EagleModel.load(chat_bundle(), threads=1, check_hashes=False, kv_budget=2 * size + 1000) as model:
        chats = [model.conversation() for _ in range(3)]
        said = [answer(chat, "what is", **settings) for chat in chats]
        assert len(set(said)) == 1
        assert [chat.kv_rows > 0 for chat in chats] == [False, True, True]
        assert chats[0].kv_status == "dropped, since kv_budget is full" and turns_of(model).slots.dropped == 1
        answer(chats[1], "and", **settings)
        answer(chats[0], "and", **settings)
        assert chats[0].messages == chats[1].messages  # as if nothing had been dropped
        assert [chat.kv_rows > 0 for chat in chats] == [True, True, False]
    with (
        EagleModel.load(chat_bundle(), threads=1, check_hashes=False, kv_budget=1000) as model,
        pytest.raises(MemoryLimitError, match=r"kv_budget is 0\.0 MB; raise it"),
    ):
        model.conversation().send("what is")


def test_a_request_is_checked_without_an_answer(model: EagleModel, chat_bundle: Callable[..., Path]) -> None:
    ids = model.check("what is", max_new_tokens=4)
    assert ids == model.encode("what is") and model.memory().kv_used == 0
    with pytest.raises(RequestError, match="temperature"):
        model.check(ids, temperature=-1)
    with pytest.raises(RequestError, match="method"):
        model.check(ids, method="none")
    with pytest.raises(ContextError):
        model.check([5] * model.context)
    with (
        EagleModel.load(chat_bundle(), threads=1, check_hashes=False, kv_budget=1000) as small,
        pytest.raises(MemoryLimitError, match="raise it"),
    ):
        small.check("what is")
    with (
        EagleModel.load(chat_bundle(), threads=1, check_hashes=False, kv_budget=1000) as small,
        pytest.raises(MemoryLimitError, match="raise it"),
    ):
        small.batch(["what is"])


def test_rows_of_a_common_beginning_are_shared(model: EagleModel) -> None:
    common = list(range(5, 65))
    settings: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True, "seed": 3}
    first, second, third = (model.conversation() for _ in range(3))
    list(first.complete([*common, 3], **settings))
    second.share_rows(first, len(common))
    shared, alone = (list(chat.complete([*common, 4], **settings))[-1].result for chat in (second, third))
    assert shared is not None and alone is not None
    assert shared.token_ids == alone.token_ids
    assert (shared.usage.cached_tokens, alone.usage.cached_tokens) == (
        len(common) - 1,
        0,
    )  # the last common token is read again


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["int8"])
def test_random_walks_change_no_answer(
    count: int, precision: str, chat_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """Acceptance: six conversations under a budget of two."""
    rng = random.Random(count)
    bundle = chat_bundle(precision)
    with (
        EagleModel.load(bundle, threads=1, check_hashes=False) as oracle,
        EagleModel.load(
            bundle, threads=1, check_hashes=False, kv_budget=BUDGET * turns_of(oracle).slots.shared[0].token_bytes
        ) as model,
    ):
        chats = [model.conversation() for _ in range(6)]
        done: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
        for number in range(count):
            place = rng.randrange(6)
            chat = chats[place]
            what = rng.choice(["send"] * 5 + list(done))
            settings: dict[str, Any] = {
                "max_new_tokens": rng.randint(1, 24),
                "seed": number,
                **rng.choice(DRAWN),
                **rng.choice([{}, {"method": "vanilla"}, {"method": "lookup"}, {"method": "eagle"}]),
            }
            if chat.room < 200:
                chat.rollback(to=0)
            if what in ("send", "regenerate"):
                if what == "regenerate" and not chat.messages:
                    continue
                turn = chat.send(question(rng), **settings) if what == "send" else chat.regenerate(**settings)
                result = list(turn)[-1].result
                assert result is not None
                prompt = list(chat.token_ids[: result.usage.prompt_tokens])
                assert oracle.generate(prompt, **settings).token_ids == result.token_ids, (number, what)
            elif what == "cancel":
                turn = chat.send(question(rng), **settings)
                for _ in range(rng.randint(0, 3)):
                    if next(turn, None) is None:
                        break
                turn.cancel()
            elif what == "edit" and chat.messages:
                end(chat)
                chat.edit(rng.randrange(len(chat.messages)), question(rng))
            elif what == "rollback":
                end(chat)
                chat.rollback(to=rng.randint(0, len(chat.messages)))
            elif what == "fork":
                chats[rng.randrange(6)].close()
                chats = [other for other in chats if not other._closed]
                chats += [model.conversation() if chat._closed else chat.fork() for _ in range(6 - len(chats))]
            elif what == "save":
                end(chat)
                chat.save(tmp_path / f"{rng.randrange(3)}", kv=rng.random() < 0.8)
            elif what == "load" and (files := sorted(tmp_path.iterdir())):
                chat.close()
                chats[place] = chat = model.load_conversation(rng.choice(files))
            elif what == "drop":
                end(chat)
                chat.drop_kv()
            done[what] += 1
            state = chat._slot.state
            assert state.target.cache.length <= max(0, len(state.tokens))
            assert turns_of(model).slots.nbytes <= turns_of(model).slots.budget + max(other.kv_bytes for other in chats)
        assert min(done.values()) > 0 and turns_of(model).slots.dropped > 0


def test_conversations_of_forty_tokens_take_little_memory(model: EagleModel) -> None:
    before = model.memory()
    chats = [model.conversation() for _ in range(8)]
    for chat in chats:
        answer(chat, "what is a tree", max_new_tokens=20, ignore_eos=True)
        state = chat._slot.state
        assert chat.kv_bytes == sum(cache.nbytes for cache in state.caches) < 4_000_000
        # the last token has no row, unless the last cycle accepted tokens beyond the limit: its tree depends on clocks
        assert len(chat.token_ids) - chat.kv_rows in (0, 1)
    memory = model.memory()
    assert memory.kv_reserved - before.kv_reserved == sum(chat.kv_bytes for chat in chats) >= memory.kv_used > 0
    assert (memory.conversations, memory.resident) == (before.conversations + 8, before.resident + 8)
    assert memory.weights > 100_000 and memory.kv_budget > memory.kv_reserved


def test_conversations_in_threads_answer_as_each_would_alone(model: EagleModel) -> None:
    wanted: dict[tuple[int, int], tuple[int, ...]] = {}
    for number in range(4):
        chat = model.conversation()
        for turn in range(4):
            wanted[number, turn] = answer(chat, f"{WORDS[number]} {turn}", max_new_tokens=8, seed=turn, temperature=1.0)
    chats = [model.conversation() for _ in range(4)]
    seen: dict[tuple[int, int], tuple[int, ...]] = {}

    def work(number: int) -> None:
        for turn in range(4):
            seen[number, turn] = answer(
                chats[number], f"{WORDS[number]} {turn}", max_new_tokens=8, seed=turn, temperature=1.0, wait=True
            )

    for thread in [Thread(work, number) for number in range(4)]:
        thread.result()
    assert seen == wanted


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_eight_threads_on_four_conversations(count: int, model: EagleModel) -> None:
    """Acceptance: turns of many threads, one after another in each conversation; none is lost, mixed up or refused."""
    settings: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0}
    chats = [model.conversation() for _ in range(4)]
    refused: list[BaseException] = []

    def work(first: int) -> None:
        for number in range(first, count, 8):
            chat, text = chats[number % 4], f"{WORDS[number % 13]} {number}"
            try:
                try:
                    turn = chat.send(text, wait=True, seed=number, **settings)
                except ContextError:
                    with chat._free(wait=True):
                        chat.rollback(to=0)
                        turn = chat.send(text, seed=number, **settings)
                with turn:
                    for _ in turn:
                        pass
            except BusyError as error:
                refused.append(error)

    for thread in [Thread(work, first) for first in range(8)]:
        thread.result(600)
    turns = 0
    for chat in chats:
        again = model.conversation()
        messages, past = chat.messages, chat.turns[-(len(chat.messages) // 2) :]
        for place, turn in enumerate(past):
            list(again.send(str(messages[2 * place]["content"]), seed=turn.seed, **settings))
        assert again.messages == messages and again.token_ids == chat.token_ids
        turns += len(chat.turns)
    assert refused == [] and turns == count


def test_closing_in_the_middle_of_turns_ends_them(chat_bundle: Callable[..., Path]) -> None:
    """With a result where a piece was being computed; between two pieces, or before the first, without one."""

    def answered(chat: Conversation) -> tuple[Turn, Result | None]:
        turn = chat.send("def f(x):", max_new_tokens=400)
        return turn, [None, *(piece.result for piece in turn)][-1]

    for closes_model in (False, True):
        with EagleModel.load(chat_bundle(), threads=1, check_hashes=False) as model:
            chats = [model.conversation() for _ in range(4)]
            begun = [Thread(lambda chat=chat: answered(chat)) for chat in chats]
            if closes_model:
                model.close()
            for chat in chats:
                chat.close()
            for thread in begun:
                try:
                    turn, result = thread.result()
                except ClosedError:
                    continue
                assert turn.done and turn.result is result
                assert result is None or result.finish_reason in ("cancelled", "stop", "length")


def test_a_turn_that_another_thread_begins_is_closed_too(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conversation is closed while the turn is made: then it is not decoded without its rows."""
    chat, turns = model.conversation(), turns_of(model)
    begin, closing = turns.in_slot, threading.Thread(target=chat.close)

    def interrupted(*arguments: Any) -> Turn:
        closing.start()
        closing.join(0.3)  # it waits until the turn is made
        return begin(*arguments)

    monkeypatch.setattr(turns, "in_slot", interrupted)
    turn = chat.send("def f(x):", max_new_tokens=20)
    closing.join(PATIENCE_S)
    assert turn.done and list(turn) == [] and turn.result is None
    with pytest.raises(ClosedError):
        chat.send("more")


def test_where_engines_have_one_pair_of_caches_conversations_share_it(
    model: EagleModel, tmp_path: Path, rows_read: list[int]
) -> None:
    """As on GPUs: what two conversations have not in common is read again, and no answer changes."""
    own = [model.conversation() for _ in range(2)]
    turns_of(model).slots.new_state = None
    shared = [model.conversation() for _ in range(2)]
    settings: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    for text in ("what is", "a tree", "of words"):
        for number, (chat, alone) in enumerate(zip(shared, own, strict=True)):
            asked = f"{text} {number}"
            assert answer(chat, asked, **settings) == answer(alone, asked, **settings)
    rows_read.clear()
    answer(shared[1], "and", **settings)
    goes_on = sum(rows_read)
    rows_read.clear()
    answer(shared[0], "and", **settings)
    assert goes_on < 20 < sum(rows_read)
    assert shared[0].kv_bytes == 0 and shared[0].kv_rows > 20 > shared[1].kv_rows
    shared[0].save(tmp_path / "chat")
    loaded = model.load_conversation(tmp_path / "chat")
    assert loaded.kv_note is None and loaded.messages == shared[0].messages
    own[0].save(tmp_path / "rows")
    loaded = model.load_conversation(tmp_path / "rows")
    assert loaded.kv_note == "this engine's caches are shared, so rows are read again"
    for chat in shared:
        chat.close()


def test_what_has_ended_is_freed_without_the_collector(model: EagleModel) -> None:
    """A turn at temperature 1 holds random numbers for the whole vocabulary, a conversation its rows."""
    gc.collect()
    gc.disable()
    try:
        chat = model.conversation()
        turn = chat.send("what is", max_new_tokens=4, temperature=1.0)
        for _ in turn:
            pass
        chat.close()
        kept = [weakref.ref(thing) for thing in (turn, turn._state, chat, chat._slot, chat._slot.state)]
        del turn, chat
        assert [ref() for ref in kept] == [None] * 5
    finally:
        gc.enable()
