"""Many mixed requests to a server of its own, and whether its memory stays.

    python -m studies.trials.soak BUNDLE --requests 2000 --parallel 4

Starts `eagle-serve` on this machine alone and sends it texts of all lengths, stop strings, JSON schemas and tools,
whole and streamed, at temperatures 0, 0.7 and 1; one in ten is left before its end. It passes if every other request is
answered, nothing is left in the queue, and the server's resident memory at the end is at most 3 % above that after the
first 200. Linux alone says what memory a process has.
"""

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
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from eagle_runtime.base.errors import EagleError, RequestError
from eagle_runtime.commands.command import Parser
from eagle_serve.allocator import resident_bytes
from eagle_tools.check_command import run_check
from eagle_tools.request_kinds import KINDS, QUESTIONS, SCHEMAS, STOPS, TOOLS

FIRST = 200  # requests after which the memory should stay
MOST_GROWTH = 1.03
PART = 200  # requests between two looks at the memory
LEFT = 0.1  # share of requests that are left
START_S, IDLE_S, ANSWER_S = 300.0, 60.0, 600.0  # seconds that loading, the last answers and one answer may take
CHATS = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """kind: of request_kinds, with "streamed" or "left" after it. left_s: seconds after which its client goes."""

    kind: str
    path: str
    body: dict[str, Any]
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """sizes: bytes of resident memory after FIRST requests, or all where they are fewer, and then after each PART.
    growth: of the last to the first. threads: of the server after the same requests. failed: answers that were none.
    kinds: requests of each kind. seconds: of all requests."""

    requests: int
    sizes: list[int]
    growth: float
    threads: list[int]
    failed: list[str]
    kinds: dict[str, int]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether memory and threads stay, and every request was answered."""
        return not self.failed and self.growth <= MOST_GROWTH and self.threads[-1] <= self.threads[0]


def requests_of(count: int, chat: bool, tokens: int, seed: int) -> list[Request]:
    """Returns mixed requests, the same for the same arguments. chat: whether the bundle has a chat template, without
    which it is asked to go on with texts alone. tokens: an answer's, on average."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        kind = draw.choice(KINDS if chat else KINDS[:2])
        question = " ".join(draw.choice(QUESTIONS) for _ in range(min(30, 1 + int(draw.expovariate(0.4)))))
        body: dict[str, Any] = {
            "max_tokens": draw.randrange(1, 2 * tokens),
            "temperature": draw.choice((0, 0.7, 1.0)),
            "seed": number,
            "stream": draw.random() < 0.4,
        }
        body |= draw.choice(({}, {"top_p": 0.9}, {"top_k": 8}, {"min_p": 0.05}, {"repetition_penalty": 1.2}))
        if kind == "stop":
            body["stop"] = draw.sample(STOPS, 2)
        if kind == "schema":
            form = {"name": "form", "schema": draw.choice(SCHEMAS)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if kind in ("call", "may_call"):
            body |= {"tools": list(TOOLS), "tool_choice": "required" if kind == "call" else "auto"}
        body |= {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
        left_s = draw.random() * 0.2 if draw.random() < LEFT else None
        if left_s is not None:
            body |= {"max_tokens": 10 * tokens, "stream": draw.random() < 0.5}
        name = f"{kind}, left" if left_s is not None else f"{kind}, streamed" if body["stream"] else kind
        made.append(Request(name, CHATS if chat else "/v1/completions", body, left_s))
    return made


def send(port: int, request: Request) -> str | None:
    """Send a request; returns why its answer is none, or None."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    with contextlib.closing(link):
        link.request("POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"})
        if request.left_s is not None:
            time.sleep(request.left_s)
            return None
        answer = link.getresponse()
        said = answer.read()
    whole = b"data: [DONE]" in said if request.body["stream"] else b'"choices"' in said
    return None if answer.status == 200 and whole else f"{request.kind}: {answer.status} {said[-200:]!r}"


@contextlib.contextmanager
def server(bundle: Path, options: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Gives the process and the port of a server, which ends with the block. Raises EagleError if it does not start."""
    command = [sys.executable, "-m", "eagle_serve.cli", str(bundle), "--port", "0", "--queue", "256", *options]
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stderr is not None
    with process:
        try:
            yield process.pid, _port(process.stderr)
        finally:
            process.terminate()


def _port(log: IO[str]) -> int:
    """Reads a server's log up to its address, and the rest of it in a thread."""
    said = ""
    watch = threading.Timer(START_S, log.close)
    watch.start()
    for line in log:
        said = line
        if (found := re.search(r"http://\S+?:(\d+)", line)) is not None:
            watch.cancel()
            threading.Thread(target=log.read, daemon=True).start()
            return int(found[1])
    watch.cancel()
    raise EagleError(f"the server did not start ({said.strip()})")


def soak(pid: int, port: int, asked: Sequence[Request], clients: int) -> Outcome:
    """Send requests from as many threads as there are clients."""
    started = time.perf_counter()
    sizes, threads, failed = [], [], []
    with ThreadPoolExecutor(clients) as pool:
        for start in range(0, len(asked), PART):
            part = asked[start : start + PART]
            failed += [problem for problem in pool.map(lambda one: send(port, one), part) if problem is not None]
            if not _idle(port):
                failed.append("requests are left in the server")
            sizes.append(resident_bytes(pid))
            threads.append(len(list(Path(f"/proc/{pid}/task").iterdir())))
            shown = (
                f"{start + len(part)} requests, {sizes[-1] / 1e6:.1f} MB, {threads[-1]} threads, {len(failed)} failed"
            )
            print(f"studies.trials.soak: {shown}", file=sys.stderr, flush=True)
    sizes, threads = sizes[FIRST // PART - 1 :], threads[FIRST // PART - 1 :]
    kinds = dict(Counter(request.kind for request in asked))
    growth = round(sizes[-1] / sizes[0], 4)
    return Outcome(len(asked), sizes, growth, threads, failed, kinds, round(time.perf_counter() - started, 1))


def _idle(port: int) -> bool:
    """Waits until the server has nothing to do; returns whether that came to be."""
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=IDLE_S)
        with contextlib.closing(link):
            link.request("GET", "/metrics")
            text = link.getresponse().read().decode()
        if all(re.search(rf"^eagle_{name} 0(?:[.]0)?$", text, re.M) for name in ("running", "queue_depth")):
            return True
        time.sleep(0.02)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if memory grew or an answer is missing, 2 for wrong input."""
    return run_check(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> bool:
    """Soak a server and print the outcome; returns whether it passed."""
    if args.requests < 1 or args.clients < 1 or args.tokens < 1:
        raise RequestError(
            f"requests is {args.requests}, clients {args.clients} and tokens {args.tokens}, but each must be 1 or more"
        )
    if not Path("/proc/self/statm").exists():
        raise RequestError("the memory of a process is read from /proc/PID/statm, which Linux alone has; run it there")
    asked = requests_of(args.requests, (args.bundle / "chat_template.jinja").is_file(), args.tokens, args.seed)
    options = ["--parallel", str(args.parallel)] if args.parallel else []
    options += ["--threads", str(args.threads)] if args.threads else []
    options += ["--context", str(args.context)] if args.context else []
    with server(args.bundle, options) as (pid, port):
        outcome = soak(pid, port, asked, args.clients)
    print(json.dumps(asdict(outcome)) if args.json else described(outcome), flush=True)
    return outcome.passed


def described(outcome: Outcome) -> str:
    """Returns the outcome in words."""
    first, last = (f"{size / 1e6:.1f}" for size in (outcome.sizes[0], outcome.sizes[-1]))
    sizes = f"{first} MB after {min(FIRST, outcome.requests)}, {last} at the end"
    threads = f"{outcome.threads[0]} threads, {outcome.threads[-1]} at the end"
    lines = [f"{outcome.requests} requests in {outcome.seconds:.0f} s: {sizes} (x {outcome.growth:.4f}); {threads}"]
    return "\n".join([*lines, f"{len(outcome.failed)} failed", *outcome.failed[:10]])


def _parser() -> Parser:
    parser = Parser(prog="studies.trials.soak", description="Send a server many mixed requests and watch its memory.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="in all (default 2000)")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="that send at the same time (default 8)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of an answer, on average (default 24)")
    parser.add_argument("--parallel", type=int, metavar="N", help="as of eagle-serve")
    parser.add_argument("--threads", type=int, metavar="N", help="as of eagle-serve")
    parser.add_argument("--context", type=int, metavar="N", help="as of eagle-serve")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
