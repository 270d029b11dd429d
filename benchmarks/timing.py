"""Time several methods in turns, in one process: their ratios hold on a noisy machine.

Entry points: `take_turns`, and `matmul_flops` for what the machine can do at most.
"""

from __future__ import annotations

import gc
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from pipeline.inference.memory import trim_malloc
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.rounded_products import RoundedLinear

_RATE_ROUNDS = 10


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
        return statistics.median(own / reference for own, reference in pairs)


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


def matmul_flops(model: LoadedModel) -> float:
    """The rate of the products of one of the model's layers, in FLOP a second.

    Each of its linear layers by the library and on the number of rows that are fastest here.
    """
    layers = getattr(model.decoder, "layers", None) or [model.decoder]
    products = [each for each in layers[0].modules() if isinstance(each, nn.Linear | RoundedLinear)]
    seconds: dict[tuple[int, int], float] = {}  # of one row, by inputs and outputs
    for product in products:
        shape = product.in_features, product.out_features
        if shape not in seconds:
            seconds[shape] = _seconds_of_row(product, model.device, model.network.dtype)
    shapes = [(product.in_features, product.out_features) for product in products]
    return sum(2 * i * o for i, o in shapes) / sum(map(seconds.__getitem__, shapes))


def _seconds_of_row(
    product: nn.Linear | RoundedLinear, device: torch.device, dtype: torch.dtype
) -> float:
    best = float("inf")
    # — a GPU computes 4,096 rows in a tenth of a millisecond: launching it would count, too
    for rows in (65_536,) if device.type == "cuda" else (512, 4_096):
        x = torch.randn(rows, product.in_features, device=device, dtype=dtype)
        ways: list[Callable[[], object]]
        if isinstance(product, RoundedLinear):
            ways = [partial(product.product, product.round_rows(x))]
        else:
            ways = [partial(nn.functional.linear, x, product.weight)]
            if device.type == "cpu":
                onednn = torch.ops.mkldnn._linear_pointwise
                ways.append(partial(onednn, x, product.weight, None, "none", [], ""))
        with torch.inference_mode():
            for way in ways * _RATE_ROUNDS:
                started = time.perf_counter()
                way()
                synchronise()
                best = min(best, (time.perf_counter() - started) / rows)
    return best


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


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
