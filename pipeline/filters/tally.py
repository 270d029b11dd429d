"""Counts of labelled documents for a report, in one pass over the labels. Entry point: `Tally`.

What is held does not grow with the documents: sums by group and file (about 220 bytes each),
histograms of scores, a few examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.filters.dry_run import ALL, Size
from pipeline.filters.policy import BoundClause, CauseCounts, Judge
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.rule import NO_GROUP

# The thresholds that a report has counts for: 0, 0.001, ... 1.
THRESHOLDS = np.arange(1_001) / 1_000
LENGTHS = (200, 1_000, 5_000, 20_000)  # characters: the upper ends of groups of documents
MOST_GROUPS = 200  # the largest; the others are counted together
OTHERS = "others"
SHOWN_LABELS = 12  # of a task: histograms and examples; the first in the spec's order
MOST_SCORES = 48
EXAMPLES = 3
SURE, BORDERLINE, KEPT, DROPPED = "sure", "borderline", "kept", "dropped"

_LENGTH_NAMES = (
    *(f"up to {end:,} characters" for end in LENGTHS),
    f"above {LENGTHS[-1]:,} characters",
)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Example:
    """One document that a report shows."""

    kind: str  # sure | borderline: of a label; kept | dropped: by the filter
    task: str | None
    label: str | None
    doc_id: str
    path: str
    row: int
    margin: float | None  # between the two likeliest labels
    reason: str  # why the filter drops it; "" where it is kept


class Sizes:
    """Documents, characters and tokens, by group and by decision: exact for every group.

    Args:
        names: Groups that are numbered first, in this order.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._totals = np.zeros((MOST_GROUPS, 2, 3), np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def codes(self, groups: pa.Array) -> Ints:  # [docs]
        """The number of each document's group; null is a group."""
        encoded = pc.fill_null(groups, NO_GROUP).dictionary_encode()
        names = encoded.dictionary.to_pylist()
        numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
        if (missing := len(self._numbers) - len(self._totals)) > 0:
            # — at least doubled, so that the sums are copied seldom
            more = max(missing, len(self._totals))
            self._totals = np.pad(self._totals, ((0, more), (0, 0), (0, 0)))
        codes: Ints = np.asarray(numbers, np.int64)[encoded.indices.to_numpy()]
        return codes

    def add(self, codes: Ints, dropped: Bools, measures: Sequence[Ints]) -> None:
        """Adds documents; `measures` are documents, characters and tokens of each."""
        cells = codes * 2 + dropped
        for sums, measure in zip(self._totals.reshape(-1, 3).T, measures, strict=True):
            np.add.at(sums, cells, measure)

    def largest(self) -> list[str]:
        """The names of the `MOST_GROUPS` largest groups, the largest first."""
        documents = self._totals[: len(self._numbers), :, 0].sum(axis=1)
        order = np.argsort(-documents, kind="stable")[:MOST_GROUPS]
        names = self.names
        return [names[number] for number in order.tolist()]

    def by_group(self) -> dict[str, tuple[Size, Size]]:
        """Kept and dropped, the largest group first; all but the largest groups are one, `OTHERS`.

        A group of that name is counted with them.
        """
        largest = [name for name in self.largest() if name != OTHERS]
        totals = {name: self._totals[self._numbers[name]] for name in largest}
        rest = self._totals.sum(axis=0) - sum(totals.values())
        if rest.any():
            totals[OTHERS] = rest
        return {
            name: (Size(*kept.tolist()), Size(*dropped.tolist()))
            for name, (kept, dropped) in totals.items()
        }


class Histogram:
    """Documents by the score of a label, and by group.

    Cell `n` counts scores above `THRESHOLDS[n - 1]`, up to `THRESHOLDS[n]`. So the documents above
    a threshold are the sum of the cells after it.
    """

    def __init__(self, task: str, label: str) -> None:
        self.task, self.label = task, label
        self._counts: dict[int, Ints] = {}  # by group: [thresholds]
        self._sizes = np.zeros((3, len(THRESHOLDS)), np.int64)

    def add(self, rows: pa.RecordBatch, codes: Ints, measures: Sequence[Ints]) -> None:
        """Adds the documents that have a score; groups after the first `MOST_GROUPS` are one."""
        column = pc.struct_field(rows.column(self.task), ["p", self.label])
        scores = np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
        known = np.isfinite(scores)
        cells = np.searchsorted(THRESHOLDS, scores[known])
        size = len(THRESHOLDS)
        for number, measure in enumerate(measures):
            np.add.at(self._sizes[number], cells, measure[known])
        shown = np.minimum(codes[known], MOST_GROUPS)
        for code in np.unique(shown).tolist():
            own = np.bincount(cells[shown == code], minlength=size)
            self._counts[code] = self._counts.get(code, 0) + own

    def counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        """The documents of each cell, of each group by name."""
        counts: dict[str, Ints] = {}
        for code, own in sorted(self._counts.items()):
            name = names[code] if code < MOST_GROUPS else OTHERS
            counts[name] = counts.get(name, 0) + own
        return {name: own.tolist() for name, own in counts.items()}

    def sizes(self) -> tuple[list[int], ...]:
        """Documents, characters and tokens of each cell."""
        return tuple(self._sizes.tolist())


class Tally:
    """Counts the documents of a snapshot.

    Args:
        tasks: All tasks of the snapshot, in the order in which they are shown.
        judge: Which documents the filter drops.
        on_error: What the filter does with documents without an answer.
        group: A clause whose groups are counted; None for none.
        limited: Tasks and labels whose scores are counted before others.
        keys: Values of a column of the rows, of documents whose group is wanted.
        shown: Groups that have histograms: with more than `MOST_GROUPS`, the largest of another
            tally of the same rows.
    """

    def __init__(
        self,
        tasks: Mapping[str, SnapshotTask],
        judge: Judge,
        on_error: str,
        group: BoundClause | None,
        limited: Collection[tuple[str, str]] = (),
        keys: tuple[str, Sequence[str]] = ("doc_id", ()),
        shown: Sequence[str] = (),
    ) -> None:
        self._tasks, self._judge, self._on_error = tasks, judge, on_error
        self._group, self._keys = group, (keys[0], pa.array(keys[1], pa.string()))
        self.group_of: dict[str, str] = {}  # by key
        self.all, self.files, self.lengths = (Sizes() for _ in range(3))
        self.groups = Sizes(shown)
        self.statuses, self.causes = Counter[str](), CauseCounts()
        self.labels: dict[str, Counter[str]] = {task: Counter() for task in tasks}
        self.answers: dict[str, Counter[str]] = {task: Counter() for task in tasks}  # by status
        self.histograms = [
            Histogram(task, label)
            for task, named in self._tasks.items()
            if "p" in named.columns
            for label in sorted(named.labels, key=lambda label: (task, label) not in limited)[
                :SHOWN_LABELS
            ]
        ][:MOST_SCORES]
        self._examples: dict[tuple[str, str, str], list[tuple[float, str, Example]]] = {}

    def add(self, rows: pa.RecordBatch, failed: Sequence[str]) -> None:
        """Counts the rows of a shard; `failed` is what `SnapshotRule.rows` returns."""
        decision = self._judge.decide(rows, failed, self._on_error)
        dropped = decision.dropped
        self.causes.add(decision, failed)
        count = rows.num_rows
        chars = rows.column("n_chars").to_numpy(zero_copy_only=False).astype(np.int64)
        measures = (np.ones(count, np.int64), chars, self._tokens(rows))
        whole = np.zeros(count, np.int64)
        groups = whole
        self.all.add(self.all.codes(pa.repeat(ALL, count)), dropped, measures)
        self.files.add(self.files.codes(rows.column("path")), dropped, measures)
        lengths = pa.array(_LENGTH_NAMES, pa.string()).take(np.searchsorted(LENGTHS, chars))
        self.lengths.add(self.lengths.codes(lengths), dropped, measures)
        if self._group is not None:
            names = pa.array(self._group.groups(rows), pa.string())
            groups = self.groups.codes(names)
            self.groups.add(groups, dropped, measures)
            self._look_up(rows, names)
        for histogram in self.histograms:
            histogram.add(rows, groups, measures)
        self.statuses.update(_counted(rows.column("status")))
        for task in self._tasks:
            for name, counter in (("label", self.labels[task]), ("status", self.answers[task])):
                counter.update(_counted(pc.struct_field(rows.column(task), name)))
        self._add_examples(rows, decision.reasons, dropped)

    def _tokens(self, rows: pa.RecordBatch) -> Ints:
        """Tokens that the model reads of each text; those of the task with the most."""
        most = np.zeros(rows.num_rows, np.int64)
        for task in self._tasks:
            tokens = pc.fill_null(pc.struct_field(rows.column(task), "n_tokens"), 0)
            most = np.maximum(most, tokens.to_numpy(zero_copy_only=False))
        return most

    def _look_up(self, rows: pa.RecordBatch, names: pa.Array) -> None:
        column, values = self._keys
        if len(values):
            keys = rows.column(column)
            is_key = pc.is_in(keys, value_set=values)
            pairs = zip(
                keys.filter(is_key).to_pylist(), names.filter(is_key).to_pylist(), strict=True
            )
            self.group_of.update(pairs)

    def _add_examples(self, rows: pa.RecordBatch, reasons: Sequence[str], dropped: Bools) -> None:
        hashes = rows.column("content_hash").to_pylist()

        def offer(key: tuple[str, str, str], chosen: Sequence[int], rank: Sequence[float]) -> None:
            kind, task, label = key
            held = self._examples.setdefault(key, [])
            for place, row in enumerate(chosen):
                margin = rank[place] if task else None
                of = Example(
                    kind=kind,
                    task=task or None,
                    label=label or None,
                    doc_id=rows.column("doc_id")[row].as_py(),
                    path=rows.column("path")[row].as_py(),
                    row=rows.column("row")[row].as_py(),
                    margin=margin,
                    reason=reasons[row],
                )
                order = -rank[place] if kind == SURE else rank[place]
                held.append((order, hashes[row], of))
            held.sort(key=lambda each: each[:2])
            of_text = {each[1]: each for each in reversed(held)}  # — the best of equal texts
            held[:] = [each for each in held if of_text[each[1]] is each][:EXAMPLES]

        has_text = np.array([s == "ok" for s in rows.column("status").to_pylist()], np.bool_)
        for kind, chosen in ((KEPT, ~dropped), (DROPPED, dropped)):
            those = np.flatnonzero(chosen & has_text).tolist()
            smallest = nsmallest(EXAMPLES, those, key=hashes.__getitem__)
            offer((kind, "", ""), smallest, [0.0] * len(smallest))
        for task, named in self._tasks.items():
            column = rows.column(task)
            labels = pc.index_in(
                pc.struct_field(column, "label"), value_set=pa.array(named.labels[:SHOWN_LABELS])
            )
            codes = pc.fill_null(labels, -1).to_numpy(zero_copy_only=False)
            margins = pc.struct_field(column, "margin").to_numpy(zero_copy_only=False)
            for code in np.unique(codes[codes >= 0]).tolist():
                own = np.flatnonzero((codes == code) & np.isfinite(margins))
                order = own[np.argsort(margins[own], kind="stable")]
                label = named.labels[code]
                for kind, best in ((BORDERLINE, order), (SURE, order[::-1])):
                    first = best[:EXAMPLES].tolist()
                    offer((kind, task, label), first, margins[first].tolist())

    @property
    def examples(self) -> list[Example]:
        """The documents to show: by the filter's decision, then of each label."""
        keys = [(KEPT, "", ""), (DROPPED, "", "")]
        keys += [
            (kind, task, label)
            for task, named in self._tasks.items()
            for label in named.labels[:SHOWN_LABELS]
            for kind in (SURE, BORDERLINE)
        ]
        return [each for key in keys for *_, each in self._examples.get(key, ())]


def _counted(values: pa.Array) -> dict[str, int]:
    pairs = values.drop_null().value_counts().to_pylist()
    return {each["values"]: each["counts"] for each in pairs}
