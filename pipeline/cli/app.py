"""How a command line is parsed, run and reported.

Entry points: `new_app` and `call`; and for the functions of verbs `spec_in`, `shown_by`,
`print_result` and `say`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, redirect_stdout, suppress
from enum import IntEnum
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, get_args, get_origin

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from pipeline.cli.parameters import flag_of
from pipeline.errors import AssayError, Problem, SpecError
from pipeline.report.console import (
    PipeConsole,
    WholeLines,
    console_on,
    escape_controls,
    json_value,
)
from pipeline.runtime.imports import wait_passively
from pipeline.runtime.limits import ULIMITS, check_ulimits

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.spec.schema import JobSpec

Announce = TypeVar("Announce", bound=Callable[..., Any])
Result = TypeVar("Result")

# Whoever presses Ctrl-C twice within this time wants one end, not two.
SIGNALS_APART_S = 3.0


class Exit(IntEnum):
    """Exit codes; those of errors are in `pipeline.errors`."""

    COMPLETE = 0
    FAILED = 1
    WRONG_ARGUMENT = 2
    INCOMPLETE = 3
    CLOSED_PIPE = 128 + signal.SIGPIPE  # what a shell reports of a program that the signal ends


def spec_in(file: str) -> AbstractContextManager[JobSpec]:
    """The spec in this file; a SpecError of the block names the line of the file."""
    from pipeline.spec.parse import opened

    return opened(file)


@contextmanager
def shown_by(progress: Callable[[TextIO], AbstractContextManager[Announce]]) -> Iterator[Announce]:
    """The function to which a verb announces its progress, which is written to standard error.

    Importing torch or Ray takes seconds, so a verb does it in the block.
    """
    # — Ray reports dead workers on standard output, where the result is printed
    reports = ray_reports(sys.stderr)
    with closing(reports), redirect_stdout(reports), progress(sys.stderr) as announce:
        yield announce


def print_result(
    result: Result,
    show: Callable[[Result, Console], None],
    *,
    as_json: bool,
    code: int = Exit.COMPLETE,
) -> int:
    """Print the result as one JSON value, or as tables; returns the exit code."""
    if as_json:
        print(json.dumps(json_value(result)))
    else:
        show(result, console_on(sys.stdout))
    return code


def ray_reports(stream: TextIO) -> WholeLines:
    """Standard output while Ray runs: Ray's reports of workers that died go to the stream.

    Reports of workers that Ray Data itself killed, as after Ctrl-C, are left out: they did not
    fail.
    """

    def show(line: str) -> None:
        if "killed by `ray.kill`" not in line:
            print(line, file=stream, flush=True)

    return WholeLines(show)


def new_app(name: str, help: str) -> App:
    """A command line with this project's conventions; `call` runs it."""
    return App(
        name,
        help=help,
        group_commands=Group("About this command", sort_key=9),
        version=lambda: version("corpus-assay"),
        default_parameter=Parameter(
            negative=(),  # a flag has no --no-flag
            allow_repeating=True,  # the last value holds
            show_default=_default_text,
        ),
        result_action="return_value",
        console=PipeConsole(),
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )


def _default_text(value: object) -> str | None:
    return None if value is None or value is False or value == () else str(value)


def call(command: App, arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; print errors; return the exit code."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    _configure_process()
    try:
        try:
            check_ulimits(ULIMITS)
            with _interrupted_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                result = command(tokens)
            sys.stdout.flush()
        except CycloptsError as error:
            raise SpecError([_problem(error, command)]) from None
    except AssayError as error:
        name = "" if isinstance(error, SpecError) else "assay: "
        say(f"{name}{_shown(error)}")
        return error.exit_code
    except OSError:
        if (broken := _error_of(sys.stdout)) is None:
            raise  # — of another file, pipe or socket
        # — Python flushes standard output once more, when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(broken, BrokenPipeError):
            return Exit.CLOSED_PIPE
        say(f"assay: standard output: cannot be written: {broken.strerror}")
        return Exit.FAILED
    except KeyboardInterrupt as stop:
        kept = f"{stop}; " if str(stop) else ""
        again = shlex.join([*command.name, *tokens])
        say(escape_controls(f"assay: stopped; {kept}to continue, run: {again}"))
        return Exit.INCOMPLETE
    except MemoryError:
        say("assay: there is too little memory; free some, or raise `ulimit -v`")
        return Exit.FAILED
    if not tokens and command.default_command is None:
        return Exit.WRONG_ARGUMENT  # the help was printed, because no verb was named
    return result if isinstance(result, int) else Exit.COMPLETE


def say(text: str) -> None:
    """Prints a line on standard error; one that cannot be written does not change the result."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def _error_of(stream: TextIO) -> OSError | None:
    """Why the stream cannot be written: its reader has ended, as `head` does, or a disk is full."""
    try:
        stream.write("\n")  # — an unbuffered stream does not keep its error
        stream.flush()
    except OSError as error:
        return error
    return None


def _shown(error: AssayError) -> str:
    """The message with flags in place of the library's names of options.

    Control characters are escaped: names of files and columns may have some.
    """
    parts = error.problems if isinstance(error, SpecError) else error.args
    problems = [part.renamed(flag_of) for part in parts if isinstance(part, Problem)]
    lines = problems or str(error).split("\n")
    return "\n".join(escape_controls(str(line)) for line in lines)


class _LogFormatter(logging.Formatter):
    """Lines of the log with controls escaped; an exception keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(map(escape_controls, super().formatException(exc_info).split("\n")))


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """In this block these signals act as Ctrl-C: a scheduler sends SIGTERM, ssh sends SIGHUP.

    More signals in the next seconds do nothing, so that the command ends in order; after one, they
    are ignored until the process ends. A signal that is ignored, as SIGHUP is under nohup, stays
    ignored. Only the main thread may set handlers.
    """
    last = -math.inf

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > SIGNALS_APART_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in signals if is_main}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    handled = {number: handler for number, handler in before.items() if handler in usual}
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler if last == -math.inf else signal.SIG_IGN)


def _configure_process() -> None:
    # — in this order: a new file gets the lowest free number, which is that of a closed stream.
    # Writing to a closed output still fails, so that no result is lost silently
    streams = (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    )
    for name, flags, mode in streams:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # — as standard error: it may be ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # These log where they found credentials.
    for name in ("botocore", "aiobotocore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs the traceback of each error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The bars of other packages, such as transformers' for GGUF: assay shows the phases itself.
    os.environ.setdefault("TQDM_DISABLE", "1")
    wait_passively(os.environ)


def _problem(error: CycloptsError, command: App) -> Problem:
    verb = " ".join((*command.name, *(error.command_chain or ())))
    place = error.argument.name if error.argument else verb
    help = f"`{verb} --help` shows the usage"
    similar = re.search(r'Did you mean "?([^"?]+)"?\?', str(error))
    instead = f"write {similar[1]}" if similar else help
    match error:
        case UnknownOptionError():
            option = error.token.keyword or error.token.value
            return Problem(option, f"no such option; {instead}", option)
        case UnknownCommandError():
            first, *_ = error.unused_tokens or ("",)
            return Problem("VERB", f"no such verb; {instead}", first)
        case MissingArgumentError():
            return Problem(place, f"missing; add it: {help}")
        case UnusedCliTokensError():
            return Problem(verb, f"takes fewer arguments; {help}", error.unused_tokens)
        case CoercionError():
            value = [token.value for token in error.argument.tokens] if error.argument else None
            kinds: dict[object, str] = {float: "write a number", bool: "write no value"}
            fix = kinds.get(error.target_type, " ".join(str(error.msg or error).split()))
            if get_origin(error.target_type) is Literal:
                fix = f"write one of {', '.join(get_args(error.target_type))}"
            return Problem(place, fix, error.token.value if error.token else value)
    return Problem(place, " ".join(str(error).split()), error.unused_tokens)
