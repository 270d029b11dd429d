"""Engines of the peers' bench that need no process of their own."""

from __future__ import annotations

import io
import json
from typing import Any

from benchmarks.peers.environments import Worker
from benchmarks.peers.serve import Engine, serve


class InThisProcess(Worker):
    """A worker whose engine is in this process, and answers at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version = engine, engine.version

    def close(self) -> None:
        """There is no process."""

    def ask(self, **message: object) -> None:
        self.replies = io.StringIO()
        serve(self.engine, [json.dumps(message)], self.replies)

    def reply(self) -> Any:
        return json.loads(self.replies.getvalue().splitlines()[-1])
