"""A finished output as one Arrow dataset: a row a document, a struct column a task.

Knows Arrow's datasets, scanners and expressions. Knows nothing of how rows are read (`aligned`) or
how answers are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from pipeline.errors import Problem, SpecError
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.stores.store import Store, open_store

# Arrow's own code would look for the rows here, were a dataset handed to it past our methods.
_NOWHERE = "/labels are read through the scanner of LabelDataset alone"


def open_labels(
    output: str,
    tasks: Sequence[str] | None = None,
    *,
    snapshot: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LabelDataset:
    """The output's current snapshot, or snapshot number `snapshot`, with these tasks or with all.

    >>> labels = open_labels("s3://labels/corpus", storage_options={"profile": "labels"})
    >>> duckdb.sql("select toxic.label, count(*) from labels group by 1")
    """
    store = open_store(output, dict(storage_options or {}))
    found = contents(store, snapshot)
    wanted = tuple(found.tasks if tasks is None else tasks)
    there = ", ".join(found.tasks)
    fix = f"snapshot {found.number} of {store.url} has no such task; it has: {there}"
    unknown = [Problem("tasks", fix, task) for task in wanted if task not in found.tasks]
    if unknown:
        raise SpecError(unknown)
    return LabelDataset(store, found, dict.fromkeys(wanted))


class LabelDataset(ds.UnionDataset):  # type: ignore[misc]  # pyarrow has no types
    """The rows of a snapshot, read shard by shard as they are asked for.

    Whoever takes an Arrow dataset and asks it for a scanner can use it: DuckDB, pandas, Polars.
    """

    def __init__(self, store: Store, found: Contents, tasks: Collection[str]) -> None:
        self._store, self._found, self._tasks = store, found, tuple(tasks)
        self._schema = wide_schema(found, self._tasks)
        # — Arrow's C++ needs a dataset of its own below this one, or code that hands it there
        #   (a union, `Scanner.from_dataset`) ends the process; this one answers with an error
        format = ds.ParquetFileFormat()
        nowhere = format.make_fragment(_NOWHERE, filesystem=fs.LocalFileSystem())
        super().__init__(self._schema, [ds.FileSystemDataset([nowhere], self._schema, format)])

    @property
    def schema(self) -> pa.Schema:
        """The documents' columns, then a struct for each task."""
        return self._schema

    @property
    def snapshot(self) -> int:
        """The snapshot's number."""
        return self._found.number

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Each task's labels, in order."""
        return {task: self._found.tasks[task].labels for task in self._tasks}

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> ds.Scanner:
        """A scan, once, of these columns of the rows that pass; opens no file it has no use for."""
        schema = pa.schema([self._schema.field(name) for name in self._read(columns, filter)])
        batches = aligned_batches(self._store, self._found, schema)
        return ds.Scanner.from_batches(
            batches, schema=schema, columns=columns, filter=filter, **options
        )

    def to_batches(self, columns: Any = None, filter: Any = None, **options: Any) -> Iterator[Any]:
        """The rows, batch by batch."""
        batches: Iterator[Any] = self.scanner(columns, filter, **options).to_batches()
        return batches

    def to_table(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """The rows in memory."""
        return self.scanner(columns, filter, **options).to_table()

    def head(
        self, num_rows: int, columns: Any = None, filter: Any = None, **options: Any
    ) -> pa.Table:
        """The first rows; reads no shard after the last of them, but for those under way."""
        return self.scanner(columns, filter, **options).head(num_rows)

    def take(
        self, indices: Any, columns: Any = None, filter: Any = None, **options: Any
    ) -> pa.Table:
        """The rows at these places."""
        return self.scanner(columns, filter, **options).take(indices)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """How many rows there are, without reading any; or how many pass."""
        if filter is None:
            return self._found.rows
        counted: int = self.scanner([], filter, **options).count_rows()
        return counted

    def get_fragments(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: a fragment would be one file, and a row lies in several."""
        _refuse("get_fragments", "use scanner() or to_batches()")

    def filter(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        _refuse("filter", "write to_table(filter=...) or scanner(filter=...)")

    def sort_by(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        _refuse("sort_by", "write to_table().sort_by(...), or ask DuckDB")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        _refuse("join", "write to_table().join(...), or ask DuckDB")

    def join_asof(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        _refuse("join_asof", "write to_table().join_asof(...), or ask DuckDB")

    def replace_schema(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        _refuse("replace_schema", "write to_table(columns={name: expression})")

    def __reduce__(self) -> NoReturn:
        _refuse("pickle", "call open_labels where the rows are read")

    @property
    def children(self) -> NoReturn:
        """Not there."""
        _refuse("children", "use scanner() or to_batches()")

    @property
    def partition_expression(self) -> NoReturn:
        """Not there."""
        _refuse("partition_expression", "use scanner() or to_batches()")

    def _read(self, columns: Any, filter: Any) -> list[str]:
        """The columns that a scan reads, in the schema's order: one at least, to have its rows."""
        names = self._schema.names
        wanted = set(names) if columns is None else set()
        expressions = [] if filter is None else [filter]
        for column in columns.values() if isinstance(columns, Mapping) else columns or ():
            if isinstance(column, str):
                wanted |= _named(column, names)
            else:
                expressions.append(column)
        for expression in expressions:
            wanted |= _used(expression, self._schema)
        return [name for name in names if name in wanted] or [names[0]]


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"LabelDataset has no {what}; {instead}")


def _named(column: str, names: Sequence[str]) -> set[str]:
    """The field that a name stands for, `toxic` or `toxic.label`; all where it stands for none."""
    field = column.removeprefix(".").partition(".")[0]
    return {field} if field in names else set(names)


def _used(expression: ds.Expression, schema: pa.Schema) -> set[str]:
    """The fields that an expression reads: those without whose name it means nothing."""
    if "FieldPath(" in str(expression):  # a field by its number, which renaming does not hide
        return set(schema.names)
    _bind(expression, schema)
    used = set()
    for index, field in enumerate(schema):
        try:
            _bind(expression, schema.set(index, field.with_name(f"not {field.name}")))
        except pa.ArrowException:
            used.add(field.name)
    return used


def _bind(expression: ds.Expression, schema: pa.Schema) -> None:
    """ArrowInvalid where the expression cannot be computed on rows of the schema."""
    ds.Scanner.from_batches(iter(()), schema=schema, columns={"bound": expression})
