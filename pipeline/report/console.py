"""What all reports share: consoles, safe text, tables, the log of a cluster job.

A report is a function that yields its parts: tables, names with values, and lines. `printed` makes
it print them, with each control character escaped: texts of others (documents, labels, paths)
cannot control a terminal.
"""

from __future__ import annotations

import io
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO, TypeVar

from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # imports scipy
    from pipeline.evaluation.intervals import Figure

PIPE_COLUMNS, _LINES = 120, 25  # of what is not a terminal
_LEAST_COLUMNS = 20
_LEAST_TEXT = 8  # columns of a text in a table


class PipeConsole(Console):
    """A console that leaves a closed pipe to the command."""

    def on_broken_pipe(self) -> None:
        raise


def is_notebook(stream: TextIO) -> bool:
    """Whether the stream is shown below a cell of a notebook."""
    return type(stream).__module__.startswith("ipykernel")


def console_on(stream: TextIO) -> Console:
    """A console that prints text as it is.

    Tables are as wide as the terminal, or have COLUMNS columns. Lines have no width: a command or a
    path is in one piece. A cell of a notebook shows lines that are written over, and colours, as a
    terminal does.
    """
    shown = stream.isatty() or is_notebook(stream)
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() else 0
    usual = None if shown else PIPE_COLUMNS
    return PipeConsole(
        file=stream,
        force_terminal=True if is_notebook(stream) else None,
        force_jupyter=False,
        width=max(_LEAST_COLUMNS, asked) if asked else usual,
        # — without a height, rich takes 80 columns where FORCE_COLOR is set and TERM is dumb
        height=None if shown else _LINES,
        highlight=False,
        soft_wrap=True,
        # Labels, names and paths may look like markup or like the name of an emoji.
        markup=False,
        emoji=False,
    )


def json_value(result: object) -> Any:
    """The result as JSON values: fields and computed fields by name, and null for NaN."""
    # — not `dump_json`, which refuses a path with other bytes than UTF-8
    values = TypeAdapter(type(result)).dump_python(result, mode="json")
    return json.loads(json.dumps(values), parse_constant=lambda _: None)


def escape_controls(text: str) -> str:
    """The text with each unprintable character escaped: controls, direction marks, surrogates."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if char in "\n\t\r" or unicodedata.category(char) == "Zs":
        return " "
    # — the joiners of Persian, of Indic scripts and of emoji
    return char if char in "\u200c\u200d" else char.encode("unicode_escape").decode()


def truncate(text: str, chars: int) -> str:
    """The first `chars` characters with controls escaped; "…" marks a cut."""
    return escape_controls(text if len(text) <= chars else text[: chars - 1].rstrip() + "…")


def number(value: float | None) -> str:
    """Three decimals; "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """The time in words."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))  # 2 days, 3:04:05


def interval(figure: Figure) -> str:
    """A figure with its 95 % interval, if it has one: `0.912 (0.884 to 0.935)`."""
    if figure.value is None or figure.low is None:
        return number(figure.value)
    return f"{number(figure.value)} ({number(figure.low)} to {number(figure.high)})"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text, for a terminal or a page: columns of text, then columns of numbers."""

    title: str
    names: Sequence[str]  # of the columns
    rows: Iterable[Sequence[str]]
    texts: int = 1  # number of columns of text
    wrap: bool = False  # whether the names of the columns of numbers may be long

    def table(self) -> Table:
        """The table for a terminal, with controls escaped."""
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),  # — narrow, for a terminal of 80 columns
        )
        rows = [[*map(_cell, row)] for row in self.rows]
        for index, name in enumerate(self.names):
            number = index >= self.texts
            cells = [row[index].plain for row in rows if index < len(row)]
            cells += [] if self.wrap else [name]
            longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
            table.add_column(
                _cell(name),
                justify="right" if number else "left",
                overflow="fold",
                no_wrap=number and not self.wrap and not any(" " in cell for cell in cells),
                # — on a narrow terminal, rich would cut off the last digits of a number
                min_width=longest if number else min(longest, _LEAST_TEXT),
            )
        for row in rows:
            table.add_row(*row)
        return table


def _cell(text: str) -> Text:
    """Text in which nothing is markup."""
    return Text(escape_controls(text))


class Prose(str):
    """A line that a terminal wraps between words. Elsewhere it stays one line, to be searched."""


Facts = Mapping[str, str] | Sequence[tuple[str, str]]  # names, which may occur again, and values
Part = Facts | Grid | str
Result = TypeVar("Result")
Options = ParamSpec("Options")


def printed(
    report: Callable[Concatenate[Result, Options], Iterable[Part]],
) -> Callable[Concatenate[Result, Console, Options], None]:
    """The report as a function that prints its parts on a console."""

    def show(
        result: Result, console: Console, /, *args: Options.args, **kwargs: Options.kwargs
    ) -> None:
        print_parts(report(result, *args, **kwargs), console)

    return show


def warnings(doubts: Iterable[str]) -> Iterator[Part]:
    """Each doubt below an empty line."""
    for doubt in doubts:
        yield from ("", Prose(f"warning: {doubt}"))


def print_parts(parts: Iterable[Part], console: Console) -> None:
    """Prints tables, names with values, and lines, with controls escaped."""
    for part in parts:
        if isinstance(part, str):
            wraps = isinstance(part, Prose) and console.is_terminal
            console.print(_cell(part), soft_wrap=not wraps)
        elif isinstance(part, Grid):
            if part.title:
                console.print(Text(escape_controls(part.title), "italic"), soft_wrap=False)
            table = part.table()
            least = sum(2 + (column.min_width or 0) for column in table.columns) - 2
            # — lines that are too long go on in the next line of the terminal
            table.width = least if least > console.width else None
            console.print(table)
        else:
            _print_facts(part, console)


def _print_facts(facts: Facts, console: Console) -> None:
    """Names and values in two columns. A value is wrapped between words, never inside a path."""
    rows = facts.items() if isinstance(facts, Mapping) else facts
    escaped = [(escape_controls(name), escape_controls(value)) for name, value in rows]
    width = 2 + max((cell_len(name) for name, _ in escaped), default=0)
    room = max(_LEAST_COLUMNS, console.width - width)
    for name, value in escaped:
        lines = wrap(value, room, break_long_words=False, break_on_hyphens=False)
        blank = " " * (width - cell_len(name))
        text = f"\n{' ' * width}".join(lines)
        console.print(Text.assemble((name, "bold"), blank, text))


class WholeLines(io.TextIOBase):
    """A stream that calls a function with each line when its end is written, or at the close."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._begun = ""  # the start of a line

    def write(self, text: str) -> int:
        *lines, self._begun = f"{self._begun}{text}".split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def close(self) -> None:
        if self._begun:
            self.write("\n")
        super().close()


def job_log(out: TextIO, err: TextIO, *, results: bool) -> WholeLines:
    """A stream that prints the log of a cluster job.

    The two streams of a job arrive as one. With `results`, lines that are a JSON object, as `assay
    run --json` prints one, go to `out`, and all others to `err`. No log line is a JSON object.
    """

    def show(line: str) -> None:
        stream = err if results else out
        if line.startswith("{"):
            with suppress(ValueError):
                json.loads(line)
                stream = out
        print(escape_controls(line), file=stream, flush=True)

    return WholeLines(show)


def wants_stop(id: str, terminal: TextIO, answers: TextIO) -> bool:
    """Whether the user stops the job; False without a terminal, or after a second Ctrl-C."""
    if not answers.isatty():
        return False
    print(f"\nStop {id} on the cluster too? [y/N] ", end="", file=terminal, flush=True)
    try:
        return answers.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False
