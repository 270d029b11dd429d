from __future__ import annotations

import subprocess
import sys

import pytest

# Twenty blocks of 8 MB, one at a time: a kept heap is paged in once.
PROBE = """
import resource, sys, torch
from pipeline.inference.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.ones(1 << 21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 21), torch.ones(1 << 21)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_freed_memory_is_paged_in_once() -> None:
    faults = int(subprocess.check_output([sys.executable, "-c", PROBE, "keep"], text=True))
    pages_of_one_block = (1 << 23) // 4096
    assert faults < 4 * pages_of_one_block  # and not forty times
