"""The step of tried.py that asks another process: a worker."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_tools.ties import is_quantised

TEXTS = ("Name three colours.", "What is 17 plus 5?")
PATTERN = r"[a-z]{3,8}( [a-z]{3,8}){2}"
Load = Callable[..., EagleModel]


def worker(args: argparse.Namespace, loaded: Load) -> Iterator[str]:
    """The orders of a worker, and their answers by the model itself."""
    chat = [{"role": "user", "content": TEXTS[0]}]
    with loaded(args) as model:
        asked: dict[str, Any] = {"messages": chat} if model.text.chat else {"prompt": TEXTS[0]}
        settings = {"max_new_tokens": args.tokens, "temperature": 1.0, "seed": 5}
        wanted = model.generate(asked.get("messages", TEXTS[0]), method="vanilla", **settings)
        spoken, exact = model.text.chat, is_quantised(model.manifest)
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", "--worker", str(args.bundle)]
    options = {"--context": args.context, "--threads": args.threads}
    command += [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdin is not None and process.stdout is not None

    def result(**order: Any) -> dict[str, Any]:
        event = ask(**order)
        if event["event"] == "error":
            raise RequestError(f"the worker refuses {order['op']}: {event['message']}")
        answer: dict[str, Any] = event["result"]
        return answer

    def ask(**order: Any) -> dict[str, Any]:
        print(json.dumps(order), file=process.stdin, flush=True)
        for line in process.stdout or ():
            event: dict[str, Any] = json.loads(line)
            if event.get("id") == order["id"] and event["event"] in ("done", "error"):
                return event
        raise RequestError("the worker ended")

    try:
        got = result(id=1, op="generate", **asked, **settings)
        if tuple(got["token_ids"]) != wanted.token_ids and exact:
            raise RequestError(f"the worker's answer is {got['token_ids']} instead of {wanted.token_ids}")
        yield f"generate: {len(got['token_ids'])} tokens as by the model itself"
        text = result(id=2, op="generate", **asked, constraint={"regex": PATTERN}, max_new_tokens=60)["text"]
        yield f"constraint: {text!r} {'matches' if re.fullmatch(PATTERN, text) else 'is not finished'}"
        if spoken:
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "chat.safetensors")
                opened = result(id=3, op="conversation", action="open")["conversation"]
                said = [
                    result(id=4 + turn, op="generate", conversation=opened, message=TEXTS[turn], max_new_tokens=16)
                    for turn in range(2)
                ]
                result(id=7, op="conversation", action="save", conversation=opened, path=file)
                again = result(id=8, op="conversation", action="load", path=file)
                kept = said[1]["usage"]["cached_tokens"]
                yield f"conversation: {kept} rows kept, file loaded as {again['kv_status']}"
        wrong = ask(id=9, op="generate", **asked, temperature=-1)
        yield f"a wrong order: {wrong['event']} {wrong['code']}"
        process.stdin.close()
        code = process.wait(60)
    finally:
        process.kill()  # where an answer was not what it must be; one that has ended does not notice
        process.wait()
    yield f"ended with status {code}"
