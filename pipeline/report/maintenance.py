"""The reports of `status`, `verify` and `gc`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING

from pipeline.report.console import Grid, Part, duration, printed
from pipeline.report.progress import shards

if TYPE_CHECKING:
    from pipeline.integrity.gc import GcResult
    from pipeline.integrity.verify import VerifyResult
    from pipeline.verbs.status import Snapshots, Status

SHOWN_DAMAGES = 50


@printed
def show_status(status: Status) -> Iterator[Part]:
    """The counts, the rate and the time left."""
    snapshot = "none" if status.snapshot is None else f"{status.snapshot:08d}"
    snapshot += f" ({status.limit})" if status.limit else ""
    if status.snapshot is not None and status.unpublished:
        snapshot += f"; it lacks up to {status.unpublished:,} documents of new or changed files"
    to_read = "nothing"
    if status.to_read:
        to_read = f"at most {status.to_read:,}; the other texts have answers, or are empty"
    rate, left = "unknown: too few shards were finished in the last 15 minutes", "unknown"
    if status.docs_per_s is not None:
        rate = f"{status.docs_per_s:,.2f} documents a second"
    if status.eta_s is not None:
        left = f"about {duration(status.eta_s)}" if status.eta_s else "nothing is missing"
    yield [
        ("output", status.output),
        ("documents", f"{status.documents:,}"),
        ("to read", to_read),
        ("snapshot", snapshot),
        # — after the last shard, a rate until now would be lower every second
        *([("rate", rate)] if status.eta_s != 0 else []),
        ("time left", left),
        *(("left out", reason) for reason in status.unreadable),
    ]
    rows = [
        (name, *(f"{n:,}" for n in (*astuple(task), status.reused[name])))
        for name, task in status.tasks.items()
    ]
    yield Grid("", ("task", "done", "missing", "failed", "skipped", "reused"), rows)


@printed
def show_snapshots(result: Snapshots) -> Iterator[Part]:
    """A line for each snapshot, with what changed since the one before."""
    yield {"output": result.output}
    rows = []
    for each in result.snapshots:
        changes = [f"{task}: {', '.join(names)}" for task, names in sorted(each.changed.items())]
        parts = ((each.new_shards, "new"), (each.removed_shards, "removed"))
        changes += [f"input: {shards(count)} {kind}" for count, kind in parts if count]
        limit = f" ({each.limit})" if each.limit else ""
        name = f"{each.snapshot:08d}{limit}"
        rows.append((name, each.published, "; ".join(changes), f"{each.documents:,}"))
    yield Grid("", ("snapshot", "published", "changed", "documents"), rows, texts=3)


@printed
def show_verified(verified: VerifyResult) -> Iterator[Part]:
    """A table of what was read again, then a line for each thing that is wrong."""
    changed = f", {verified.inputs_changed:,} objects changed or gone since"
    problems = f"{len(verified.damages):,} problem{'s' * (len(verified.damages) != 1)}"
    yield {
        "output": f"{verified.output}, snapshot {verified.snapshot:08d} of {verified.spec}",
        "read again": f"{verified.files:,} files of {shards(verified.shards)}",
        "rows": f"{verified.rows:,}, {verified.cells:,} answers",
        "input": f"{verified.documents_read_again:,} documents read again"
        + (changed if verified.inputs_changed else ""),
        "verdict": "intact" if verified.intact else problems,
    }
    yield from map(str, verified.damages[:SHOWN_DAMAGES])
    if len(verified.damages) > SHOWN_DAMAGES:
        yield f"and {len(verified.damages) - SHOWN_DAMAGES:,} more; --json has them all"


@printed
def show_gc(result: GcResult) -> Iterator[Part]:
    """A table of what is, or would be, removed below each prefix."""
    kept = ", ".join(f"{number:08d}" for number in result.kept_snapshots) or "none"
    rows = {"output": result.output, "kept snapshots": kept}
    for prefix, amount in result.prefixes.items():
        rows[prefix] = f"{amount.objects:,} objects, {amount.size_bytes / 1e6:,.1f} MB"
    if result.young:
        rows["younger"] = f"{result.young:,} unneeded objects, kept because young; see --older-than"
    if result.unknown:
        rows["not touched"] = f"{result.unknown:,} unknown files, left alone"
    rows["verdict"] = "nothing was deleted; add --delete to delete these objects"
    if result.deleted:
        rows["verdict"] = "deleted"
    if not result.keys:
        rows["verdict"] = "there is nothing to delete"
    yield rows
