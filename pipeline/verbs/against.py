"""Compares the answers of two specs on the same gold rows. Entry point: `compared`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.errors import Option, SpecError, option_error
from pipeline.evaluation.metrics import Paired, paired
from pipeline.gold.answers import JudgedRows, answers_for, judged_rows, matching_snapshot
from pipeline.gold.labels import Gold
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store


@dataclass(frozen=True, slots=True)
class Against:
    """Answers of another spec to the same gold rows, and how they compare. Also the JSON form."""

    spec: str
    output: str
    snapshot: int
    tasks: Mapping[str, Paired]


def compared(
    file: str,
    gold: Gold,
    judged: Mapping[str, JudgedRows],  # by task, or label of kind `multi`
    cache_dir: Path,
) -> Against:
    """How the answers of the spec in a file to the judged rows compare with these.

    SpecError, which names the file, if its output has none.
    """
    try:
        other = load_spec(file)
        labels = {name: gold.tasks[name].labels for name in judged}
        parts = {p.name: p for p in other.parts if {*p.labels} == {*labels.get(p.name, ())}}
        if not parts:
            fix = f"has no task {' or '.join(labels)} with the same labels that is judged here"
            raise option_error("against", fix, file)
        store = open_store(other.output, other.storage_options)
        snapshot, _ = matching_snapshot(other, store, list(parts), cache_dir)
        answers = answers_for(other, snapshot, gold.counts.joined_by, gold.keys, parts)
        other_judged = {n: judged_rows(other, part, gold, answers)[1] for n, part in parts.items()}
    except SpecError as error:
        at_file = Option(part=file)
        problems = [
            replace(p, place=p.place if isinstance(p.place, Option) else at_file, where="")
            for p in error.problems
        ]
        raise SpecError(problems) from error
    pairs = {}
    for name, other_rows in other_judged.items():
        own = judged[name]
        _, rows, rows_there = np.intersect1d(
            own.gold_rows, other_rows.gold_rows, return_indices=True
        )
        if len(rows):
            order = [[*parts[name].labels].index(label) for label in labels[name]]
            p = other_rows.p[rows_there][:, order]
            pairs[name] = paired(own.truth[rows], own.p[rows], p, values=parts[name].values)
    return Against(other.name, store.url, snapshot.number, pairs)
