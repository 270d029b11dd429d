"""What torch allocates. Entry point: `allocated_at_most`."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated_at_most(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = highest = 0
    for _, size_bytes in changes:
        held += size_bytes
        highest = max(highest, held)
    return highest
