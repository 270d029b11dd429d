"""How the threads of a process wait for each other. Entry point: `wait_passively`."""

from __future__ import annotations

from collections.abc import MutableMapping

# Variables of GNU's and LLVM's OpenMP, one of which torch brings along.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep at barriers, unless the environment has a setting already.

    By default they spin, and take the core from the very thread that they wait for if another
    process runs there: one busy neighbour on two cores makes an engine of two threads seven times
    slower, or two times if they sleep. The environment is read when torch is imported.
    """
    if PASSIVE.keys().isdisjoint(environment):
        environment.update(PASSIVE)
