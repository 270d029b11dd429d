"""The documents of a corpus that people are asked about, and the answers that the output has.

Entry points: `drawn`, `accepted_by` and `Reading`.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush, heappushpop
from itertools import groupby, islice, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import AssayError, Option, option_error
from pipeline.filters.inputs import input_values
from pipeline.filters.labelled import LabelledRows
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import INPUT, read_shard, wide_schema
from pipeline.ledger.snapshots import Contents
from pipeline.review.session import Document, Pool
from pipeline.sources.documents import OK
from pipeline.sources.records import file_segments, units_of
from pipeline.sources.rule import Rule, fields_in
from pipeline.sources.shards import Piece, Shard
from pipeline.sources.source import read_documents
from pipeline.sources.streams import Options, reading, stream_at
from pipeline.sources.tables import table_units
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store

# At least this many shards are drawn from, and more if they are smaller.
LEAST_SHARDS = 64
MOST_BYTES = 2_000_000_000  # of text in the shards that are drawn from
TEXT_CHARS = 20_000  # of a text on the page
_COLUMNS = ["doc_id", "content_hash", "text", "status"]  # that are read

Draw = tuple[Shard, Mapping[int, int]]  # rows of the shard's object: their places in random order


def drawn(shards: Sequence[Shard], count: int, seed: int) -> list[Draw]:
    """About `count` rows of the corpus, by shard; the shard of the first row comes first.

    Every row has the same chance: of S shards, K are drawn without regard to their sizes, and of
    their rows each with the chance min(1, count / N * S / K), where N is the number of all rows.
    The product is count / N for all rows. A corpus of at most K shards is thus drawn from as a
    whole. K shards have about MOST_BYTES of text, so the largest corpus costs no more than that.
    The order is random, too; the shard that is read first is that of the first row.
    """
    random = np.random.default_rng(seed)
    text_bytes = sum(shard.piece.text_bytes for shard in shards)
    most = max(LEAST_SHARDS, MOST_BYTES * len(shards) // max(1, text_bytes))
    chosen = np.sort(random.choice(len(shards), min(most, len(shards)), replace=False))
    rows = np.array([shard.rows for shard in shards], np.int64)
    ends = np.cumsum(rows[chosen])
    share = min(1.0, count * len(shards) / (len(chosen) * int(rows.sum())))
    # — a part of a row is a chance of one, so that the number of rows varies by no more than that
    size = int(share * ends[-1] + random.random())
    picked = random.choice(ends[-1], size, replace=False)
    places = np.searchsorted(ends, picked, side="right")
    draws: dict[int, dict[int, int]] = {}
    for rank, (place, row) in enumerate(zip(places.tolist(), picked.tolist(), strict=True)):
        shard = shards[chosen[place]]
        first = int(ends[place]) - shard.rows
        draws.setdefault(place, {})[shard.piece.start_row + row - first] = rank
    return [(shards[chosen[place]], ranks) for place, ranks in draws.items()]


def accepted_by(sql: str, spec: JobSpec, count: int, seed: int, *, cache_dir: Path) -> list[Draw]:
    """`count` random rows of the last snapshot that a condition accepts, as of `drawn`.

    SpecError if the condition is wrong or accepts none. StorageError if the input changed since.
    """
    place = Option("where")
    labelled = LabelledRows.of(spec, dict.fromkeys(fields_in(sql, INPUT, place=place), place))
    rule, contents = Rule(sql, labelled.schema, place=place), labelled.contents
    shards, _ = labelled.shards(cache_dir)
    random = np.random.default_rng(seed)
    # — of all accepted rows those with the largest draws, the smallest of them first
    held: list[tuple[float, str, int]] = []
    for named, batch in zip(contents.shards, labelled.batches(shards), strict=True):
        rows = batch.filter(rule.verdicts(batch)).column("row").to_pylist()
        for row in zip(random.random(len(rows)).tolist(), repeat(named.sid), rows, strict=False):
            (heappush if len(held) < count else heappushpop)(held, row)
    if not held:
        fix = f"accepts no document of snapshot {contents.number}; write a wider condition"
        raise option_error("where", fix, sql)
    draws: dict[str, dict[int, int]] = {}
    for rank, (_, sid, row_number) in enumerate(sorted(held, reverse=True)):
        draws.setdefault(sid, {})[row_number] = rank
    return [(shards[sid], ranks) for sid, ranks in draws.items()]


class Answers:
    """The answers of a snapshot to one task; none without a snapshot that has them."""

    def __init__(self, store: Store, contents: Contents | None, task: TaskSpec) -> None:
        self._store, self._contents, self._task = store, contents, task
        self._shards = {} if contents is None else {shard.sid: shard for shard in contents.shards}

    def of_shard(self, sid: str) -> dict[tuple[int, str], NDArray[np.float64]]:
        """p [labels] of each answered row, by the row of the object and its content hash."""
        if self._contents is None or sid not in self._shards:
            return {}
        name, labels = self._task.name, tuple(self._task.labels)
        schema = wide_schema(self._contents, [name])
        rows = read_shard(self._store, self._shards[sid], schema=schema, tasks=[name])
        p = probabilities(rows.column(name), labels)
        keys = zip(*(rows.column(key).to_pylist() for key in ("row", "content_hash")), strict=True)
        rows_of = zip(keys, p, strict=True)
        return {key: of_row for key, of_row in rows_of if not np.isnan(of_row).any()}


@dataclass(frozen=True, slots=True)
class Read:
    """What is read of a document beside its text."""

    answers: Answers
    columns: Sequence[str] = ()  # of the input
    options: Options = field(default_factory=dict)  # of its file system


class Reading:
    """Fills a pool in a thread of its own, which does not keep the process from ending."""

    def __init__(
        self,
        pool: Pool,
        draws: Sequence[Draw],
        other_shards: Sequence[Shard],
        named: Collection[str],
        read: Read,
    ) -> None:
        """Of `other_shards`, only documents with the content hashes `named` are added.

        They are read if the draws do not have all of these documents.
        """
        self._pool, self._draws, self._other_shards = pool, draws, other_shards
        self._named, self._also = named, read
        pool.is_read = False
        self._has_some, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read_all, daemon=True)
        self._thread.start()
        order = "pipeline.review.order"
        self._order = threading.Thread(target=importlib.import_module, args=(order,), daemon=True)

    def wait(self, *, for_all: bool) -> None:
        """Returns when the pool has documents or all of them, or reading failed."""
        if for_all:
            self._thread.join()
        self._has_some.wait()
        if len(self._pool):
            self._order.start()  # — scikit-learn loads while people look at the first document

    def close(self) -> None:
        """Ends the threads."""
        self._ends.set()
        self._thread.join()
        if self._order.is_alive():
            self._order.join()

    def _read_all(self) -> None:
        try:
            for shard, ranks in self._draws[:1]:
                # — alone: the page opens before the rest of its shard is read
                first = min(ranks, key=ranks.__getitem__)
                self._add(shard, {first: ranks[first]})
            for shard, ranks in self._draws:
                if self._ends.is_set():
                    return
                self._add(shard, ranks)
            self._add_named()
        except AssayError as error:
            self._pool.error = error
        finally:
            self._pool.is_read = True
            self._has_some.set()

    def _add(self, shard: Shard, ranks: Mapping[int, int]) -> None:
        for row, document in _documents(shard, sorted(ranks), self._also):
            if self._ends.is_set():
                return
            self._pool.add(replace(document, rank=ranks[row]))
        if len(self._pool):
            self._has_some.set()

    def _add_named(self) -> None:
        missing = {*self._named} - self._pool.rows.keys()
        for shard in self._other_shards:
            if not missing or self._ends.is_set():
                break
            rows = range(shard.piece.start_row, shard.piece.end_row)
            for _, document in _documents(shard, rows, self._also):
                if self._ends.is_set():
                    return
                if document.hash in missing:
                    self._pool.add(replace(document, rank=len(self._pool)))
                    missing.discard(document.hash)
        if missing and not self._ends.is_set():
            fix = f"{len(missing):,} of its {len(self._named):,} documents are not in the input: "
            fix += "it is of another corpus, or they were changed; name the spec whose documents "
            raise option_error("to", f"{fix}they are", min(missing))


def shown_text(text: str) -> str:
    """The text as the page shows it: at most TEXT_CHARS of it."""
    if len(text) <= TEXT_CHARS:
        return text
    return f"{text[:TEXT_CHARS]}\n[… {len(text) - TEXT_CHARS:,} more characters]"


def _documents(shard: Shard, rows: Sequence[int], also: Read) -> Iterator[tuple[int, Document]]:
    """These rows (rising, of the object) with a text; no more of the shard is read than needed."""
    answers = also.answers.of_shard(shard.id)
    for part, own in _parts(shard, rows, also.options):
        left, first = deque(own), part.piece.start_row
        values: Iterator[Sequence[str | None]] = repeat(())
        if also.columns:
            values = input_values(part, also.columns, also.options)
        for documents in read_documents(part, also.options):
            columns = list(islice(values, len(documents)))
            chosen = list[int]()
            while left and left[0] < first + len(documents):
                chosen.append(left.popleft() - first)
            taken = documents.select(_COLUMNS).take(pa.array(chosen, pa.int64()))
            for place, of in zip(chosen, taken.to_pylist(), strict=True):
                if of["status"] == OK:
                    shown = {n: v or "" for n, v in zip(also.columns, columns[place], strict=True)}
                    names, text = (of["content_hash"], of["doc_id"]), shown_text(of["text"])
                    stored = answers.get((first + place, of["content_hash"]))
                    p = None if stored is None else tuple(stored.tolist())
                    yield first + place, Document(*names, text, 0, p, columns=shown)
            first += len(documents)
            if not left:
                break


def _parts(
    shard: Shard, rows: Sequence[int], options: Options
) -> Iterator[tuple[Shard, Sequence[int]]]:
    """The shard with its rows; of Parquet, a part for each row group that has some.

    One row of a stream is a part of its own: the others are counted, and not parsed.
    """
    version, piece = shard.version, shard.piece
    if version.format == "parquet":
        with reading(shard.path):
            ends = np.cumsum([unit.rows for unit in table_units(version, options)])
        for _, group in groupby(rows, key=lambda row: np.searchsorted(ends, row, side="right")):
            own = list(group)
            yield Shard(version, Piece(own[0], own[-1] + 1, 0, None, None)), own
    elif len(rows) == 1 and piece.start_byte is not None and piece.end_byte is not None:
        size_bytes = piece.end_byte - piece.start_byte
        with reading(shard.path), stream_at(version, options, piece.start_byte) as stream:
            units = units_of(file_segments(stream, version.format, version.quoted, size_bytes))
            unit = next(islice(units, rows[0] - piece.start_row, None))
        assert unit.start_byte is not None and unit.end_byte is not None, unit
        place = piece.start_byte + unit.start_byte, piece.start_byte + unit.end_byte
        yield Shard(version, Piece(rows[0], rows[0] + 1, unit.text_bytes, *place)), rows
    else:
        yield shard, rows
