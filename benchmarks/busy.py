"""The share of the time in which a GPU works, as NVML samples it. Entry point: `busy_samples`.

NVML needs the package nvidia-ml-py. On a CPU it is the share of all processors that is in use.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from benchmarks.parts import named
from pipeline.verbs.bench import synchronise


def busy_while(
    ask: Callable[[], object], device: str, window_s: float, settle_s: float
) -> float | None:
    """The busy share while the call is repeated for a window; None without samples.

    Samples before `settle_s` seconds of the window may be of what was before it, and do not count.
    """
    with busy_samples(device) as samples:
        start_s = time.monotonic()
        while time.monotonic() - start_s < window_s:
            ask()
            synchronise()
    return mean_between(samples, start_s + settle_s, time.monotonic())


Samples = list[tuple[float, float]]  # time in seconds, busy share


@contextmanager
def busy_samples(device: str) -> Iterator[Samples]:
    """Samples of the device's busy share, added while the block runs; none without NVML."""

    def busy_share() -> float:
        return (torch.cuda.utilization() if device == "cuda" else psutil.cpu_percent()) / 100

    samples: Samples = []
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(0.05):
            samples.append((time.monotonic(), busy_share()))

    try:
        busy_share()
    except Exception as error:  # without a package, without permission, in a container
        print(f"no busy share: {named(error)}", file=sys.stderr)
        yield samples
        return
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        stopped.set()
        sampler.join()


def mean_between(samples: Samples, start_s: float, end_s: float) -> float | None:
    """The mean of the samples in this time; None without any."""
    inside = [share for at_s, share in samples if start_s <= at_s <= end_s]
    return statistics.fmean(inside) if inside else None
