"""eagle-serve: serve a bundle over HTTP, with OpenAI's API and a chat page."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_runtime import EagleModel, RequestError
from eagle_runtime.commands.command import (
    Listed,
    Parser,
    add_model_options,
    model_options,
    print_line,
    run_command,
    size,
)
from eagle_runtime.text.call_formats import FORMATS
from eagle_serve.allocator import keep_one_heap
from eagle_serve.log_lines import logged
from eagle_serve.options import Options

KEY = "EAGLE_API_KEY"  # environment variable


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 after a signal, 2 after an error of the input."""
    return run_command(_parser(), argv, run, extra="serve", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Listen at once, load the model meanwhile, and serve until a signal."""
    options = options_of(args)
    _check_host(args.host, options)
    keep_one_heap()
    with logged(args.log_json):
        _serve(args, options)


def _serve(args: argparse.Namespace, options: Options) -> None:
    from eagle_serve.app import Service
    from eagle_serve.engine import Engine
    from eagle_serve.server import Server, address_of, listen

    service = Service(options)
    listener = listen(args.host, args.port)
    server = Server(service, listener)
    failures: list[BaseException] = []
    models: list[EagleModel] = []

    def load() -> None:
        try:
            model = EagleModel.load(kv_budget=args.kv_budget, **model_options(args))
            models.append(model)
            service.begin(Engine(model, Path(args.bundle), options, service.metrics))
            where = f"{args.bundle} is served at {address_of(listener)} on {model.backend}"
            print_line("eagle-serve", f"{where}, {_room(model)}")
        except BaseException as error:  # raised again below, in the main thread
            failures.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load, name="eagle-serve-load")
    loader.start()
    try:
        server.run_here()
    finally:
        loader.join()
        service.end()
        for model in models:
            model.close()
    if failures:
        raise failures[0]


def _room(model: EagleModel) -> str:
    """What a prompt and its answer have room for, and where it can be changed."""
    longest = model.manifest.target.context
    if model.context == longest:
        return f"with the model's context of {longest} tokens"
    return f"with {model.context} of the model's {longest} tokens of context (--context says otherwise)"


def options_of(args: argparse.Namespace) -> Options:
    """The options that were given. Raises RequestError."""
    return Options(
        aliases=tuple(args.alias),
        strict_model=args.strict_model,
        queue=args.queue,
        parallel=args.parallel,
        max_tokens=args.max_new_tokens,
        tool_format=args.tool_format,
        api_key=_api_key(args.api_key_file),
        allowed_hosts=(*args.allowed_hosts, *_own_name(args.host)),
        allowed_origins=tuple(args.allowed_origins),
        log_content=args.log_content,
    )


def _api_key(path: str | None) -> str | None:
    """The key of a file, else of the environment, else none. Raises RequestError."""
    if path is None:
        key, where = os.environ.get(KEY, ""), KEY
    else:
        try:
            key, where = Path(path).read_text(encoding="utf-8").strip(), path
        except (OSError, ValueError) as error:
            raise RequestError(
                f"the key file {path} cannot be read as text ({error}); give a file with one line"
            ) from None
        if not key:
            raise RequestError(f"the key file {path} is empty; write the key into it")
    if not key:
        return None
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        raise RequestError(f"the key in {where} must have at least 16 letters, digits or signs of ASCII, and no spaces")
    return key


def _check_host(host: str, options: Options) -> None:
    address = _ip(host)
    own = host == "localhost" or (address is not None and address.is_loopback)
    if not own and options.api_key is None:
        raise RequestError(
            f"other machines can reach --host {host}, so an API key is needed: give --api-key-file, or set {KEY}"
        )


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _own_name(host: str) -> tuple[str, ...]:
    """The name by which clients call the host that is listened at, unless that is every address."""
    address = _ip(host)
    if address is not None and address.is_unspecified:
        return ()
    return (f"[{host}]",) if address is not None and address.version == 6 else (host,)


def _count(least: int, most: int) -> Any:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-serve",
        usage="%(prog)s [options] BUNDLE",
        description="Serve a bundle over HTTP: APIs of OpenAI, Ollama, llama.cpp, and a chat page.",
    )
    add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=_count(0, 65535), default=8000, metavar="N", help="default: 8000; 0: any")
    parser.add_argument("--alias", action="append", default=[], metavar="NAME", help="another name of the model")
    parser.add_argument("--strict-model", action="store_true", help="refuse requests for models of other names")
    parser.add_argument("--queue", type=_count(0, 10_000), default=16, metavar="N", help="requests that may wait (16)")
    parser.add_argument("--parallel", type=_count(1, 16), metavar="N", help="requests at once (native: 4, cpu: 1)")
    parser.add_argument(
        "--max-new-tokens", type=_count(1, 2**31 - 1), metavar="N", help="most of an answer (default: what is left)"
    )
    formats = [row.name for row in FORMATS]
    parser.add_argument(
        "--tool-format", choices=formats, metavar="NAME", help="of calls (default: as the template says)"
    )
    parser.add_argument("--kv-budget", type=size, metavar="2GB", help="memory for keys and values of all texts")
    guard = parser.add_argument_group("security, log")
    guard.add_argument("--api-key-file", metavar="F", help=f"with the key of requests (default: ${KEY})")
    guard.add_argument(
        "--allowed-hosts", action=Listed, nargs="+", default=[], metavar="A,B", help="more names of this server"
    )
    guard.add_argument(
        "--allowed-origins", action=Listed, nargs="+", default=[], metavar="A,B", help="web sites that may call it"
    )
    guard.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    guard.add_argument("--log-content", action="store_true", help="log prompts too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
