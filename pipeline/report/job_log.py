"""A submitted job's log on this terminal, and the question that Ctrl-C asks.

Knows streams, lines and which of them is the result. Knows nothing of clusters or jobs.
"""

from __future__ import annotations

import json
from typing import TextIO


class JobLog:
    """Writes the pieces of a log as they come; with `results`, JSON lines apart from the rest.

    A job's two streams arrive as one. What `assay run --json` prints is a line of its own and no
    line of a log begins like it.
    """

    def __init__(self, out: TextIO, err: TextIO, *, results: bool) -> None:
        self._out, self._err, self._results = out, err, results
        self._begun = ""  # of a line whose end has not come yet

    def show(self, piece: str) -> None:
        """The next piece, which may end anywhere."""
        *whole, self._begun = (self._begun + piece).split("\n")
        for line in whole:
            self._write(line)

    def close(self) -> None:
        """The last line, if nothing ended it."""
        if self._begun:
            self._write(self._begun)
        self._begun = ""

    def _write(self, line: str) -> None:
        apart = self._results and not _is_result(line)
        print(line, file=self._err if apart else self._out, flush=True)


def _is_result(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def wants_stop(id: str, terminal: TextIO, answers: TextIO) -> bool:
    """Asks whether the job ends too; without a terminal, or with another Ctrl-C, it goes on."""
    if not answers.isatty():
        return False
    print(f"\nStop {id} on the cluster, too? [y/N] ", end="", file=terminal, flush=True)
    try:
        return answers.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False
