"""What all commands share: one-line errors and warnings, exit statuses, and a clean end when told to stop."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TextIO

from eagle_runtime.errors import EagleError, EagleWarning, is_panic
from eagle_runtime.threads.interrupts import Interrupted, handled_interrupts

LONGEST = 1000  # characters of a message


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as all other errors are: in one line."""

    def error(self, message: str) -> NoReturn:
        tell(self.prog, f"{message}; see {self.prog} --help")
        self.exit(2)


def tell(program: str, message: str) -> None:
    """One line on stderr, fit for any terminal: what does not print is escaped, what is too long is cut."""
    print(f"{program}: {one_line(message)}", file=sys.stderr)


def one_line(message: str) -> str:
    """A message without control characters, halves of characters or line ends, and of at most LONGEST characters of
    what was said: its beginning, and its end, where it says what to do."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST * 3 // 4]} ... {message[-LONGEST // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in message)


def run_command(
    parser: Parser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], None],
    extra: str,
    interrupted: str,
) -> int:
    """Parse and run; returns the exit status: 0, 2 after an error that is the input's or the machine's, 130 or 143 when
    stopped.

    extra: of this distribution, that brings what `run` imports. interrupted: what to say after a stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding shows what it lacks as \\u20ac
            stream.reconfigure(errors="backslashreplace")
    args = parser.parse_args(argv)
    try:
        with handled_interrupts(), _warnings_told(parser.prog):
            run(args)
    except EagleError as error:
        tell(parser.prog, str(error))
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eagle_"):
            raise
        tell(parser.prog, f"needs {error.name!r}; pip install 'eagle-edge[{extra}]'")
        return 2
    except MemoryError:
        tell(parser.prog, "the memory is full; end other programs, or ask for less (a shorter text, context or tree)")
        return 2
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        tell(parser.prog, f"{where}{error.strerror or error}; see that it can be read and written")
        return 2
    except Interrupted as stop:
        tell(parser.prog, interrupted)
        return 128 + int(stop.args[0])
    except BaseException as error:
        if not is_panic(error):
            raise
        tell(parser.prog, f"a library gave up ({error}); see that the input's files are whole")
        return 2
    return 0


@contextlib.contextmanager
def _warnings_told(program: str) -> Iterator[None]:
    """Within the block the project's own warnings are lines like errors; others look as they always do."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", EagleWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, EagleWarning):
                tell(program, f"warning: {message}")
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
