"""Shared by all commands: options that each one takes, errors and warnings of one line, exit statuses, and a clean end
after a signal."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from eagle_runtime.base.backend_names import AUTO, BACKENDS
from eagle_runtime.base.errors import EagleError, EagleWarning, RequestError, is_panic
from eagle_runtime.commands.interrupts import Interrupted, handled_interrupts

LONGEST = 1000  # characters of a message: a dozen lines of a terminal
SHELLS = ("bash", "zsh", "tcsh")
# LoadingLine: stages of loading that are shown, and as what.
STAGES = {"warm": "compiling kernels for this GPU", "index": "indexing the datastore"}
WIDTH = 30  # characters of the bar
CLEARED = "\r\x1b[K"  # to the line's start, and erase it


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong argument in one line, like all other errors, and takes the options that
    all commands have: --version, -v, -q, and --print-completion unless it is a subcommand's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._common = self.add_argument_group("of every command")
        # Unset unless given: a subcommand's default would undo what the command was given.
        unset: Any = {"action": "store_true", "default": argparse.SUPPRESS}
        self._common.add_argument("-v", "--verbose", **unset, help="log what happens, and where an error was raised")
        self._common.add_argument("-q", "--quiet", **unset, help="nothing on stderr but errors")
        if " " in self.prog.removeprefix("python -m "):
            return
        self._common.add_argument("--version", action=_Version, help="print the version and exit")
        self._common.add_argument(
            "--print-completion", action=_Completion, choices=SHELLS, help="print a script that completes options"
        )

    def format_help(self) -> str:
        """The help text; what every command has stands at its end."""
        self._action_groups.sort(key=lambda group: group is self._common)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        print_line(self.prog, f"{message}; see {self.prog} --help")
        self.exit(2)


class Listed(argparse.Action):
    """A list with commas, as in A,B. of: makes an item of its text, or raises ValueError. among: the items there are.
    With nargs="+" separate arguments are taken too, as they once were."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        of: Callable[[str], Any] = str,
        among: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        super().__init__(option_strings, dest, **settings)
        self._of, self._among = of, among

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object) -> None:
        texts, name = [values] if isinstance(values, str) else values, self.option_strings[0]
        try:
            items = [self._of(item) for text in texts for item in text.split(",")]
        except ValueError:
            parser.error(f"argument {name}: {' '.join(texts)!r} is not a list like {self.metavar}")
        if unknown := [item for item in items if self._among and item not in self._among]:
            known = ", ".join(map(str, self._among))
            parser.error(f"argument {name}: {unknown[0]!r} is not one of {known}; give a list with commas")
        setattr(namespace, self.dest, items)


class _Version(argparse.Action):
    """Prints the version of the package and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('eagle-edge')}")
        parser.exit()


class _Completion(argparse.Action):
    """Prints a completion script for a shell and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: Any, *_: object) -> None:
        try:
            import shtab
        except ModuleNotFoundError:
            parser.error("completion needs 'shtab'; pip install 'eagle-edge[completion]'")
        script = shtab.complete(parser, shell=shell)
        with output_errors():
            print(script, flush=True)
        parser.exit()


def add_model_options(parser: argparse.ArgumentParser, backend: str | None = AUTO) -> None:
    """Add the bundle, and the options by which it is loaded."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of eagle-export, or the id of one on the hub")
    parser.add_argument("--backend", default=backend, metavar="ENGINE", help=f"{', '.join(BACKENDS)}, auto")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of prompt and output to make room for")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a forward pass (default: physical cores, or quota)"
    )
    parser.add_argument(
        "--draft-bundle", action="append", metavar="DIR", help="bundle of a smaller model that drafts; may be repeated"
    )
    parser.add_argument("--datastore", metavar="FILE", help="text or JSONL that is searched for n-gram matches too")
    parser.add_argument("--habits", metavar="FILE", help="keep what method recycling learns in this file")


def size(text: str) -> int:
    """Returns the bytes of a size such as 2GB, 700 MB or 1000000: units are powers of 1000, with "i" (2GiB) of 1024.
    Raises ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?)\s*(?:([kMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2GB")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those options, as `EagleModel.load` takes them."""
    names = ("bundle", "context", "threads", "draft_bundle", "datastore", "habits")
    return {"backend": args.backend or AUTO, **{name: getattr(args, name) for name in names}}


def print_line(program: str, message: str) -> None:
    """Print one line on stderr, with unprintable characters escaped and a long message cut."""
    print(f"{program}: {one_line(message)}\n", end="", file=sys.stderr)  # one write: the server's log may write too


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
    if sys.stdin is None:  # it was closed: what is opened next would be read in its place
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (as long as the process)
    if sys.stderr is None:  # it was closed, or the program has no console: print would take the standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows it as \\u20ac
            stream.reconfigure(encoding=_encoding(stream), errors="backslashreplace")
    args = parser.parse_args(argv)
    verbose, quiet = (getattr(args, name, False) for name in ("verbose", "quiet"))
    program = getattr(args, "program", parser.prog)  # a subcommand's
    try:
        with handled_interrupts(but_for), _printed_warnings(program), contextlib.ExitStack() as stack:
            if quiet:  # errors are printed after the block
                nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(nothing))
            if verbose:
                stack.enter_context(_logged())
            run(args)
    except EagleError as error:
        if verbose:
            traceback.print_exc()
        print_line(program, str(error))
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eagle_"):
            raise
        print_line(program, f"needs {error.name!r}; pip install 'eagle-edge[{extra}]'")
        return 2
    except MemoryError:
        print_line(program, "the memory is full; end other programs, or use a shorter text, context or tree")
        return 2
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print_line(program, f"{where}{error.strerror or error}; see that it can be read and written")
        return 2
    except Interrupted as stop:
        print_line(program, interrupted)
        return 128 + int(stop.args[0])
    except BaseException as error:
        if not is_panic(error):
            raise
        print_line(program, f"a library gave up ({error}); see that the input's files are whole")
        return 2
    return 0


def _encoding(stream: TextIO) -> str | None:
    """How a stream's text is to be encoded, None for what Python chose. On Windows that is the code page for files and
    pipes, which lacks most characters, and whoever reads them takes them for UTF-8."""
    chosen = sys.platform != "win32" or stream.isatty() or "PYTHONIOENCODING" in os.environ
    return None if chosen else "utf-8"


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """A reader of the output that ended, as in `| head`, ends the run silently; a full disk, and an output that was
    closed before the start, is an error."""
    if sys.stdout is None:
        raise RequestError("the output is closed; give it a place, such as > FILE")
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


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Within the block what the project and its libraries log is shown on stderr."""
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


class LoadingLine:
    """A line that shows the stages "warm" and "index" of loading, if they have several steps and `stream` is a terminal
    (loading.Progress)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in STAGES or not self._stream.isatty() or not (self._shown or 0 < done < total):
            return
        filled = WIDTH * done // total
        bar = f"{STAGES[stage]} [{'#' * filled}{'.' * (WIDTH - filled)}]"
        self._shown = 0 < done < total
        self._stream.write(CLEARED + bar if self._shown else CLEARED)
        self._stream.flush()
