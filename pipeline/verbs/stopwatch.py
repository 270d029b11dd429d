"""Time and peak memory of methods that take turns, and the rate of plain matrix products.

Entry point: `take_turns`. Because the methods take turns, their ratios hold on a noisy machine.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from pipeline.inference.memory import trim_malloc


@dataclass(frozen=True, slots=True)
class Turn:
    """What one method runs in a round, on how many documents, and in how many rounds."""

    run: Callable[[], object]
    documents: int
    rounds: int
    warm_up: bool


@dataclass(frozen=True, slots=True)
class Timed:
    """One method's figures over all its rounds."""

    seconds: tuple[float, ...]  # per document, one for each round
    peak_bytes: int  # above the memory of the process before

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def times(self, other: Timed) -> float:
        """The ratio of these seconds to the other's: the median of paired rounds."""
        pairs = zip(self.seconds, other.seconds, strict=False)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def take_turns(turns: Mapping[str, Turn]) -> dict[str, Timed]:
    """Run every method once a round, one after the other, until its rounds are over."""
    for turn in turns.values():
        if turn.warm_up:
            turn.run()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    peaks = dict.fromkeys(turns, 0)
    for round_number in range(max(turn.rounds for turn in turns.values())):
        for name, turn in turns.items():
            if round_number >= turn.rounds:
                continue
            with _peak_memory() as peak:
                started = time.perf_counter()
                turn.run()
                synchronise()
                seconds[name].append((time.perf_counter() - started) / turn.documents)
            peaks[name] = max(peaks[name], peak())
    return {name: Timed(tuple(seconds[name]), peaks[name]) for name in turns}


def matmul_flops(hidden: int, device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of plain matrix products of a model's shapes, in FLOP a second."""
    rows, inner = 4_096, 4 * hidden
    left = torch.randn(rows, hidden, device=device, dtype=dtype)
    right = torch.randn(hidden, inner, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        torch.mm(left, right)
        synchronise()
        best = min(best, time.perf_counter() - started)
    return 2 * rows * hidden * inner / best


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that returns how far memory rose inside the block, in bytes."""
    gc.collect()
    trim_malloc()  # or the next method would seem to need none
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - held
        return
    process = psutil.Process()
    held = highest = process.memory_info().rss
    stopped = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stopped.wait(0.005):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: highest - held
    finally:
        stopped.set()
        watcher.join()
