"""Jobs and outcomes of runs that never ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finished import toy_spec
from label_tables import toy_shard
from memory_store import MemoryStore

from pipeline.ledger.cells import Committed, WorkItem
from pipeline.ledger.cuts import Cuts
from pipeline.runtime.job import Job, Reader, Run, Step
from pipeline.runtime.outcome import Outcome, Tally
from pipeline.runtime.placement import Placement
from pipeline.runtime.plan import Plan
from pipeline.runtime.weights import ModelFiles
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import parse_spec


def toy_job(
    output: str | Path,
    labels: Mapping[str, tuple[str, ...]],
    fingerprints: Mapping[str, Fingerprint],
    **changes: Any,
) -> Job:
    """A job without a model."""
    tasks = [{"name": t, "question": "?", "labels": list(of)} for t, of in labels.items()]
    content = toy_spec(Path("none"), **{"output": str(output), "tasks": tasks, **changes})
    placement, files = Placement("cpu", "float32", 1, 1), ModelFiles("folder", "", None, {}, 0)
    spec = parse_spec(json.dumps(content))
    reader = Reader(
        spec, files, placement, {}, {}, "", {"model": "model", "documents": "documents"}
    )
    known = [task for task in spec.tasks if task.name in fingerprints]
    steps = [Step(t.name, 0, 0, t, fingerprints[t.name], None) for t in known]
    return Job(spec, (reader,), tuple(steps), fingerprints, placement, "", Run("toy"))


def toy_outcome(
    tally: Tally,
    output: str | Path = "out",
    *,
    rows: int = 1,
    missing: bool = False,
    unreadable: tuple[str, ...] = (),
    snapshot: int | None = 1,
    **changes: Any,
) -> Outcome:
    """The outcome of a run of one shard in one second."""
    shard = toy_shard(rows=rows)
    work = (WorkItem(shard, ("t",), documents=True),) * missing
    plan = Plan(Cuts((shard,), unreadable), Committed({}, {}, {}, {}), work)
    job = toy_job(output, {"t": ("a", "b")}, {}, **changes)
    return Outcome(job, MemoryStore(), plan, tally, 1.0, snapshot=snapshot)
