"""The data files of a snapshot of an Iceberg table, as the package `pyiceberg` lists them.

Entry point: `iceberg_files`. The catalog is one of pyiceberg's own configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipeline.errors import Problem, SpecError, UnavailableError, one_line
from pipeline.sources.streams import Options, opened, reading
from pipeline.sources.views import DataFile, Rows, constants, deletions
from pipeline.spec.locations import TablePath

FILES_AT_ONCE = 16
_EQUALITY = 2  # the content of a file that names values of deleted rows


def iceberg_files(table: TablePath, options: Options) -> tuple[int, list[DataFile]]:
    """The id of a snapshot, and its data files; raises as `table_files`."""
    loaded = _loaded(table)
    if (version := table.version) is None:
        snapshot = loaded.current_snapshot()
    elif version.isdecimal():
        snapshot = loaded.snapshot_by_id(int(version))
    else:
        snapshot = loaded.snapshot_by_name(version)
    if snapshot is None:
        named = ", ".join(map(str, loaded.metadata.refs)) or "none"
        fix = f"the table has no such snapshot, branch or tag; branches and tags: {named}"
        raise SpecError([Problem("input.path", fix, version or table.place)])
    deletes = loaded.inspect.delete_files(snapshot.snapshot_id).select(["content", "file_path"])
    deletes = deletes.to_pylist()
    if by_value := [each["file_path"] for each in deletes if each["content"] == _EQUALITY]:
        fix = f"{len(by_value)} files delete rows by value; compact the table (rewrite_data_files)"
        raise SpecError([Problem("input.path", fix, min(by_value))])
    # — the columns are those of the table now, or of the snapshot that is named
    scan = loaded.scan(snapshot_id=None if version is None else snapshot.snapshot_id)
    return snapshot.snapshot_id, _data_files(loaded, scan, options)


def _loaded(table: TablePath) -> Any:
    """The table of its catalog; SpecError if it is not there, UnavailableError without a reply."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, NotInstalledError

    catalog, _, name = table.place.partition("/")
    try:
        return load_catalog(catalog).load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError, NotInstalledError, ValueError) as error:
        # — ValueError of a catalog that pyiceberg's configuration does not have
        fix = "write iceberg://CATALOG/NAMESPACE.TABLE of pyiceberg's configuration: "
        fix += one_line(error)
        raise SpecError([Problem("input.path", fix, table.place)]) from error
    except Exception as error:  # — each kind of catalog has a client with its own classes
        raise UnavailableError(
            f"the catalog {catalog} did not answer: {one_line(error)}; check its configuration in "
            f"pyiceberg, or run again to go on"
        ) from error


def _data_files(loaded: Any, scan: Any, options: Options) -> list[DataFile]:
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.schema import make_compatible_name

    tasks = list(scan.plan_files())
    if odd := [t.file for t in tasks if t.file.file_format != "PARQUET"]:
        fix = f"{len(odd)} data files are {odd[0].file_format.value}; write the table as Parquet"
        raise SpecError([Problem("input.path", fix, odd[0].file_path)])
    schema = scan.projection()
    paths = [task.file.file_path for task in tasks]
    named: list[dict[str, str]] = [{} for _ in paths]
    deletes = {delete.file_path: delete for task in tasks for delete in task.delete_files}
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        renamed = _has_renamed(schema, loaded.metadata.schemas)
        # — writers put `page_x2Dtext` in files for `page-text`
        if renamed or any(make_compatible_name(own.name) != own.name for own in schema.fields):
            names = partial(_names, schema=schema, options=options, renamed=renamed)
            named = [*pool.map(names, paths)]
        read = pool.map(partial(_positions, options=options), deletes.values())
        positions = dict(zip(deletes, read, strict=True))
    kinds = schema_to_pyarrow(schema, include_field_ids=False)
    files = []
    for task, path, own in zip(tasks, paths, named, strict=True):
        view: dict[str, Any] = {"names": own} if own else {}
        partition = zip(loaded.specs()[task.file.spec_id].fields, task.file.partition, strict=True)
        values = constants(
            (name, value, kinds.field(name).type)
            for part, value in partition
            if str(part.transform) == "identity"
            and (name := schema.find_column_name(part.source_id)) in kinds.names
        )
        if values:
            view["values"] = values
        deleted_rows = [positions[d.file_path].get(task.file.file_path) for d in task.delete_files]
        if rows := [each for each in deleted_rows if each is not None]:
            view["deleted"] = deletions(np.unique(np.concatenate(rows)))
        files.append(DataFile(path, view))
    return files


def _has_renamed(schema: Any, schemas: Iterable[Any]) -> bool:
    """Whether a column had another name, or its name was another column's.

    SpecError if a field inside a column had another name.
    """
    names = {own.field_id: own.name for own in schema.fields}
    ids = {name: id for id, name in names.items()}
    renamed = False
    for before in schemas:
        for own in before.fields:
            current = names.get(own.field_id, own.name), ids.get(own.name, own.field_id)
            renamed |= current != (own.name, own.field_id)
        for id in set(before.field_ids) & set(schema.field_ids) - names.keys():
            was, now = (each.find_column_name(id).rpartition(".")[2] for each in (before, schema))
            if was != now:
                fix = f"this field is called {was!r} in older files; write a copy of the table"
                raise SpecError([Problem("input.path", fix, schema.find_column_name(id))])
    return renamed


def _names(path: str, *, schema: Any, options: Options, renamed: bool) -> dict[str, str]:
    """By the name of a column, that in this file, found by the column's id; empty if all agree."""
    with reading(path), opened(path, options, ahead=False) as file:
        in_file = pq.read_schema(file)
    ids = {own.name: (own.metadata or {}).get(b"PARQUET:field_id") for own in in_file}
    if None in ids.values():
        if not renamed:
            return {}
        fix = f"{path} has no ids of columns, and columns were renamed; write a copy of the table"
        raise SpecError([Problem("input.path", fix)])
    by_id = {int(id): name for name, id in ids.items() if id is not None}
    names = {own.name: by_id[own.field_id] for own in schema.fields if own.field_id in by_id}
    hidden = ids.keys() - names.values()
    same = all(name == in_file for name, in_file in names.items())
    return {} if same and hidden.isdisjoint(own.name for own in schema.fields) else names


def _positions(delete: Any, *, options: Options) -> dict[str, Rows]:
    """By the location of a data file, the rows that a file of positions deletes."""
    path = delete.file_path
    with reading(path), opened(path, options) as file:
        if delete.file_format == "PUFFIN":
            from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
            from pyiceberg.table.puffin import PuffinFile

            vectors = deletion_vectors_from_puffin_file(PuffinFile(file.read()))
            return {each.referenced_data_file: each.to_vector().to_numpy() for each in vectors}
        table = pq.ParquetFile(file).read(["file_path", "pos"])
    grouped = table.group_by("file_path").aggregate([("pos", "list")])
    lists = zip(grouped["file_path"].to_pylist(), grouped["pos_list"], strict=True)
    return {location: rows.values.to_numpy() for location, rows in lists}
