"""Progress of a run: a bar on a terminal, a line every 30 seconds in a log.

Knows rows and seconds. Knows nothing of what a row is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
