"""The data files of a version of a Delta table, as the package `deltalake` lists them.

Entry point: `delta_files`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from pipeline.errors import Problem, SpecError, StorageError, one_line
from pipeline.sources.streams import Options
from pipeline.sources.views import DataFile, constants, deletions
from pipeline.spec.locations import TablePath
from pipeline.stores.file_systems import file_system_at, native_options

_PHYSICAL = "delta.columnMapping.physicalName"


def delta_files(table: TablePath, options: Options) -> tuple[int, list[DataFile]]:
    """The number of a version, and its data files; raises as `table_files`."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    if table.version is not None and not table.version.isdecimal():
        fix = "the version of a Delta table is a number; write delta+PATH@12"
        raise SpecError([Problem("input.path", fix, table.version)])
    root = table.place if "://" in table.place else file_system_at(table.place, {})[1]
    number = None if table.version is None else int(table.version)
    try:
        opened = DeltaTable(root, version=number, storage_options=native_options(root, options))
        return opened.version(), _data_files(opened, root)
    except TableNotFoundError as error:
        fix = f"there is no Delta table: {one_line(error)}"
        raise SpecError([Problem("input.path", fix, table.place)]) from error
    except DeltaError as error:
        which = "the Delta table" if number is None else f"version {number} of the Delta table"
        fix = f"{which} cannot be read: {one_line(error)}"
        raise SpecError([Problem("input.path", fix, table.place)]) from error


def _data_files(opened: Any, root: str) -> list[DataFile]:
    actions = pa.table(opened.get_add_actions(flatten=True))
    partitions = opened.metadata().partition_columns
    names, deleted = _names(opened, partitions), _deleted(opened)
    files = []
    # — a path of the log is encoded as in a URL; decoded, it may be the encoded name of a folder
    for row, inside in enumerate(map(unquote, actions.column("path").to_pylist())):
        view: dict[str, Any] = {"names": names} if names else {}
        if partitions:
            values = ((name, actions.column(f"partition.{name}")[row]) for name in partitions)
            view["values"] = constants((name, v.as_py(), v.type) for name, v in values)
        if runs := deleted.pop(inside, None):
            view["deleted"] = runs
        path = inside.removeprefix("file://") if "://" in inside else f"{root.rstrip('/')}/{inside}"
        files.append(DataFile(path, view))
    if deleted or len({file.path for file in files}) < len(files):
        raise StorageError(
            f"{root}: the log of the table has a data file twice, or deletes rows of a file that "
            f"it does not have; repair the table"
        )
    return files


def _names(opened: Any, partitions: Collection[str]) -> dict[str, str]:
    """By the name of a column, that in the files; empty if they are the same."""
    fields = json.loads(opened.schema().to_json())["fields"]
    mode = opened.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode == "none":
        return {}
    if mode != "name" or any(_renamed_inside(each["type"]) for each in fields):
        which = "fields inside columns are mapped" if mode == "name" else f"mapping is by {mode}"
        fix = f"{which}; write a copy of the table without column mapping"
        raise SpecError([Problem("input.path", fix, opened.table_uri)])
    own = {each["name"]: each["metadata"].get(_PHYSICAL, each["name"]) for each in fields}
    named = {name: in_file for name, in_file in own.items() if name not in partitions}
    return {} if all(name == in_file for name, in_file in named.items()) else named


def _renamed_inside(kind: Any) -> bool:
    """Whether a field inside a type, which is JSON of Delta, has another name in the files."""
    if not isinstance(kind, dict):
        return False
    parts = (kind.get(name) for name in ("elementType", "keyType", "valueType"))
    return any(map(_renamed_inside, parts)) or any(
        each["metadata"].get(_PHYSICAL, each["name"]) != each["name"]
        or _renamed_inside(each["type"])
        for each in kind.get("fields", ())
    )


def _deleted(opened: Any) -> dict[str, list[int]]:
    """By data file, relative to the table, the rows that its deletion vector names."""
    if "deletionVectors" not in (opened.protocol().reader_features or ()):
        return {}
    deleted = {}
    for batch in opened.deletion_vectors():  # of another Arrow library
        vectors = pa.record_batch(batch)
        for uri, kept in zip(*(vectors.column(name) for name in vectors.schema.names), strict=True):
            path = unquote(uri.as_py()).removeprefix(unquote(opened.table_uri))
            rows = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False))
            deleted[path] = deletions(rows)
    return deleted
