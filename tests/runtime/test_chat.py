"""eagle-chat at a terminal and through pipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from conftest import put_tokenizer, with_template
from eagle_runtime import ConversationFileError, EagleModel, RequestError
from eagle_runtime.commands import cli
from eagle_runtime.commands.chat_screen import Interrupt, Screen, shown
from eagle_runtime.commands.chat_talk import SETTINGS, Talk
from patience import PATIENCE_S
from terminal import Terminal

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ '</s>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "a: "
)
BELL, ESCAPE = 3 + 7, 3 + 27  # ids: the tokenizer's tokens are bytes, after three special ones
FIGURES = re.compile(
    r"\[(?P<end>.*?)(?P<new>\d+) tokens, [\d.]+ tokens/s, tau [\d.]+, TTFT [\d.]+ s, "
    r"(?P<cached>\d+) cached \+ (?P<read>\d+) prefilled, context (?P<used>\d+) of 2048\]"
)
LONG = ["--max-new-tokens", "1900"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")


@pytest.fixture(scope="module")
def chat_bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("chat") / "pair", TEMPLATE)


@pytest.fixture(scope="module")
def plain_bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a template."""
    bundle = shutil.copytree(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("plain") / "pair")
    put_tokenizer(bundle)
    return bundle


def command(bundle: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle_runtime.commands.chat", str(bundle), "--threads", "1", *arguments]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(sys.path)
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return {**inherited, "PYTHONPATH": path, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **more}


def piped(bundle: Path, lines: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    text = "".join(line + "\n" for line in lines)
    return subprocess.run(
        command(bundle, *arguments), input=text, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S
    )


@pytest.fixture
def at_terminal() -> Iterator[Callable[..., Terminal]]:
    """bundle, arguments, variables -> eagle-chat in a terminal of its own, at its first prompt."""
    opened: list[Terminal] = []

    def start(bundle: Path, *arguments: str, **variables: str) -> Terminal:
        opened.append(Terminal(command(bundle, *arguments), environment(**variables)))
        opened[-1].until("> ")
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_one_question_per_line_without_a_terminal(chat_bundle: Path) -> None:
    """Answers on standard output, figures on standard error, no escape sequences, and the rows of before are reused."""
    done = piped(chat_bundle, ["ab", "", "cd"], "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    with EagleModel.load(chat_bundle, threads=1) as model, model.conversation() as chat:
        answers = []
        for question in ("ab", "cd"):
            for piece in chat.send(question, max_new_tokens=12):
                if piece.result is not None:
                    answers.append(piece.result)
    said = [shown(answer.text or "") for answer in answers]
    assert done.stdout == "".join(text + "\n" * (text != "" and text[-1] != "\n") for text in said)
    assert "\x1b" not in done.stdout + done.stderr and ">" not in done.stderr
    first, second = (FIGURES.fullmatch(line) for line in done.stderr.splitlines())
    assert first is not None and second is not None
    assert (int(first["cached"]), int(first["read"])) == (0, len("u: ab\na: "))
    assert int(second["cached"]) == answers[1].usage.cached_tokens > 0
    assert int(second["read"]) == answers[1].usage.prefilled_tokens


def test_an_error_without_a_terminal_is_one_line_and_status_2(chat_bundle: Path) -> None:
    done = piped(chat_bundle, ["ab", "/nonsense", "cd"], "--max-new-tokens", "4", "--backend", "cpu")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("eagle-chat: /nonsense is not a command; ")
    assert len(done.stderr.splitlines()) == 2


def test_a_closed_input_is_the_end(chat_bundle: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", *command(chat_bundle, "--backend", "cpu")],
        capture_output=True, text=True, env=environment(), timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bytes_that_are_no_text(chat_bundle: Path) -> None:
    done = subprocess.run(
        command(chat_bundle, "--backend", "cpu"),
        input=b"a\xff\n",
        capture_output=True,
        env=environment(),
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"half a character" in done.stderr


def test_without_a_template_the_text_goes_on(plain_bundle: Path) -> None:
    done = piped(plain_bundle, ["abc", "/retry", "/edit xyz", "/tokens"], "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    notes = done.stderr.splitlines()
    assert "no chat template" in notes[0]
    with EagleModel.load(plain_bundle, threads=1) as model:
        wanted = [shown(model.generate(text, max_new_tokens=8).text or "") for text in ("abc", "xyz")]
    assert done.stdout.startswith(wanted[0] + "\n" + wanted[0] + "\n" + wanted[1] + "\n")
    figures = [match for match in map(FIGURES.fullmatch, notes) if match is not None]
    assert [(match["cached"], match["read"]) for match in figures] == [("0", "3"), ("2", "1"), ("0", "3")]
    refused = piped(plain_bundle, ["/system be brief"])
    assert refused.returncode == 2 and "no place for a system text" in refused.stderr


def test_a_bundle_without_a_tokenizer(bundle_of: Callable[..., Path]) -> None:
    done = piped(bundle_of("eagle1", "int8"), ["a"])
    assert done.returncode == 2 and "has no tokenizer" in done.stderr and done.stderr.count("\n") == 1


def test_a_dim_line_follows_each_answer(chat_bundle: Path, at_terminal: Callable[..., Terminal]) -> None:
    terminal = at_terminal(chat_bundle, "--max-new-tokens", "5")
    terminal.type("ab\n")
    line = terminal.until("\x1b[0m\n").rpartition("\x1b[2m")[2].removesuffix("\x1b[0m\n")
    assert FIGURES.fullmatch(line)
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.status() == 0


def test_no_colour(chat_bundle: Path, at_terminal: Callable[..., Terminal]) -> None:
    terminal = at_terminal(chat_bundle, "--max-new-tokens", "5", NO_COLOR="1")
    terminal.type("ab\n")
    terminal.until("of 2048]")
    terminal.type("/quit\n")
    assert terminal.status() == 0 and "\x1b[2m" not in terminal.shown and "\x1b[0m" not in terminal.shown


def test_control_characters_of_the_model_are_escaped(chat_bundle: Path, at_terminal: Callable[..., Terminal]) -> None:
    terminal = at_terminal(chat_bundle, "--max-new-tokens", "6", NO_COLOR="1", TERM="dumb")
    terminal.type(f'/set logit_bias {{"{BELL}": 900, "{ESCAPE}": 900}}\n/set temperature 1\nab\n')
    terminal.until("of 2048]")
    terminal.type("/quit\n")
    assert terminal.status() == 0
    assert "\x1b" not in terminal.shown and "\x07" not in terminal.shown
    assert len(re.findall(r"\\x1b|\\x07", terminal.shown)) == 6
    assert shown("a\r\u202e\u200d\U0001f600\n") == "a\\r\\u202e\u200d\U0001f600\n"


def test_ctrl_c_stops_the_answer_and_keeps_it(chat_bundle: Path, at_terminal: Callable[..., Terminal]) -> None:
    terminal = at_terminal(chat_bundle, *LONG, NO_COLOR="1")
    terminal.type("/set ignore_eos true\nabcd\n")
    while len(terminal.shown) < 300:  # the answer has begun
        terminal.more()
    terminal.interrupt()
    line = terminal.until("of 2048]")
    match = FIGURES.search(line)
    assert match is not None and match["end"] == "stopped, " and 0 < int(match["new"]) < 1900
    terminal.type("/stats\n")
    terminal.until(f"context {match['used']} of 2048, ")
    terminal.type("/set max_new_tokens 3\nmore\n")
    second = FIGURES.search(terminal.until("of 2048]"))
    assert second is not None and int(second["cached"]) >= int(match["new"]), "the answer is kept"
    terminal.until("> ")
    terminal.interrupt()
    terminal.until("Ctrl-C once more leaves")
    terminal.type("/set\n")
    terminal.until("logit_bias")
    terminal.until("> ")
    terminal.interrupt()
    terminal.until("Ctrl-C once more leaves")
    terminal.until("> ")
    terminal.interrupt()
    assert terminal.status() == 0


def test_a_text_of_several_lines_and_an_edit(
    chat_bundle: Path, at_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    """Editing offers the old question, and what was equal before it is not read again."""
    terminal = at_terminal(chat_bundle, "--max-new-tokens", "4", NO_COLOR="1")
    terminal.type('"""one\n')
    terminal.until(". ")
    terminal.type('two"""\n')
    first = FIGURES.search(terminal.until("of 2048]"))
    assert first is not None and int(first["read"]) == len("u: one\ntwo\na: ")
    terminal.until("> ")
    terminal.type("question\n")
    terminal.until("of 2048]")
    terminal.type("/edit\n")
    terminal.until("> question")
    terminal.type(" two\n")
    terminal.until("of 2048]")
    terminal.type(f"/save {tmp_path / 'chat file'}\n")
    terminal.until("MB")
    terminal.type("/undo\n/undo\n/undo\n")
    terminal.until("there is no question yet")
    terminal.type(f"/load {tmp_path / 'chat file'}\n")
    terminal.until("4 messages")
    terminal.type("/quit\n")
    assert terminal.status() == 0
    with EagleModel.load(chat_bundle, threads=1) as model, model.load_conversation(tmp_path / "chat file") as chat:
        roles = [(message["role"], message["content"]) for message in chat.messages]
    assert roles[0] == ("user", "one\ntwo") and roles[2] == ("user", "question two")


def test_a_signal_to_end_while_it_waits(chat_bundle: Path, at_terminal: Callable[..., Terminal]) -> None:
    terminal = at_terminal(chat_bundle)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.status() == 128 + signal.SIGTERM


@pytest.fixture
def talk(chat_bundle: Path) -> Iterator[Talk]:
    with EagleModel.load(chat_bundle, threads=1) as model:
        yield Talk(model, Screen(), Interrupt(), {"max_new_tokens": 8})


def test_commands(talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/system be brief", "ab", "/system be brief, please", "cd", "//x"):
        talk.take(line)
    contents = [message["content"] for message in talk.messages]
    assert contents[0] == "be brief, please" and contents[1::2] == ["ab", "cd", "/x"]
    before = talk.messages
    talk.take("/set temperature 5")
    talk.take("/retry 5")
    again = talk.messages[-1]
    talk.take("/retry 6")
    assert talk.messages[-1] != again
    talk.take("/retry 5")
    assert talk.messages[-1] == again and talk.messages[:-1] == before[:-1]
    for wrong in ("/edit " + "x" * 3000, "/set top_p 2", "/set top_p x", "/set nothing 1", "/set seed " + "[" * 10**5):
        with pytest.raises(RequestError):
            talk.take(wrong)
        assert talk.messages == [*before[:-1], again]
    capsys.readouterr()
    for line in ("/help", "/set", "/stats", "/tokens"):
        talk.take(line)
    said = capsys.readouterr().err
    assert all(name in said for name in SETTINGS) and "/retry [SEED]" in said and "answers 6" in said
    assert "temperature 5" in said and re.search(r"8 tokens, of which \d were drafted", said)
    talk.take("/set temperature")
    talk.take("/set max_new_tokens 3")
    talk.take("/set max_new_tokens")
    talk.take("/set")
    said = capsys.readouterr().err
    assert "max_new_tokens 8" in said and "temperature 5" not in said
    talk.take("/system")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3
    talk.take("/reset")
    assert talk.messages == []
    with pytest.raises(RequestError, match="no question yet"):
        talk.take("/undo")


def test_what_people_write_is_no_control_character() -> None:
    written = "Vraiment\u00a0? 日本\u3000語 1\u202f000 soft\u00adhyphen"
    assert shown(written) == written
    assert shown("\x1b[2J\u202e\u2066\x00") == r"\x1b[2J\u202e\u2066\x00"


def test_a_home_of_nobody(talk: Talk, tmp_path: Path) -> None:
    for line in ("/save ~nobody-known/x", "/load ~nobody-known/x"):
        with pytest.raises(RequestError, match="home folder of somebody unknown"):
            talk.take(line)
    with pytest.raises(ConversationFileError, match="cannot be read"):
        talk.take("/load a\0b")


def test_tools_of_a_file_are_those_of_the_chat(chat_bundle: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with EagleModel.load(chat_bundle, threads=1) as model:
        with model.conversation(tools=tools, tool_format="llama") as chat:
            chat.save(tmp_path / "file")
        talk = Talk(model, Screen(), Interrupt(), {"max_new_tokens": 150, "temperature": 0, "seed": 1})
        talk.load(tmp_path / "file")
        talk.take("/set tool_choice required")
        talk.take("What time is it?")
        assert talk.messages[-1]["tool_calls"]
    done = piped(chat_bundle, ["Hi"], "--load", str(tmp_path / "file"), "--tool-format", "llama")
    assert done.returncode == 2 and "--load goes on with the tools of the file" in done.stderr


def test_calls_of_tools(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call is shown, and the next line is its result."""
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with EagleModel.load(chat_bundle, threads=1) as model:
        talk = Talk(model, Screen(), Interrupt(), {"max_new_tokens": 150, "temperature": 0, "seed": 1}, tools)
        talk.take("/set tool_choice required")
        talk.take("What time is it?")
        calls = talk.messages[-1]["tool_calls"]
        assert "clock({}) is called; type its result" in capsys.readouterr().err
        talk.take("/set tool_choice none")
        for _ in calls:
            talk.take("12:00")
        results = [message["content"] for message in talk.messages if message["role"] == "tool"]
        assert results == ["12:00"] * len(calls) and talk.messages[-1]["role"] == "assistant"
        with pytest.raises(RequestError, match="tool_choice is 'any'"):
            talk.take("/set tool_choice any")
        with pytest.raises(RequestError, match="parallel_tool_calls is 'x'"):
            talk.take("/set parallel_tool_calls x")


@pytest.mark.parametrize(("name", "written"), [("llama", '"parameters": {}'), ("qwen3-coder", "<function=clock>")])
def test_how_calls_are_written(name: str, written: str, chat_bundle: Path) -> None:
    """--tool-format holds for new chats too, and one call is asked for as OpenAI's API does."""
    tools = [{"type": "function", "function": {"name": "clock"}}]
    settings = {"max_new_tokens": 150, "temperature": 0, "tool_choice": "required"}
    with EagleModel.load(chat_bundle, threads=1) as model:
        talk = Talk(model, Screen(), Interrupt(), settings, tools, name)
        talk.take("/set parallel_tool_calls false")
        for line in ("What time is it?", "/system be brief"):
            talk.take(line)
        talk.take("/undo")
        talk.take("What time is it?")
        assert [call["function"]["name"] for call in talk.messages[-1]["tool_calls"]] == ["clock"]
        assert written in "".join(token.text for token in talk._tokens)


def test_tool_format_is_a_name(chat_bundle: Path) -> None:
    done = piped(chat_bundle, ["Hi"], "--tool-format", "x")
    assert done.returncode == 2 and "qwen3-coder" in done.stderr


def test_a_file_of_tools_that_is_none(chat_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text("[{}]")
    done = piped(chat_bundle, ["Hi"], "--tools", str(tmp_path / "tools.json"))
    assert done.returncode == 2 and "tools[0].name is None" in done.stderr


def test_one_message_is_answered_as_in_a_chat(
    chat_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """eagle-run --message, and --messages with the same dialogue, take the template, the system text and --stop."""
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is"}]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    settings = ["--max-new-tokens", "24", "--seed", "3", "--temperature", "0.9", "--threads", "1", "-q"]
    with EagleModel.load(chat_bundle, threads=1) as model:
        whole = model.generate(asked, max_new_tokens=24, seed=3, temperature=0.9).text
    assert whole is not None
    stop = whole[len(whole) // 2]
    for source in (["--message", "what is", "--system", "s"], ["--messages", str(tmp_path / "asked.json")]):
        assert cli.main([str(chat_bundle), *source, *settings]) == 0
        assert capsys.readouterr() == (whole + "\n", "")
        assert cli.main([str(chat_bundle), *source, *settings, "--stop", stop]) == 0
        assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


def test_options_are_settings_of_the_chat(chat_bundle: Path) -> None:
    given = ["--method", "vanilla", "--top-k", "2", "--top-p", "0.5", "--system", "s", "--max-new-tokens", "4"]
    done = piped(chat_bundle, ["/set", "what is"], *given)
    assert done.returncode == 0, done.stderr
    assert {'method "vanilla"', "top_k 2", "top_p 0.5"} <= set(done.stderr.splitlines())
    with EagleModel.load(chat_bundle, threads=1) as model:
        asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is"}]
        assert int(FIGURES.search(done.stderr)["read"]) == model.count_tokens(asked)  # type: ignore[index]
