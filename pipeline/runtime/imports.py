"""Settings of a process before it imports torch, and quicker imports.

Entry points: `wait_passively` for the environment, and `quick_imports` around imports.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

# Variables of GNU's and LLVM's OpenMP, one of which torch brings along.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}

# What transformers imports where it is installed, and a labelling process has no use for: scipy is
# for the losses of object detection, scikit-learn, which needs scipy, for assisted generation, and
# torchao for formats of weights that are not read here.
UNUSED = ("scipy", "sklearn", "torchao")


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep at barriers, unless the environment has a setting already.

    By default they spin, and take the core from the thread that they wait for if another process
    runs there: one other busy process on two cores makes an engine of two threads seven times
    slower, or two times if they sleep. The environment is read when torch is imported.
    """
    if PASSIVE.keys().isdisjoint(environment):
        environment.update(PASSIVE)


@contextmanager
def quick_imports(*unused: str) -> Iterator[None]:
    """Imports in this block take less time, and do not see the packages in `unused`.

    Garbage collection is off meanwhile: it would look at all the new objects again and again, of
    which nearly none is garbage. A package that is imported already stays visible.
    """
    hidden = [name for name in unused if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # — None: Python raises ModuleNotFoundError
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
        if collecting:
            gc.enable()
