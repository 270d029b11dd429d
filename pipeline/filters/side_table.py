"""The table that a filter's rule joins: values of another tool for the documents.

Entry point: `SideTable`. DuckDB joins it with the labelled rows; it may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.csv import ParseOptions
from pyarrow.fs import FSSpecHandler, PyFileSystem

from pipeline.errors import Problem, SpecError, StorageError, listed, one_line
from pipeline.sources.listing import remote_etag
from pipeline.sources.rule import ALIAS, named
from pipeline.sources.source import find_files
from pipeline.sources.streams import Options
from pipeline.sources.text_files import file_path
from pipeline.spec.filters import JoinSpec

JOINED = "joined"  # the column of its columns, in a rule
PLACE = "filter.join"
# By the ending of a name, the formats that Arrow reads without holding a file in memory.
_CSV = ds.CsvFileFormat(parse_options=ParseOptions(newlines_in_values=True))
_FORMATS = {"parquet": "parquet", "csv": _CSV, "jsonl": "json", "ndjson": "json"}
_KEY = "_key"


@dataclass(frozen=True, slots=True)
class SideTable:
    """The columns of a side table that a rule reads."""

    on: str  # the column that both tables have
    field: pa.Field  # the struct of its columns
    version: tuple[tuple[str, str], ...]  # its files, each with an etag
    dataset: ds.Dataset

    @classmethod
    def of(cls, spec: JoinSpec, options: Options, columns: Collection[str]) -> SideTable:
        """The table with these columns; SpecError if it has no such files or columns."""
        file_system, _, infos = find_files(spec.path, options, key=f"{PLACE}.path")
        names = sorted(str(info["name"]) for info in infos)
        endings = {name.lower().removesuffix(".gz").rpartition(".")[2] for name in names}
        if len(endings) > 1 or not endings <= _FORMATS.keys():
            fix = f"has {listed(sorted(endings))} files; name files of one of {listed(_FORMATS)}"
            raise SpecError([Problem(f"{PLACE}.path", fix, spec.path)])
        files, format = PyFileSystem(FSSpecHandler(file_system)), _FORMATS[endings.pop()]
        with _reading(spec.path):
            table = ds.dataset(names, filesystem=files, format=format)
        version = ((file_path(file_system, info["name"]), info) for info in infos)
        etags = tuple(sorted((path, remote_etag(path, info)) for path, info in version))
        kinds = {column.name: column.type for column in table.schema}
        has = f"{spec.path} has: {listed(kinds)}"
        for name in (spec.on, *columns):
            if name not in kinds:
                place = f"{PLACE}.on" if name == spec.on else PLACE
                raise SpecError([Problem(place, f"there is no such column; {has}", name)])
        # — an id is as it is written: 007 is not 7, and a text like a date is no time
        if format is _CSV or (format == "json" and pa.types.is_timestamp(kinds[spec.on])):
            kinds[spec.on] = pa.string()
            table = ds.dataset(names, pa.schema([*kinds.items()]), format, filesystem=files)
        may_be_keys = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)
        if not any(is_kind(kinds[spec.on]) for is_kind in may_be_keys):
            fix = f"is {kinds[spec.on]} there; name a column of strings or whole numbers"
            raise SpecError([Problem(f"{PLACE}.on", fix, spec.on)])
        own = pa.struct([(name, kinds[name]) for name in columns])
        return cls(spec.on, pa.field(JOINED, own), etags, table)

    def join(self, connection: duckdb.DuckDBPyConnection, rows: str, columns: str) -> str:
        """A query: these columns of a table of rows, each with the columns of this table.

        A row without a match has null there. SpecError if two different rows have one key.
        """
        names = [column.name for column in self.field.type]
        struct = ", ".join(f"{named(name)} := {named(name)}" for name in names)
        key = f"{named(self.on)}::VARCHAR"
        if isinstance(self.dataset.format, ds.CsvFileFormat):
            key = f"nullif({key}, '')"
        query = (
            f"select {key} as {_KEY}, struct_pack({struct}) as {JOINED} "
            f"from outside where {key} is not null"
        )
        no_rows = pa.RecordBatch.from_pylist([], self.dataset.schema)
        with _reading(PLACE):
            # — one at a time: DuckDB would call Python's file systems from its own threads
            batches = self.dataset.to_batches(columns=[*dict.fromkeys([self.on, *names])])
            for number, batch in enumerate(chain([no_rows], batches)):
                connection.register("outside", pa.Table.from_batches([batch]))
                begin = "insert into side" if number else "create table side as"
                connection.execute(f"{begin} {query}")
        connection.execute("create view sides as select distinct * from side")
        twins = f"select {_KEY} from sides group by {_KEY} having count(*) > 1 order by 1 limit 1"
        if twin := connection.execute(twins).fetchone():
            fix = f"has different rows with this {self.on}; keep one of them"
            raise SpecError([Problem(f"{PLACE}.path", fix, twin[0])])
        joined_rows = (
            f"select {rows}.*, {JOINED} from {rows} left join sides on {rows}.{self.on} = {_KEY}"
        )
        return f"select {columns} from ({joined_rows}) as {ALIAS}"


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """StorageError in one line for what Arrow, or DuckDB through it, cannot read."""
    try:
        yield
    except (OSError, pa.ArrowException, duckdb.InvalidInputException) as error:
        raise StorageError(f"{path}: cannot be read: {one_line(error)}") from error
