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
def shown_progress(console: Console, rows: int) -> Iterator[Callable[[int], None]]:
    """Gives what to call with the rows that are done since the last call."""
    if not console.is_terminal:
        yield logged_progress(rows, now_s=time.monotonic)
        return
    columns = (
        TextColumn("labelling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("labelling", total=rows)
        yield lambda done: bar.advance(task, done)


def logged_progress(rows: int, *, now_s: Callable[[], float]) -> Callable[[int], None]:
    """A line for the first rows, then at most one every 30 seconds, and one at the end."""
    started_s = now_s()
    done = 0
    last_s: float | None = None

    def advance(more: int) -> None:
        nonlocal done, last_s
        done += more
        if last_s is None or now_s() - last_s >= LOG_INTERVAL_S or done >= rows:
            last_s = now_s()
            rate = done / max(last_s - started_s, 1e-9)
            logger.info("%d of %d documents labelled, %.2f a second", done, rows, rate)

    return advance
