"""Where `make` takes PyTorch from: prints the options of pip that choose its build.

    python jobs/torch_index.py URL

PyPI's build for Linux has CUDA, and installs 4.6 GB more than PyTorch's own build for CPUs. So on
a machine without a GPU of NVIDIA, the index at the URL is used, too, if it is reached: its version
is the later one. The Python of the machine runs this file, so it imports nothing of assay.
"""

from __future__ import annotations

import os
import sys
import urllib.request

REACHED_WITHIN_S = 5.0
GPU_DRIVER = "/proc/driver/nvidia"
WITH_CUDA = "about 6.8 GB in all where that has CUDA"


def options(index: str, *, driver: str = GPU_DRIVER) -> tuple[list[str], str]:
    """The options of pip, and what is installed, in words."""
    if os.path.exists(driver):
        return [], f"the build of PyTorch that PyPI has, for the GPU of this machine: {WITH_CUDA}"
    try:
        page = f"{index.rstrip('/')}/torch/"
        with urllib.request.urlopen(page, timeout=REACHED_WITHIN_S) as reply:
            reply.read(1)
    except (OSError, ValueError) as error:
        return [], f"the build of PyTorch that PyPI has: {WITH_CUDA} ({index}: {error})"
    return ["--extra-index-url", index], "PyTorch's build for CPUs: about 2.2 GB in all"


def main() -> int:
    """Print the options on standard output, and what is installed on standard error."""
    chosen, words = options(sys.argv[1])
    print(f"assay: installing {words}", file=sys.stderr)
    print(*chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
