"""Progress for people: lines on a terminal and in a notebook, and of a log elsewhere.

Entry points: `run_progress` for a run, `fit_progress` for a fit, `phase_lines` for a check.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from pipeline.report.console import console_on, escape_controls, is_notebook
from pipeline.runtime.conditions import DRAW
from pipeline.runtime.progress import Progress, Send

if TYPE_CHECKING:
    from pipeline.runtime.plan import Plan

logger = logging.getLogger(__name__)

REUSE = "equal texts are read once, and known answers are reused"

# Ticks come once a second, so the lines of a log are at most ten seconds apart.
LOG_INTERVAL_S = 9.0
# The rate is that of the last minute: workers come and go.
RATE_WINDOW_S = 60.0


class Pace:
    """The documents per second in the last minute, and the time left."""

    def __init__(self, start_s: float) -> None:
        # — when a count was first seen, the count, and the work done
        self._changes: deque[tuple[float, int, float]] = deque([(start_s, 0, 0.0)])
        self._now_s = start_s

    def add(self, now_s: float, progress: Progress) -> None:
        """Notes the counts at this time."""
        self._now_s = now_s
        counts = progress.answered, progress.work_done
        if counts != self._changes[-1][1:]:
            self._changes.append((now_s, *counts))
        while len(self._changes) > 2 and self._changes[1][0] < now_s - RATE_WINDOW_S:
            self._changes.popleft()

    @property
    def rate(self) -> float | None:
        """Documents a second; None before the first of them, and in the first half second."""
        (start_s, start, _), (_, done, _) = self._changes[0], self._changes[-1]
        elapsed_s = self._now_s - start_s
        return (done - start) / elapsed_s if done > start and elapsed_s >= 0.5 else None

    def left_s(self, documents: int) -> float | None:
        """Seconds until all documents are done; None where there is no rate."""
        (start_s, _, start), (_, _, work_done) = self._changes[0], self._changes[-1]
        if self.rate is None or work_done <= start:
            return None
        return (documents - work_done) * (self._now_s - start_s) / (work_done - start)

    def figures(self, progress: Progress) -> tuple[str, ...]:
        """The rate, the time left, and the share of failed documents, where they are known."""
        texts: list[str] = []
        if self.rate is not None:
            texts.append(f"{self.rate:.1f}/s" if self.rate >= 1 else f"{60 * self.rate:.1f}/min")
            left_s = self.left_s(progress.documents)
            texts += [f"{timedelta(seconds=round(left_s))} left"] if left_s else []
        if progress.failed:
            texts.append(f"{progress.failed / max(progress.answered, 1):.2%} failed")
        return tuple(texts)


class Lines:
    """Shows each new phase, the first documents, then a line every ten seconds, and the last."""

    def __init__(
        self, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._now_s = say, now_s
        self._last: Progress | None = None
        self._began_s = self._logged_s = self._tick_s = now_s()
        self._pace = Pace(now_s())

    def __call__(self, progress: Progress) -> None:
        now_s, last = self._now_s(), self._last
        self._last = shown = progress if progress.counts else Progress(progress.phase)
        if last is None or shown.phase != last.phase:
            self._began_s = self._logged_s = now_s
            self._pace = Pace(self._tick_s)  # — the phase began after the last tick
            self._say(shown.phase)
            last = Progress(shown.phase)
        self._tick_s = now_s
        self._pace.add(now_s, shown)
        done, before = shown.answered, last.answered
        news = done > 0 and (before == 0 or done >= shown.documents > before)
        if news or now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            self._say(self._line(shown, now_s))

    def _line(self, shown: Progress, now_s: float) -> str:
        if not shown.documents:
            return f"{shown.phase}, {now_s - self._began_s:.0f} s so far"
        count = f"{shown.answered:,} of {shown.documents:,} documents {shown.verb}"
        return ", ".join((count, *self._pace.figures(shown)))


@contextmanager
def _log_to(stream: Any, *, instead_of: Any) -> Iterator[None]:
    """The log goes to this stream."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is instead_of
    ]
    before = [handler.setStream(stream) for handler in handlers]
    try:
        yield
    finally:
        for handler, own in zip(handlers, before, strict=True):
            handler.setStream(own)


@contextmanager
def _own_descriptor(stream: TextIO) -> Iterator[TextIO]:
    """The stream on a copy of its file descriptor: the original is held back while Ray starts.

    What a notebook shows goes through no descriptor.
    """
    if is_notebook(stream):
        yield stream
        return
    try:
        descriptor = os.dup(stream.fileno())
    except OSError:  # it is not a file
        yield stream
        return
    with os.fdopen(
        descriptor, "w", buffering=1, encoding=stream.encoding, errors=stream.errors
    ) as own:
        yield own


@contextmanager
def phase_lines(_stream: TextIO) -> Iterator[Send]:
    """Gives a function that logs each phase, also on a terminal: the Hub's client draws bars."""
    show = Lines(partial(logger.info, "%s"))
    show(Progress("starting"))
    yield lambda report: show(Progress(report.phase))


@contextmanager
def fit_progress(stream: TextIO) -> Iterator[Callable[[Progress], None]]:
    """Gives a function that shows the progress of a fit on the stream."""
    show = Lines(partial(_print, console_on(stream)))
    show(Progress("starting"))
    yield show


@contextmanager
def run_progress(stream: TextIO) -> Iterator[Callable[[Progress], None]]:
    """Gives a function that shows a run's progress on the stream.

    After Ctrl-C the message of the KeyboardInterrupt is `kept_line`.
    """
    latest: Progress | None = None  # with a plan
    last_line = ""  # of the plan
    with ExitStack() as stack:
        own = stack.enter_context(_own_descriptor(stream))
        stack.enter_context(_log_to(own, instead_of=stream))
        say = partial(_print, console_on(own))
        show = Lines(say)
        show(Progress("starting"))

        def announce(progress: Progress) -> None:
            nonlocal latest, last_line
            if (plan := progress.plan) is not None:
                # — of a large job, a line takes long: once for each plan
                is_new = latest is None or latest.plan is not plan
                if is_new and (line := work_line(plan)) != last_line:
                    say(line)
                    last_line = line
                latest = progress
            show(progress)

        try:
            yield announce
        except KeyboardInterrupt:
            raise KeyboardInterrupt(kept_line(latest)) from None


def _print(console: Console, line: str) -> None:
    if console.is_terminal:
        console.print(escape_controls(line))
    else:
        logger.info("%s", line)


def shards(number: int) -> str:
    """The number with its word: `1 shard`, `2 shards`."""
    return f"{number:,} shard{'s' * (number != 1)}"


def work_line(planned: Plan) -> str:
    """How many documents will be labelled, and how many of those the model reads at most."""
    if planned.work_items and not any(work.tasks for work in planned.work_items):
        new = f"{planned.missing_rows:,} new documents to read, in {shards(planned.missing_shards)}"
        return f"{new}: texts with answers are not labelled again"
    if not planned.work_items:
        return f"nothing to do: {planned.rows:,} documents in {shards(len(planned.shards))}"
    line = (
        f"{planned.missing_rows:,} of {planned.rows:,} documents to label, in "
        f"{planned.missing_shards:,} of {len(planned.shards):,} shards"
    )
    if planned.limit is not None:
        drawn = planned.limit.startswith(DRAW)  # — for a cascade, by `certify`
        only = "a random sample of them, for a cascade," if drawn else f"those with {planned.limit}"
        line += f"; only {only} are labelled"
    if not planned.rows_for_model:
        return f"{line}; the model reads none of them"
    if planned.reuses:
        return f"{line}; the model reads at most {planned.rows_for_model:,} of them: {REUSE}"
    return line


def kept_line(progress: Progress | None) -> str:
    """The finished work that the next run reuses if this run is stopped now."""
    if progress is None or progress.plan is None or not progress.plan.work_items:
        return "nothing was lost"
    kept = f"at least {progress.committed:,} of {progress.documents:,} documents are kept"
    lost = progress.answered - progress.committed if progress.verb == "labelled" else 0
    return f"{kept}; {lost:,} in unfinished shards are asked again" if lost > 0 else kept
