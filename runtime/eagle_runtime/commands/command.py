"""Shared by all commands: errors and warnings of one line, exit statuses, and a clean end after a signal."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from eagle_runtime.base.backend_names import AUTO, BACKENDS
from eagle_runtime.base.errors import EagleError, EagleWarning, RequestError, is_panic
from eagle_runtime.commands.interrupts import Interrupted, handled_interrupts

LONGEST = 1000  # characters of a message


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong argument in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        print_line(self.prog, f"{message}; see {self.prog} --help")
        self.exit(2)


def add_model_options(parser: argparse.ArgumentParser, backend: str | None = AUTO) -> None:
    """Add the bundle, and the options by which it is loaded."""
    parser.add_argument("bundle", help="folder written by eagle-export")
    parser.add_argument(
        "--backend", default=backend, metavar="B", help=f"engine to run on: {', '.join(BACKENDS)}, or auto (default)"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of prompt and output to make room for")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a forward pass (default: physical cores, or quota)"
    )
    parser.add_argument("--draft-bundle", metavar="FOLDER", help="bundle of a smaller model that drafts")
    parser.add_argument("--datastore", metavar="FILE", help="text or JSONL that is searched for n-gram matches too")
    parser.add_argument("--habits", metavar="FILE", help="keep what method recycling learns in this file")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those options, as `EagleModel.load` takes them."""
    names = ("bundle", "backend", "context", "threads", "draft_bundle", "datastore", "habits")
    return {name: getattr(args, name) for name in names}


def print_line(program: str, message: str) -> None:
    """Print one line on stderr, with unprintable characters escaped and a long message cut."""
    print(f"{program}: {one_line(message)}", file=sys.stderr)


def one_line(message: str) -> str:
    """Returns a message without control characters, surrogates and line ends. Of one longer than LONGEST characters it
    keeps the beginning, and the end, which says what to do."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST * 3 // 4]} ... {message[-LONGEST // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in message)


def run_command(
    parser: Parser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], None],
    extra: str,
    interrupted: str,
    but_for: Collection[int] = (),
) -> int:
    """Parse the arguments and call `run`. Returns the exit status: 0, 2 after an error of the input or the machine, 128
    plus the number of the signal after a signal.

    extra: the extra of this distribution that installs what `run` imports. interrupted: the message after a signal.
    but_for: signals that `run` handles itself."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows it as \\u20ac
            stream.reconfigure(errors="backslashreplace")
    args = parser.parse_args(argv)
    try:
        with handled_interrupts(but_for), _printed_warnings(parser.prog):
            run(args)
    except EagleError as error:
        print_line(parser.prog, str(error))
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eagle_"):
            raise
        print_line(parser.prog, f"needs {error.name!r}; pip install 'eagle-edge[{extra}]'")
        return 2
    except MemoryError:
        print_line(parser.prog, "the memory is full; end other programs, or use a shorter text, context or tree")
        return 2
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print_line(parser.prog, f"{where}{error.strerror or error}; see that it can be read and written")
        return 2
    except Interrupted as stop:
        print_line(parser.prog, interrupted)
        return 128 + int(stop.args[0])
    except BaseException as error:
        if not is_panic(error):
            raise
        print_line(parser.prog, f"a library gave up ({error}); see that the input's files are whole")
        return 2
    return 0


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """A reader of the output that ended, as in `| head`, ends the run silently; a full disk is an error."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains once more
        if not isinstance(error, BrokenPipeError):
            raise RequestError(f"{error.filename or 'the output'} failed ({error.strerror})") from None


@contextlib.contextmanager
def _printed_warnings(program: str) -> Iterator[None]:
    """Within the block the project's own warnings are printed like errors; others look as usual."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", EagleWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **named_place: Any) -> None:
            if issubclass(category, EagleWarning):
                print_line(program, f"warning: {message}")
            else:
                usual(message, category, *place, **named_place)

        warnings.showwarning = show
        yield
