"""How a tick ended, for people and as JSON values.

Knows ticks. Knows nothing of how they came about.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console

from pipeline.relabelling import Tick
from pipeline.report.drift import comparison_json, show_comparison
from pipeline.report.summary import summary_json, summary_table
from pipeline.report.verdict import two_columns


def print_tick(tick: Tick, *, as_json: bool) -> None:
    """The report on standard output."""
    if as_json:
        print(json.dumps(tick_json(tick)))
    else:
        file = sys.stdout
        show_tick(tick, Console(file=file, highlight=False, soft_wrap=True, emoji=False))


def show_tick(tick: Tick, console: Console) -> None:
    """What was labelled, what changed, what the gates say, and whether it was published."""
    console.print(summary_table(tick.outcome), markup=False)
    if tick.comparison:
        console.print()
        show_comparison(tick.comparison, console)
    console.print()
    rows = {f"gate {each.gate}": _told(each.value, each.passed) for each in tick.decisions}
    console.print(two_columns({**rows, "verdict": _verdict(tick)}), markup=False)
    for reason in tick.held_back:
        console.print(f"  {reason}", markup=False)


def tick_json(tick: Tick) -> dict[str, Any]:
    """The same for other programs."""
    return {
        "published": tick.published,
        "snapshot": tick.outcome.snapshot,
        "previous": tick.previous,
        "held_back": list(tick.held_back),
        "gates": [asdict(each) for each in tick.decisions],
        "diff": comparison_json(tick.comparison) if tick.comparison else None,
        "run": summary_json(tick.outcome),
    }


def _told(value: float | None, passed: bool) -> str:
    return f"{'undefined' if value is None else f'{value:.4f}'}, {'holds' if passed else 'FAILS'}"


def _verdict(tick: Tick) -> str:
    stays = "nothing is current yet" if tick.previous is None else f"{tick.previous:08d} stays"
    if not tick.outcome.complete:
        return f"incomplete, not judged; {stays}; run again"
    if tick.held_back:
        return f"HELD BACK; {stays}; `assay run` would publish it in spite of this"
    if tick.outcome.snapshot == tick.previous:
        return f"nothing new; {stays}"
    return f"published as snapshot {tick.outcome.snapshot:08d}"
