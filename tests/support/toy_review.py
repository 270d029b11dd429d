"""A review of toy documents in a process of its own. Entry point: `python toy_review.py FILE PORT`.

The address of the page is the only line on standard output.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from reviews import World, task_of

from pipeline.review.server import listen, serve


def main(file: str, port: str, kind: str) -> None:
    world = World(task_of(kind))
    with world.session(Path(file)) as session:
        command = "assay fit spec.yaml --gold gold.jsonl"
        host = "127.0.0.1"
        own = listen(host, int(port))
        asyncio.run(
            serve(
                session,
                own,
                host=host,
                command=command,
                announce=lambda address: print(address, flush=True),
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
