"""The reports of `verify` and `gc`, for people and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.report.console import Part, printed

if TYPE_CHECKING:
    from pipeline.integrity.gc import GcResult
    from pipeline.integrity.verify import VerifyResult

SHOWN_DAMAGES = 50


@printed
def show_verified(verified: VerifyResult) -> Iterator[Part]:
    """A table of what was read again, then a line for each thing that is wrong."""
    changed = f", {verified.inputs_changed:,} objects changed or gone since"
    yield {
        "output": f"{verified.output}, snapshot {verified.snapshot:08d} of {verified.spec}",
        "read again": f"{verified.files:,} files of {verified.shards:,} shards",
        "rows": f"{verified.rows:,}, {verified.cells:,} answers",
        "input": f"{verified.documents_read_again:,} documents read again"
        + (changed if verified.inputs_changed else ""),
        "verdict": "intact" if verified.intact else _problems(len(verified.damages)),
    }
    yield from map(str, verified.damages[:SHOWN_DAMAGES])
    if len(verified.damages) > SHOWN_DAMAGES:
        yield f"and {len(verified.damages) - SHOWN_DAMAGES:,} more; --json has them all"


def _problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count:,} problems"


def verified_json(verified: VerifyResult) -> dict[str, Any]:
    """The same for other programs."""
    return {**asdict(verified), "intact": verified.intact}


@printed
def show_gc(result: GcResult) -> Iterator[Part]:
    """A table of what is, or would be, removed below each prefix."""
    kept = ", ".join(f"{number:08d}" for number in result.snapshots) or "none"
    rows = {"output": result.output, "kept snapshots": kept}
    for prefix, (count, size_bytes) in result.per_prefix.items():
        rows[prefix] = f"{count:,} objects, {size_bytes / 1e6:,.1f} MB"
    if result.young:
        rows["younger"] = f"{result.young:,} objects that nothing else needs; see --older-than"
    if result.unknown:
        rows["not touched"] = f"{result.unknown:,} unknown files, left alone"
    rows["verdict"] = "nothing was deleted; add --delete to delete these objects"
    if result.deleted:
        rows["verdict"] = "deleted"
    if not result.objects:
        rows["verdict"] = "there is nothing to delete"
    yield rows


def gc_json(result: GcResult) -> dict[str, Any]:
    """The same for other programs, with every key."""
    return {
        "output": result.output,
        "kept_snapshots": list(result.snapshots),
        "deleted": result.deleted,
        "young": result.young,
        "unknown": result.unknown,
        "prefixes": {
            prefix: {"objects": count, "size_bytes": size_bytes}
            for prefix, (count, size_bytes) in result.per_prefix.items()
        },
        "keys": list(result.keys),
    }
