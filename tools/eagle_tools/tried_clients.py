"""Steps of tried.py that ask other processes: a worker, and a server under load."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle_runtime import Constraint, EagleModel
from eagle_runtime.base.errors import RequestError

KINDS = 60  # different requests of a soak, each of which is sent many times
CLIENTS = 8
TEXTS = (
    "Name three colours.",
    "What is 17 plus 5?",
    "Write a line of Python that prints the numbers from 1 to 5.",
    "Say hello in French, in German and in Italian.",
    "Repeat: one two three one two three one two",
)
PATTERN = r"[a-z]{3,8}( [a-z]{3,8}){2}"
JSON = {"Content-Type": "application/json"}
Load = Callable[..., EagleModel]


def worker(args: argparse.Namespace, loaded: Load) -> Iterator[str]:
    """The orders of a worker, and their answers by the model itself."""
    chat = [{"role": "user", "content": TEXTS[0]}]
    with loaded(args) as model:
        asked: dict[str, Any] = {"messages": chat} if model.text.chat else {"prompt": TEXTS[0]}
        settings = {"max_new_tokens": args.tokens, "temperature": 1.0, "seed": 5}
        wanted = model.generate(asked.get("messages", TEXTS[0]), method="vanilla", **settings)
        spoken, exact = model.text.chat, is_exact(model)
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", "--worker", str(args.bundle), *_options(args)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdin is not None and process.stdout is not None

    def ask(**order: Any) -> dict[str, Any]:
        print(json.dumps(order), file=process.stdin, flush=True)
        for line in process.stdout or ():
            event: dict[str, Any] = json.loads(line)
            if event.get("id") == order["id"] and event["event"] in ("done", "error"):
                return event
        raise RequestError("the worker ended")

    try:
        got = ask(id=1, op="generate", **asked, **settings)["result"]
        if tuple(got["token_ids"]) != wanted.token_ids and exact:
            raise RequestError(f"the worker's answer is {got['token_ids']} instead of {wanted.token_ids}")
        yield f"generate: {len(got['token_ids'])} tokens as by the model itself"
        text = ask(id=2, op="generate", **asked, constraint={"regex": PATTERN}, max_new_tokens=60)["result"]["text"]
        yield f"constraint: {text!r} {'matches' if re.fullmatch(PATTERN, text) else 'is not finished'}"
        if spoken:
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "chat.safetensors")
                opened = ask(id=3, op="conversation", action="open")["result"]["conversation"]
                said = [
                    ask(id=4 + turn, op="generate", conversation=opened, message=TEXTS[turn], max_new_tokens=16)
                    for turn in range(2)
                ]
                ask(id=7, op="conversation", action="save", conversation=opened, path=file)
                again = ask(id=8, op="conversation", action="load", path=file)["result"]
                kept = said[1]["result"]["usage"]["cached_tokens"]
                yield f"conversation: {kept} rows kept, file loaded as {again['kv_status']}"
        wrong = ask(id=9, op="generate", **asked, temperature=-1)
        yield f"a wrong order: {wrong['event']} {wrong['code']}"
    finally:
        process.stdin.close()
        code = process.wait(60)
    yield f"ended with status {code}"


def is_exact(model: EagleModel) -> bool:
    """Whether the bundle's rows are equal to the bit alone and in a tree, as those of quantised targets are."""
    return model.manifest.precision["target"] not in ("fp32", "fp16")


def _options(args: argparse.Namespace) -> list[str]:
    asked = {"--context": args.context, "--threads": args.threads}
    return [str(part) for name, value in asked.items() if value is not None for part in (name, value)]


def cases(model: EagleModel, count: int, tokens: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields path, body and the text that the target alone answers."""
    draw = random.Random(7)
    for number in range(count):
        text = draw.choice(TEXTS) + " " * draw.randrange(2) + draw.choice(TEXTS) * draw.randrange(2)
        body: dict[str, Any] = {"temperature": draw.choice((0.0, 0.7, 1.0)), "seed": number}
        body |= draw.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"repetition_penalty": 1.1}, {"min_p": 0.05}))
        settings, constraint = dict(body), draw.random() < 0.15
        if constraint:
            settings["constraint"] = Constraint.regex(PATTERN)
        most = draw.randrange(1, tokens)
        chat = model.text.chat and draw.random() < 0.6
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        wanted = model.generate(prompt, max_new_tokens=most, method="vanilla", **settings)
        eagle: dict[str, Any] = draw.choice(({}, {"method": "lookup"}, {"method": "recycling"}))
        eagle = {**eagle, **({"constraint": {"regex": PATTERN}} if constraint else {})}
        body |= {"max_tokens": most, **({"eagle": eagle} if eagle else {})}
        yield (
            "/v1/chat/completions" if chat else "/v1/completions",
            {**body, ("messages" if chat else "prompt"): prompt},
            wanted.text or "",
        )


def soak(args: argparse.Namespace, loaded: Load) -> Iterator[str]:
    """Requests of many clients at once; memory and threads after a fifth of them and after all."""
    with loaded(args) as model:
        exact = is_exact(model)
        made = list(cases(model, min(KINDS, args.requests), args.tokens))
    yield f"{len(made)} kinds of requests"
    command = [sys.executable, "-m", "eagle_serve.cli", str(args.bundle), "--port", "0", *_options(args)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, "--queue", "64", "--parallel", "2"], stderr=said)
        try:
            address = _address(process, said)
            counts: Counter[str] = Counter()
            first = args.requests // 5
            for part in (range(first), range(first, args.requests)):
                with ThreadPoolExecutor(CLIENTS) as pool:
                    counts.update(pool.map(lambda number: _ask(address, number, *made[number % len(made)]), part))
                yield f"after {part.stop}: {dict(sorted(counts.items()))}; {_size(process.pid)}"
            answered = counts["equal"] + counts["differs"]
            wrong = counts.total() - answered - counts["left"] - counts["refused"]
            if wrong or (exact and counts["differs"]) or counts["differs"] > answered // 50:
                raise RequestError(f"{counts['differs']} answers differ, {wrong} failed")
        finally:
            process.terminate()
            code = process.wait(60)
    yield f"stopped with status {code}"


def _ask(address: str, number: int, path: str, body: dict[str, Any], wanted: str) -> str:
    """Send one request. Returns what became of it: equal, differs, left, refused, or a status."""
    draw = random.Random(number)
    fate = draw.random()
    link = http.client.HTTPConnection(address, timeout=600)
    with contextlib.closing(link):
        if fate < 0.05:
            link.request("POST", path, json.dumps({**body, "temperature": "hot"}), JSON)
            return "refused" if link.getresponse().status == 400 else "taken though wrong"
        if fate < 0.15:
            link.request("POST", path, json.dumps({**body, "stream": True, "max_tokens": 200}), JSON)
            time.sleep(draw.random())
            return "left"
        stream = fate < 0.5
        link.request("POST", path, json.dumps({**body, "stream": stream}), JSON)
        answer = link.getresponse()
        content = answer.read().decode("utf-8")
        if answer.status != 200:
            return f"status {answer.status}: {content[:200]}"
        if stream:
            said = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
            if said[-1] != "[DONE]":
                return f"ended with {said[-1][:200]}"
            chunks = [choice for event in said[:-1] for choice in json.loads(event)["choices"]]
            got = "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in chunks)
        else:
            (choice,) = json.loads(content)["choices"]
            got = choice["message"]["content"] if "message" in choice else choice["text"]
        return "equal" if got == wanted else "differs"


def _address(process: subprocess.Popen[bytes], said: Any) -> str:
    """Host and port, once the server says them."""
    for _ in range(3000):
        said.seek(0)
        text = said.read().decode()
        if match := re.search(r"http://([^\s/]+)", text):
            return match[1]
        if process.poll() is not None:
            raise RequestError(f"the server ended: {text}")
        time.sleep(0.1)
    raise RequestError("the server did not start")


def _size(pid: int) -> str:
    """Resident memory and threads of a process, where the system tells."""
    folder = Path(f"/proc/{pid}")
    if not folder.exists():
        return f"{threading.active_count()} threads here"
    pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 1e6:.0f} MB, {len(list((folder / 'task').iterdir()))} threads"
