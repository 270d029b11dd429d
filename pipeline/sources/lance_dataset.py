"""Lance datasets: the fragments of a version, and the rows of a shard of one.

Entry points: `lance_files`, `lance_unit` and `lance_table`. The path of an object is that of the
fragment's first data file. Its view has the fragment's id, the file of deleted rows, and where the
columns are that a spec names: a fragment that has the same in another version keeps its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa

from pipeline.errors import Problem, SpecError, StorageError, UnavailableError, one_line
from pipeline.hashes import parse_json
from pipeline.sources.documents import Names
from pipeline.sources.shards import ObjectVersion, Shard, Unit
from pipeline.sources.streams import Options, changed
from pipeline.sources.views import DataFile
from pipeline.spec.locations import TablePath
from pipeline.stores.file_systems import file_system_at, native_options

FOLDER = "/data/"  # of a dataset, with its data files
# Few rows at a time, as of Parquet: Lance holds READ_AHEAD + 1 batches.
BATCH_ROWS = 256
READ_AHEAD = 2
SAMPLE_ROWS = 1024  # of a fragment, which say how long its texts are


def lance_files(table: TablePath, options: Options) -> tuple[int, list[DataFile]]:
    """The number of a version, and its fragments; raises as `table_files`."""
    root = table.place if "://" in table.place else file_system_at(table.place, {})[1]
    version = table.version
    wanted = int(version) if version is not None and version.isdecimal() else version
    dataset = _opened(root.rstrip("/"), tuple(native_options(root, options).items()), wanted)
    files = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata.to_json()
        if any(file["base_id"] is not None for file in metadata["files"]):
            fix = "a version of it has files in another folder; write a copy of the dataset"
            raise SpecError([Problem("input.path", fix, table.place)])
        path = f"{root.rstrip('/')}{FOLDER}{metadata['files'][0]['path']}"
        files.append(DataFile(path, _view(dataset, metadata), "lance"))
    return dataset.version, files


def _opened(
    root: str, native: tuple[tuple[str, str], ...], version: int | str | None = None
) -> Any:
    try:
        import lance
    except ImportError as error:
        fix = f"a Lance dataset needs a package ({error}); pip install 'corpus-assay[lance]'"
        raise SpecError([Problem("input.path", fix, root)]) from error
    try:
        return lance.dataset(root, version, storage_options=dict(native) or None)
    except ValueError as error:
        which = "Lance dataset" if version is None else f"Lance dataset with version {version}"
        fix = f"there is no {which}: {one_line(error)}"
        raise SpecError([Problem("input.path", fix, root)]) from error
    except OSError as error:
        line = f"{root}: the Lance dataset cannot be read: {one_line(error)}"
        if "://" in root:
            raise UnavailableError(f"{line}; check the endpoint, or run again to go on") from error
        raise StorageError(line) from error


def _view(dataset: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """What a version says of a fragment, with all columns of the dataset."""
    columns: dict[str, list[list[Any]]] = {}
    for column in dataset.lance_schema.fields():
        ids = {*_ids(column)}
        held = ([file["path"], sorted(ids & {*file["fields"]})] for file in metadata["files"])
        columns[column.name()] = [[path, own] for path, own in held if own]
    deletion = metadata["deletion_file"]
    view = {"fragment": metadata["id"], "columns": columns, "overlays": metadata.get("overlays")}
    view["deletion"] = None if deletion is None else [deletion["read_version"], deletion["id"]]
    return {name: value for name, value in view.items() if value not in (None, [])}


def _ids(column: Any) -> Iterator[int]:
    """The ids of a column and of the fields inside it."""
    yield column.id()
    for child in column.children():
        yield from _ids(child)


def lance_unit(version: ObjectVersion, options: Options) -> tuple[pa.Schema, Callable[[], Unit]]:
    """The schema of the dataset, and what measures the fragment: from a sample of its rows."""
    fragment, schema = _fragment(version, options)

    def unit() -> Unit:
        rows: int = fragment.count_rows()
        read = [name for name in (version.text_column, version.image_column) if name is not None]
        sample = fragment.scanner(columns=read, limit=SAMPLE_ROWS).to_table()
        return Unit(rows, sample.nbytes * rows // max(1, sample.num_rows))

    return schema, unit


def lance_table(
    shard: Shard, options: Options
) -> tuple[pa.Schema, Callable[[Names], Iterator[pa.RecordBatch]]]:
    """The schema of the dataset, and what reads columns (None: all) of the shard's rows."""
    fragment, schema = _fragment(shard.version, options)

    def batches(columns: Names) -> Iterator[pa.RecordBatch]:
        scanner = fragment.scanner(
            columns=None if columns is None else [*columns],
            offset=shard.piece.start_row,
            limit=shard.rows,
            batch_size=BATCH_ROWS,
            batch_readahead=READ_AHEAD,
            with_row_id=columns is not None and not columns,  # — else there would be no batch
        )
        yield from scanner.to_batches()

    return schema, batches


def _fragment(version: ObjectVersion, options: Options) -> tuple[Any, pa.Schema]:
    """The fragment, and the columns of its dataset, as they were when the object was cut."""
    root, folder, _ = version.path.rpartition(FOLDER)
    if version.view is None or not folder:
        fix = "is a file of a Lance dataset; name the folder of the dataset"
        raise SpecError([Problem("input.path", fix, version.path)])
    return _found(version, root, tuple(native_options(root, options).items()))


@lru_cache(maxsize=16)
def _found(
    version: ObjectVersion, root: str, native: tuple[tuple[str, str], ...]
) -> tuple[Any, pa.Schema]:
    """The newest version of the dataset in which the fragment is the same; changed if none is."""
    view = parse_json(str(version.view))
    newest = _opened(root, native)
    for number in sorted((each["version"] for each in newest.versions()), reverse=True):
        with suppress(ValueError, OSError):  # — a version that was cleaned up meanwhile
            dataset = newest if number == newest.version else newest.checkout_version(number)
            fragment = dataset.get_fragment(view["fragment"])
            if fragment is not None:
                now = _view(dataset, fragment.metadata.to_json())
                now["columns"] = {n: now["columns"].get(n) for n in view["columns"]}
                if now == view:
                    return fragment, dataset.schema
    raise changed(version.path, ": no version of the dataset has it as it was")
