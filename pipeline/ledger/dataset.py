"""The rows of a finished output: one row per document, one struct column per task.

Entry point: `open_labels`. DuckDB, Polars, pandas and Arrow read the result as an Arrow stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipeline.errors import Problem, SpecError
from pipeline.ledger.flat import flat_columns, flatten
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.ledger.snapshots import Contents, contents
from pipeline.stores.store import Store, open_store

if TYPE_CHECKING:
    import pandas
    import polars


def open_labels(
    output: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    snapshot: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LabelDataset:
    """The rows of an output's snapshot.

    Args:
        output: The `output` of the spec: a folder, or a URL such as `s3://bucket/prefix`.
        tasks: Names of the tasks to show (default: all). Files of other tasks are not read.
        snapshot: The snapshot's number (default: the current one).
        storage_options: The fsspec options of the output's store.

    Returns:
        A dataset that DuckDB, Polars, pandas and Arrow read without a join.

    Raises:
        SpecError: The snapshot has no such task, or an option is wrong.
        RefusedError: The output is in a store of an unsupported kind.
        StorageError: The output has no such snapshot, or it cannot be read.

    Examples:
        >>> labels = open_labels("out/my_corpus", tasks=["toxic"])
        >>> duckdb.sql("select count(toxic.label) from labels").fetchall()
        [(10,)]
    """
    store = open_store(str(output), dict(storage_options or {}))
    shown = contents(store, snapshot)
    names = tuple(dict.fromkeys(shown.tasks if tasks is None else tasks))
    fix = f"snapshot {shown.number} of {store.url} has no such task; it has: "
    fix += ", ".join(shown.tasks)
    if unknown := [Problem("tasks", fix, task) for task in names if task not in shown.tasks]:
        raise SpecError(unknown)
    return LabelDataset(store, shown, names)


@dataclass(frozen=True, slots=True)
class LabelDataset:
    """The rows of one snapshot, read a few shards at a time, as often as they are asked for.

    It is an Arrow stream (`__arrow_c_stream__`): DuckDB finds it by the name of a Python variable,
    and `polars.DataFrame(labels)` and `pyarrow.table(labels)` take it. A stream reads the files of
    all tasks of the dataset: name the tasks in `open_labels` to read fewer.
    """

    _store: Store
    _contents: Contents
    _tasks: tuple[str, ...]

    def __repr__(self) -> str:
        tasks = ", ".join(self._tasks)
        return f"<LabelDataset: {tasks}; {self._contents.rows:,} documents of {self._store.url}>"

    @property
    def schema(self) -> pa.Schema:
        """The columns of every document, then a struct for each task."""
        return wide_schema(self._contents, self._tasks)

    @property
    def snapshot(self) -> int:
        """The snapshot's number."""
        return self._contents.number

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Each task's labels, in order."""
        return {task: self._contents.tasks[task].labels for task in self._tasks}

    def to_batches(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows, batch by batch: these columns of the rows that pass the filter.

        A column is `doc_id`, `toxic` or `toxic.label`. Without a filter, only the files that have
        these columns are read.
        """
        schema = self.schema
        if columns is not None and filter is None:
            roots = {name.partition(".")[0] for name in columns}
            # — one column at least: without any, a batch has no rows
            read = [name for name in schema.names if name in roots] or schema.names[:1]
            schema = pa.schema([schema.field(name) for name in read])
        for batch in aligned_batches(self._store, self._contents, schema):
            yield from _scanner(batch, columns, filter).to_batches()

    def to_table(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:
        """The rows of `to_batches` in memory."""
        batches = list(self.to_batches(columns, filter))
        return pa.Table.from_batches(
            batches, _scanner(self.schema.empty_table(), columns, filter).projected_schema
        )

    def to_pandas(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pandas.DataFrame:
        """The rows as a pandas DataFrame with the flat columns of `assay export`.

        Args:
            columns: Columns to read, such as `doc_id` and `toxic` (default: all). A task means all
                of its values: the column `toxic` has the label, `toxic_p_clean` a probability.
            filter: A condition such as `pyarrow.compute.field("n_chars") > 100`.

        Returns:
            One row a document.

        Raises:
            SpecError: pandas is not installed.
            StorageError: A file of the snapshot cannot be read, or is another by now.

        Examples:
            >>> labels = open_labels("out/my_corpus")
            >>> labels.to_pandas(["doc_id", "toxic"]).groupby("toxic").toxic_margin.count().sum()
            np.int64(10)
        """
        _require("pandas")
        return self._flat(columns, filter).to_pandas()

    def to_polars(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> polars.DataFrame:
        """The rows as a Polars DataFrame with the flat columns of `assay export`.

        `polars.DataFrame(labels)` gives the columns of `open_labels`: one struct for each task.

        Args:
            columns: As in `to_pandas`.
            filter: As in `to_pandas`.

        Returns:
            One row a document.

        Raises:
            SpecError: Polars is not installed.
            StorageError: A file of the snapshot cannot be read, or is another by now.

        Examples:
            >>> labels = open_labels("out/my_corpus")
            >>> labels.to_polars(["doc_id", "toxic"]).height
            10
        """
        frame: polars.DataFrame = _require("polars").from_arrow(self._flat(columns, filter))
        return frame

    def count_rows(self) -> int:
        """The number of rows; no file is read."""
        return self._contents.rows

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        batches = aligned_batches(self._store, self._contents, self.schema)
        reader = pa.RecordBatchReader.from_batches(self.schema, batches)
        return reader.__arrow_c_stream__(requested_schema)

    def _flat(self, columns: Sequence[str] | None, filter: pc.Expression | None) -> pa.Table:
        rows = self.to_table(columns, filter)
        return flatten(rows, flat_columns(rows.schema))


def _scanner(
    rows: pa.Table | pa.RecordBatch, columns: Sequence[str] | None, filter: pc.Expression | None
) -> ds.Scanner:
    """These columns of the rows that pass the filter.

    One scanner of all batches would read them in a thread of Arrow's own. Where a file cannot be
    read, that thread may call Python when it has ended: the process is aborted.
    """
    return ds.dataset(rows).scanner(columns=columns, filter=filter, use_threads=False)


def _require(package: str) -> Any:
    """The imported package; SpecError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fix = f"needs {package} ({error}); pip install 'corpus-assay[frames]'"
        raise SpecError([Problem(f"to_{package}", fix, package)]) from error
