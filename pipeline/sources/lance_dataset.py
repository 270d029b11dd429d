"""Lance datasets: the fragments of a version, and the rows of a shard of one.

Entry points: `lance_files` and `fragment_at`. The path of an object is that of the fragment's first
data file. Its view has the fragment's id, the file of deleted rows, and where the columns are that
a spec names: a fragment that has the same in another version keeps its shards.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa

from pipeline.errors import ForeignContentError, Problem, SpecError, StorageError, one_line
from pipeline.hashes import parse_json
from pipeline.sources.documents import Names
from pipeline.sources.shards import ObjectVersion, Shard, Unit
from pipeline.sources.streams import Options, changed, fetching
from pipeline.sources.views import DataFile
from pipeline.spec.locations import TablePath
from pipeline.stores.file_systems import file_system_at, native_options

FOLDER = "/data/"  # of a dataset, with its data files
# Few rows at a time, as of Parquet: Lance holds READ_AHEAD + 1 batches.
BATCH_ROWS = 256
READ_AHEAD = 2
SAMPLE_ROWS = 1024  # of a fragment, to estimate the length of its texts


def lance_files(table: TablePath, options: Options) -> tuple[int, list[DataFile]]:
    """The number of a version, and its fragments; raises as `table_files`."""
    root = table.place if "://" in table.place else file_system_at(table.place, {})[1]
    version = table.version
    number = int(version) if version is not None and version.isdecimal() else version
    dataset = _opened(root.rstrip("/"), tuple(native_options(root, options).items()), number)
    files = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata.to_json()
        if any(file["base_id"] is not None for file in metadata["files"]):
            fix = "a version of it has files in another folder; write a copy of the dataset"
            raise SpecError([Problem("input.path", fix, table.place)])
        path = f"{root.rstrip('/')}{FOLDER}{metadata['files'][0]['path']}"
        view = _view(dataset, metadata)
        files.append(DataFile(path, view, "lance", is_pinned=version is not None))
    return dataset.version, files


def _opened(
    root: str, native: tuple[tuple[str, str], ...], version: int | str | None = None
) -> Any:
    import lance

    # — Lance warns at each start of a process; the processes of a run do not use its threads
    warnings.filterwarnings("ignore", "lance is not fork-safe")
    try:
        return lance.dataset(root, version, storage_options=dict(native) or None)
    except ValueError as error:
        if not re.search("not found|does not exist", str(error), re.IGNORECASE):
            raise OSError(one_line(error)) from error
        which = "Lance dataset" if version is None else f"Lance dataset with version {version}"
        fix = f"there is no {which}: {one_line(error)}"
        raise SpecError([Problem("input.path", fix, root)]) from error


def _view(dataset: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The view of a fragment in a version, with all columns of the dataset."""
    columns: dict[str, list[list[Any]]] = {}
    for column in dataset.lance_schema.fields():
        ids = {*ids_of(column)}
        held = ([file["path"], sorted(ids & {*file["fields"]})] for file in metadata["files"])
        columns[column.name()] = [[path, own] for path, own in held if own]
    deletion = metadata["deletion_file"]
    view = {"fragment": metadata["id"], "columns": columns, "overlays": metadata.get("overlays")}
    view["deletion"] = None if deletion is None else [deletion["read_version"], deletion["id"]]
    return {name: value for name, value in view.items() if value not in (None, [])}


def ids_of(column: Any) -> Iterator[int]:
    """The ids of a column and of the fields inside it."""
    yield column.id()
    for child in column.children():
        yield from ids_of(child)


def fragment_at(version: ObjectVersion, options: Options) -> tuple[Any, pa.Schema]:
    """The fragment as it was when the object was cut, and the columns of its dataset.

    StorageError if no version of the dataset has it any more.
    """
    root, folder, _ = version.path.rpartition(FOLDER)
    if version.view is None or not folder:
        fix = "it is a file of a Lance dataset; name the folder of the dataset"
        raise ForeignContentError(f"{version.path}: cannot be read: {fix}")
    with _fetched(version.path):
        return _unchanged(version, root, tuple(native_options(root, options).items()))


@contextmanager
def _fetched(path: str) -> Iterator[None]:
    """StorageError for what Lance cannot fetch. It raises errors of Arrow, as for bad content."""
    try:
        with fetching(path):
            try:
                yield
            except pa.ArrowException as error:
                if "corrupt file" in str(error):
                    raise
                raise OSError(one_line(error)) from error
    except StorageError:
        _unchanged.cache_clear()  # — it may hold a version, or credentials, of before
        raise


def fragment_unit(fragment: Any, path: str, columns: Sequence[str]) -> Unit:
    """All rows of a fragment, with the bytes of these columns that a sample of the rows has."""
    with _fetched(path):
        rows: int = fragment.count_rows()
        sample = fragment.scanner(columns=[*columns], limit=SAMPLE_ROWS).to_table()
    return Unit(rows, sample.nbytes * rows // max(1, sample.num_rows))


def fragment_batches(fragment: Any, shard: Shard, columns: Names) -> Iterator[pa.RecordBatch]:
    """These columns (None: all) of the rows of a shard of a fragment."""
    with _fetched(shard.path):
        scanner = fragment.scanner(
            columns=None if columns is None else [*columns],
            offset=shard.piece.start_row,
            limit=shard.rows,
            batch_size=BATCH_ROWS,
            batch_readahead=READ_AHEAD,
            with_row_id=columns is not None and not columns,  # — else there would be no batch
        )
        yield from scanner.to_batches()


@lru_cache(maxsize=16)
def _unchanged(
    version: ObjectVersion, root: str, native: tuple[tuple[str, str], ...]
) -> tuple[Any, pa.Schema]:
    """The newest version of the dataset in which the fragment is the same; changed if none is."""
    view = parse_json(str(version.view))
    newest = _opened(root, native)
    if (fragment := _same(newest, view)) is not None:
        return fragment, newest.schema
    for number in sorted((each["version"] for each in newest.versions()), reverse=True):
        with suppress(SpecError):  # — a version that was cleaned up meanwhile
            dataset = _opened(root, native, number)
            if (fragment := _same(dataset, view)) is not None:
                return fragment, dataset.schema
    raise changed(version.path, ": no version of the dataset has it as it was")


def _same(dataset: Any, view: dict[str, Any]) -> Any:
    """The fragment in this version of the dataset; None if it is not the same there."""
    if (fragment := dataset.get_fragment(view["fragment"])) is None:
        return None
    now = _view(dataset, fragment.metadata.to_json())
    now["columns"] = {name: now["columns"].get(name) for name in view["columns"]}
    return fragment if now == view else None
