"""Text of strangers, as people may look at it: nothing in it steers a terminal or a page.

Knows characters. Knows nothing of what they say.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def escape_controls(text: str) -> str:
    """The text with whatever does not print written out: control and direction marks, halves."""
    return "".join(char if char.isprintable() else _written_out(char) for char in text)


def truncate(text: str, chars: int) -> str:
    """The first `chars` characters with control characters escaped; "…" marks a cut."""
    return escape_controls(text if len(text) <= chars else text[: chars - 1].rstrip() + "…")


def _written_out(char: str) -> str:
    return " " if char in "\n\t\r" else char.encode("unicode_escape").decode()


logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 30.0


@contextmanager
def shown_progress(
    console: Console, rows: int, *, doing: str = "labelling", done: str = "labelled"
) -> Iterator[Callable[[int], None]]:
    """Gives what to call with the rows that are done since the last call."""
    if not console.is_terminal:
        yield logged_progress(rows, now_s=time.monotonic, done=done)
        return
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=rows)
        yield lambda more: bar.advance(task, more)


def logged_progress(
    rows: int, *, now_s: Callable[[], float], done: str = "labelled"
) -> Callable[[int], None]:
    """A line for the first rows, then at most one every 30 seconds, and one at the end."""
    started_s = now_s()
    so_far = 0
    last_s: float | None = None

    def advance(more: int) -> None:
        nonlocal so_far, last_s
        so_far += more
        if last_s is None or now_s() - last_s >= LOG_INTERVAL_S or so_far >= rows:
            last_s = now_s()
            rate = so_far / max(last_s - started_s, 1e-9)
            logger.info("%d of %d documents %s, %.2f a second", so_far, rows, done, rate)

    return advance


class JobLog:
    """Writes the pieces of a log as they come; with `results`, JSON lines apart from the rest.

    A job's two streams arrive as one. What `assay run --json` prints is a line of its own and no
    line of a log begins like it.
    """

    def __init__(self, out: TextIO, err: TextIO, *, results: bool) -> None:
        self._out, self._err, self._results = out, err, results
        self._begun = ""  # of a line whose end has not come yet

    def show(self, piece: str) -> None:
        """The next piece, which may end anywhere."""
        *whole, self._begun = (self._begun + piece).split("\n")
        for line in whole:
            self._write(line)

    def close(self) -> None:
        """The last line, if nothing ended it."""
        if self._begun:
            self._write(self._begun)
        self._begun = ""

    def _write(self, line: str) -> None:
        apart = self._results and not _is_result(line)
        print(line, file=self._err if apart else self._out, flush=True)


def _is_result(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def wants_stop(id: str, terminal: TextIO, answers: TextIO) -> bool:
    """Asks whether the job ends too; without a terminal, or with another Ctrl-C, it goes on."""
    if not answers.isatty():
        return False
    print(f"\nStop {id} on the cluster, too? [y/N] ", end="", file=terminal, flush=True)
    try:
        return answers.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False
