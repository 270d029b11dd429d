"""The view that a version of a table has of a data file: its deleted rows, and its columns.

Entry points: `DataFile`, `view_of`, and `deletions` and `constants` for the JSON of a view. A view
is a part of the shard's identity, so it has rows and names, and not the version's number: a file
whose rows and names are the same in another version keeps its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.hashes import canonical_json, parse_json
from pipeline.sources.documents import Names
from pipeline.sources.shards import ObjectVersion
from pipeline.spec.schema import Columns

Rows = NDArray[np.int64]  # [rows], rising


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file of a version of a table."""

    path: str  # absolute, or a URL
    view: Mapping[str, Any] = field(default_factory=dict)  # JSON; empty: all of the file
    format: str = "parquet"
    is_pinned: bool = False  # the spec names the version

    def view_of(self, columns: Columns) -> str | None:
        """The view as `ObjectVersion` has it; of Lance, where these columns are.

        Of a version that is named, where all columns are: conditions may read others.
        """
        view = dict(self.view)
        if "columns" in view and not self.is_pinned:
            view["columns"] = {n: of for n, of in view["columns"].items() if n in columns}
        return canonical_json(view).decode() if view else None


@dataclass(frozen=True, slots=True)
class View:
    """The rows and the columns that a table has of a data file."""

    deleted: Rows = field(default_factory=lambda: np.empty(0, np.int64))  # of the file
    # By the name in the table, that in the file. Empty: the file's own names.
    names: Mapping[str, str] = field(default_factory=dict)
    # The values of columns that the file need not hold, the same in each row.
    values: Mapping[str, pa.Scalar] = field(default_factory=dict)

    @property
    def has_own_columns(self) -> bool:
        return not self.names and not self.values

    def live_rows(self, sizes: Iterable[int]) -> list[int]:
        """Of consecutive parts of the file with these numbers of rows, the rows that remain."""
        bounds = np.cumsum([0, *sizes])
        deleted = np.diff(np.searchsorted(self.deleted, bounds))
        return [int(rows) for rows in np.diff(bounds) - deleted]

    def live(self, batches: Iterable[pa.RecordBatch], start: int) -> Iterator[pa.RecordBatch]:
        """The batches of the file from row `start` on, without the deleted rows."""
        for batch in batches:
            end = start + batch.num_rows
            first, last = np.searchsorted(self.deleted, [start, end])
            if first < last:
                mask = np.ones(batch.num_rows, np.bool_)
                mask[self.deleted[first:last] - start] = False
                yield batch.filter(pa.array(mask))
            else:
                yield batch
            start = end

    def schema(self, of_file: pa.Schema) -> pa.Schema:
        """The columns of the table that have values in a file with this schema."""
        if self.has_own_columns:
            return of_file
        fields = list(of_file)
        if self.names:
            held = {own.name: own for own in of_file}
            named = ((name, held.get(own)) for name, own in self.names.items())
            fields = [own.with_name(name) for name, own in named if own is not None]
        present = {own.name for own in fields}
        more = [pa.field(n, v.type) for n, v in self.values.items() if n not in present]
        return pa.schema([*fields, *more], of_file.metadata)

    def batches(
        self, read: Callable[[Names], Iterator[pa.RecordBatch]], of_file: pa.Schema, columns: Names
    ) -> Iterator[pa.RecordBatch]:
        """These columns of the table (None: all), where `read` reads columns of the file."""
        if self.has_own_columns:
            yield from read(columns)
            return
        schema = self.schema(of_file)
        read_columns = schema.names if columns is None else list(columns)
        fields = pa.schema([schema.field(name) for name in read_columns])
        own = [self.names.get(name, name) for name in read_columns]
        held = [name for name in own if name in of_file.names]
        for batch in read(held or of_file.names[:1]):
            arrays = [
                batch.column(in_file)
                if in_file in held
                else pa.repeat(self.values[name], len(batch))
                for name, in_file in zip(read_columns, own, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=fields) if read_columns else batch


def view_of(version: ObjectVersion) -> View:
    """The view of an object; of a plain file, all of it."""
    return View() if version.view is None else _parsed(version.view)


@lru_cache(maxsize=64)
def _parsed(text: str) -> View:
    content = parse_json(text)
    bounds = np.cumsum(np.array(content.get("deleted", ()), np.int64)).reshape(-1, 2)
    runs = [np.arange(start, end, dtype=np.int64) for start, end in bounds]
    values = {
        name: pa.scalar(value, pa.string()).cast(pa.type_for_alias(kind))
        for name, (kind, value) in content.get("values", {}).items()
    }
    deleted = np.concatenate(runs) if runs else np.empty(0, np.int64)
    return View(deleted, content.get("names", {}), values)


def deletions(rows: Rows) -> list[int]:
    """Deleted rows as the lengths of runs: of rows that are kept, of deleted ones, and so on."""
    if not len(rows):
        return []
    gaps = np.flatnonzero(np.diff(rows) > 1)
    starts, ends = rows[np.r_[0, gaps + 1]], rows[np.r_[gaps, len(rows) - 1]] + 1
    lengths: list[int] = np.diff(np.stack([starts, ends], 1).ravel(), prepend=0).tolist()
    return lengths


def constants(values: Iterable[tuple[str, object, pa.DataType]]) -> dict[str, list[str | None]]:
    """Columns with one value each as JSON: the type, or string if it has no name, and the value.

    Bytes and types that extend Arrow's are left out: they may have no text.
    """
    columns = {}
    for name, value, kind in values:
        if isinstance(kind, pa.BaseExtensionType) or "binary" in str(kind):
            continue
        text = pa.scalar(value, kind).cast(pa.string()).as_py()
        try:
            columns[name] = [str(pa.type_for_alias(str(kind))), text]
        except ValueError:
            columns[name] = ["string", text]
    return columns
