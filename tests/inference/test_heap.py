from __future__ import annotations

import subprocess
import sys

import pytest

# Forty blocks of 8 MB, two at a time: a kept heap is paged in once.
PROBE = """
import ctypes, resource, sys, torch
from pipeline.inference.memory import disable_malloc_trim
if sys.argv[1] == "keep":
    assert disable_malloc_trim()
else:
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # blocks mapped apart, as glibc does at first
torch.ones(1 << 21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 21), torch.ones(1 << 21)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_freed_memory_is_not_paged_in_anew_for_every_block() -> None:
    kept, given_back = (
        int(subprocess.check_output([sys.executable, "-c", PROBE, how], text=True))
        for how in ("keep", "give back")
    )
    assert kept < given_back / 2
