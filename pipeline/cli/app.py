"""How a command line is parsed, run and reported. Entry points: `new_app`, `call`, `Verb`.

`VERBS` names what each verb of `assay` calls. It is imported when the verb runs, so that `assay
--help` loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from types import FrameType
from typing import Any, Literal, TextIO, get_args, get_origin

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from pipeline.cache import cache_dir
from pipeline.errors import AssayError, Problem, SpecError
from pipeline.report.console import escape_controls
from pipeline.runtime.imports import quick_imports, wait_passively

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_WRONG_ARGUMENT = 2
EXIT_INCOMPLETE = 3


@dataclass(frozen=True, slots=True)
class Verb:
    """What a verb calls, as `module:function` below `pipeline`, imported when the verb runs."""

    recipe: str  # (spec, ..., cache_dir=...) -> result
    report: str  # `module:NAME`, with show_NAME(result, console) and NAME_json(result)
    exit_code: Callable[[Any], int] = lambda _result: EXIT_COMPLETE
    progress: str | None = None  # (stream) -> context manager of what the recipe announces to
    first: str | None = None  # (spec, cache_dir) -> None: checks before torch is imported

    def carry_out(self, spec_file: str, *options: Any, as_json: bool, **keywords: Any) -> int:
        """Call the recipe, print its result, and return the exit code."""
        return self.print(self.result(spec_file, *options, **keywords), as_json=as_json)

    def result(self, spec_file: str, *options: Any, **keywords: Any) -> Any:
        """What the recipe returns; its progress goes to standard error."""
        from pipeline.spec.parse import load_spec, located

        spec = load_spec(spec_file)
        with ExitStack() as stack:
            stack.enter_context(located(spec_file))
            if self.first:
                _function(self.first)(spec, cache_dir())
            if self.progress:
                # — Ray reports workers that died there, but it is the place of the result
                reports = stack.enter_context(closing(_RayReports(sys.stderr)))
                stack.enter_context(redirect_stdout(reports))
                progress = _function(self.progress)
                keywords["announce"] = stack.enter_context(progress(sys.stderr))
            recipe = _function(self.recipe)  # — after the first sign of life: to import ray is slow
            return recipe(spec, *options, cache_dir=cache_dir(), **keywords)

    def print(self, result: Any, *, as_json: bool, **keywords: Any) -> int:
        """Print the result as one JSON value, or as tables with the keywords; the exit code."""
        if as_json:
            print(json.dumps(self.json(result)))
        else:
            from pipeline.report.console import console_on

            show = _function(self.report.replace(":", ":show_"))
            show(result, console_on(sys.stdout), **keywords)
        return self.exit_code(result)

    def json(self, result: Any) -> Any:
        """The result as JSON values."""
        return _function(f"{self.report}_json")(result)


class _RayReports(io.TextIOBase):
    """Standard output while Ray runs: Ray's reports of workers that died go to the stream.

    A worker that Ray Data itself ends, as after Ctrl-C, has not died. Ray reports its tasks as
    failed where the report is faster than the end of the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""  # its beginning

    def write(self, text: str) -> int:
        *lines, self._line = f"{self._line}{text}".split("\n")
        for line in lines:
            if "killed by `ray.kill`" not in line:
                self._stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """Writes what is complete; `close` writes an unfinished line, too."""
        self._stream.flush()

    def close(self) -> None:
        if self._line:
            self.write("\n")
        super().close()


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    with quick_imports("torchao"):  # — transformers imports it where it is, and it prints warnings
        imported = importlib.import_module(f"pipeline.{module}")
    called: Callable[..., Any] = getattr(imported, function)
    return called


def _unless(attribute: str, code: int) -> Callable[[Any], int]:
    return lambda result: EXIT_COMPLETE if getattr(result, attribute) else code


_of_filter = _unless("complete", EXIT_INCOMPLETE)
PHASES = "report.progress:phase_progress"
VERBS = {
    "init": Verb("verbs.init:init", "report.init:proposal"),
    "pull": Verb("verbs.pull:pull", "report.init:pulled", progress="report.progress:phase_lines"),
    "run": Verb(
        "runtime.run:run",
        "report.run:summary",
        _unless("complete", EXIT_INCOMPLETE),
        "report.progress:run_progress",
    ),
    "dry run": Verb("runtime.dry_run:dry_run", "report.run:plan"),
    "check": Verb(
        "verbs.check:check",
        "report.check:findings",
        _unless("exact", EXIT_FAILED),
        progress=PHASES,
        first="runtime.job:check_places",
    ),
    "plan": Verb("verbs.plan:estimate", "report.run:estimate", progress=PHASES),
    "status": Verb("verbs.status:status", "report.run:status"),
    "bench": Verb("verbs.bench:bench", "report.check:bench"),
    "eval": Verb(
        "verbs.evaluate:evaluate",
        "report.evaluation_table:evaluation",
        _unless("passed", EXIT_FAILED),
    ),
    "fit": Verb(
        "verbs.fit:fit_readouts", "report.fit:fit", progress="report.progress:fit_progress"
    ),
    "calibrate": Verb("verbs.calibrate:calibrate", "report.fit:calibrated"),
    "cascade": Verb(
        "verbs.cascade:choose_thresholds",
        "report.fit:thresholds",
        progress="report.progress:run_progress",
    ),
    "show": Verb("verbs.show:show", "report.rows:examples"),
    "export": Verb(
        "verbs.export:export", "report.rows:exported", _unless("complete", EXIT_INCOMPLETE)
    ),
    "filter": Verb("filters.run:filter_corpus", "report.filters:filtered", _of_filter),
    "filter dry run": Verb(
        "filters.dry_run:preview",
        "report.filters:filter_preview",
        lambda preview: EXIT_FAILED if preview.filter.stops else _of_filter(preview),
    ),
    "audit": Verb("verbs.audit:audit", "report.audit:audited"),
    "audit sample": Verb("verbs.audit_sample:draw_sample", "report.audit:drawn_sample"),
    "report": Verb("verbs.corpus_report:corpus_report", "report.corpus_page:corpus_report"),
    "diff": Verb("integrity.diff:compare", "report.drift:comparison"),
    "verify": Verb(
        "integrity.verify:verify_output",
        "report.maintenance:verified",
        _unless("intact", EXIT_FAILED),
    ),
    "gc": Verb("integrity.gc:collect_garbage", "report.maintenance:gc"),
}


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
            with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
                result = command(tokens)
        except CycloptsError as error:
            raise SpecError([_problem(error, command)]) from None
    except AssayError as error:
        name = "" if isinstance(error, SpecError) else "assay: "
        print(f"{name}{_shown(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        kept = f"{stop}; " if str(stop) else ""
        again = shlex.join([*command.name, *tokens])
        line = f"assay: stopped; {kept}to continue, run: {again}"
        print(escape_controls(line), file=sys.stderr)
        return EXIT_INCOMPLETE
    if not tokens and command.default_command is None:
        return EXIT_WRONG_ARGUMENT  # the help was printed, because no verb was named
    return result if isinstance(result, int) else EXIT_COMPLETE


def _shown(error: AssayError) -> str:
    """The message with controls escaped; it may have names of files and columns of strangers."""
    lines = error.problems if isinstance(error, SpecError) else str(error).split("\n")
    return "\n".join(escape_controls(str(line)) for line in lines)


class _LogFormatter(logging.Formatter):
    """Lines of the log with controls escaped; an exception keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(map(escape_controls, super().formatException(exc_info).split("\n")))


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """In this block these signals do what Ctrl-C does: a scheduler sends SIGTERM, ssh SIGHUP.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored. Only the main thread may set
    handlers.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in signals if is_main}
    handled = [each for each, handler in before.items() if handler == signal.SIG_DFL]
    for each in handled:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


def _configure_process() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # These log where they found credentials.
    for name in ("botocore", "aiobotocore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The bars of other packages, such as transformers' for GGUF: assay shows the phases itself.
    os.environ.setdefault("TQDM_DISABLE", "1")
    wait_passively(os.environ)


# Options of earlier versions, with what to write instead.
_REMOVED = {
    ("assay filter", "--by"): "assay report --by counts kept and dropped documents by group",
    ("assay diff", "--by"): "join the rows of open_labels(snapshot=A) and (snapshot=B) by file",
    ("assay fit", "--rows"): "fit to parts of the gold, and compare them with `assay eval`",
    ("assay eval", "--html"): "assay report --gold writes this page",
}


def _problem(error: CycloptsError, command: App) -> Problem:
    verb = " ".join((*command.name, *(error.command_chain or ())))
    place = error.argument.name if error.argument else verb
    help = f"`{verb} --help` shows the usage"
    similar = re.search(r'Did you mean "?([^"?]+)"?\?', str(error))
    instead = f"write {similar[1]}" if similar else help
    match error:
        case UnknownOptionError():
            option = error.token.keyword or error.token.value
            instead = _REMOVED.get((verb, option), instead)
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
