"""Local Delta, Iceberg and Lance tables that change, written by their own libraries.

`LAKES` has the class of each kind. deltalake writes no deletion vectors, and pyiceberg no files of
deletes: those are written here, by the formats' specifications, and the libraries read them.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record
from pyroaring import BitMap64
from whole_shards import all_documents

from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects
from pipeline.spec.schema import Columns

Rows = Mapping[str, Sequence[Any]]
COLUMNS = Columns("text", "id")
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class Delta:
    """A Delta table whose deletes are deletion vectors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "delta table"
        self.path = f"delta+{self.folder}"
        self._deleted: set[str] = set()
        self._vectors: dict[str, dict[str, Any]] = {}  # the last one of each file

    def append(self, rows: Rows) -> None:
        configuration = {"delta.enableDeletionVectors": "true"}
        write_deltalake(
            self.folder, pa.table(dict(rows)), mode="append", configuration=configuration
        )

    def delete(self, ids: Sequence[str]) -> None:
        """A commit that replaces each file that has one of these rows by itself with a vector."""
        self._deleted |= {*ids}
        actions = pa.table(DeltaTable(self.folder).get_add_actions(flatten=True)).to_pylist()
        lines: list[dict[str, Any]] = [{"commitInfo": {"timestamp": 1, "operation": "DELETE"}}]
        for action in actions:
            rows = pq.read_table(self.folder / action["path"]).column("id").to_pylist()
            if deleted := [place for place, own in enumerate(rows) if own in self._deleted]:
                file = {"path": action["path"], "dataChange": True}
                added = {"partitionValues": {}, "size": action["size_bytes"], "modificationTime": 1}
                added["stats"] = json.dumps({"numRecords": len(rows), "tightBounds": False})
                before = self._vectors.get(action["path"])
                old = {} if before is None else {"deletionVector": before}
                new = self._vectors[action["path"]] = self._vector(deleted)
                lines += [
                    {"remove": {**file, **old, "deletionTimestamp": 1}},
                    {"add": {**file, **added, "deletionVector": new}},
                ]
        log = self.folder / "_delta_log" / f"{self.version + 1:020d}.json"
        log.write_text("\n".join(map(json.dumps, lines)))

    def _vector(self, rows: Sequence[int]) -> dict[str, Any]:
        name, vector = uuid4(), _vector(rows)
        (self.folder / f"deletion_vector_{name}.bin").write_bytes(b"\x01" + vector)
        place = {"storageType": "u", "pathOrInlineDv": _z85(name), "offset": 1}
        return {**place, "sizeInBytes": len(vector) - 8, "cardinality": len(rows)}

    @property
    def version(self) -> int:
        return DeltaTable(self.folder).version()

    def read(self) -> list[dict[str, Any]]:
        table = QueryBuilder().register("t", DeltaTable(self.folder))
        return pa.table(table.execute("select * from t").read_all()).to_pylist()

    def data_files(self) -> list[str]:
        return [*map(unquote, DeltaTable(self.folder).file_uris())]


def map_columns(table: Path, names: Sequence[str]) -> None:
    """Gives the columns of a Delta table of one version other names than its files have."""
    [log] = (table / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            for number, (field, name) in enumerate(zip(schema["fields"], names, strict=True)):
                own = {"id": number + 1, "physicalName": field["name"]}
                field["metadata"] = {f"delta.columnMapping.{k}": v for k, v in own.items()}
                field["name"] = name
            action["metaData"]["schemaString"] = json.dumps(schema)
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
    log.write_text("\n".join(map(json.dumps, actions)))


def _vector(rows: Sequence[int]) -> bytes:
    """A deletion vector of Delta, which is also one of Iceberg."""
    body = struct.pack("<i", 1681511377) + BitMap64(rows).serialize()
    return struct.pack(">i", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def _z85(name: UUID) -> str:
    numbers = struct.unpack(">4I", name.bytes)
    return "".join(_Z85[n // 85**place % 85] for n in numbers for place in (4, 3, 2, 1, 0))


class Iceberg:
    """An Iceberg table in a catalog in SQLite, whose deletes are files of positions."""

    def __init__(self, folder: Path) -> None:
        self.path = "iceberg://local/docs.web"

    @property
    def table(self) -> Table:
        return load_catalog("local").load_table("docs.web")

    def append(self, rows: Rows) -> None:
        data, catalog = pa.table(dict(rows)), load_catalog("local")
        catalog.create_namespace_if_not_exists("docs")
        catalog.create_table_if_not_exists("docs.web", schema=data.schema).append(data)

    def delete(self, ids: Sequence[str]) -> None:
        paths, places = [], []
        for file in self.data_files():
            rows = pq.read_table(file.removeprefix("file://")).column("id").to_pylist()
            deleted = [place for place, own in enumerate(rows) if own in ids]
            paths += [file] * len(deleted)
            places += deleted
        kinds = pa.schema([("file_path", pa.string(), False), ("pos", pa.int64(), False)])
        self.add_deletes(pa.table([paths, places], schema=kinds), DataFileContent.POSITION_DELETES)

    def delete_by_vector(self, data_file: str, rows: Sequence[int]) -> None:
        """The deletes of one data file as a Puffin file, as in version 3 of the format."""
        blob, of_file = _vector(rows), {"referenced-data-file": data_file, "cardinality": "1"}
        place = {"offset": 4, "length": len(blob), "snapshot-id": -1, "sequence-number": -1}
        own = {"type": "deletion-vector-v1", "fields": [], **place, "properties": of_file}
        footer = json.dumps({"blobs": [own]}).encode()
        ends = struct.pack("<ii", len(footer), 0)
        puffin = b"PFA1" + blob + b"PFA1" + footer + ends + b"PFA1"
        self.add_deletes(puffin, DataFileContent.POSITION_DELETES)

    def add_deletes(self, deletes: pa.Table | bytes, content: DataFileContent) -> str:
        """A snapshot with one more file of deletes, of this content; its location."""
        table = self.table
        is_puffin = isinstance(deletes, bytes)
        location = f"{table.location()}/data/{uuid4()}.{'puffin' if is_puffin else 'parquet'}"
        file = Path(location.removeprefix("file://"))
        if isinstance(deletes, bytes):
            file.write_bytes(deletes)
        else:
            pq.write_table(deletes, file)
        added = DataFile.from_args(
            content=content,
            file_path=location,
            file_format=FileFormat.PUFFIN if is_puffin else FileFormat.PARQUET,
            partition=Record(),
            record_count=1 if is_puffin else len(deletes),
            file_size_in_bytes=file.stat().st_size,
            equality_ids=[2] if content is DataFileContent.EQUALITY_DELETES else None,
        )
        added.spec_id = 0
        with table.transaction() as transaction:
            update = transaction.update_snapshot().fast_append()
            update.__class__ = _Deletes
            update.append_data_file(added)
            update.commit()
        return location

    @property
    def version(self) -> int:
        snapshot = self.table.current_snapshot()
        assert snapshot is not None
        return snapshot.snapshot_id

    def read(self) -> list[dict[str, Any]]:
        return self.table.scan().to_arrow().to_pylist()

    def data_files(self) -> list[str]:
        return [task.file.file_path for task in self.table.scan().plan_files()]


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _Deletes(_FastAppendFiles):
    """Appends files of deletes in place of data files."""

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriterV2:
        output = self.new_manifest_output()
        return _DeletesWriter(spec, self.schema(), output, self._snapshot_id, self._compression)


class Lance:
    """A Lance dataset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "docs.lance"
        self.path = str(self.folder)

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.folder)

    def append(self, rows: Rows) -> None:
        mode = "append" if self.folder.exists() else "create"
        lance.write_dataset(pa.table(dict(rows)), self.folder, mode=mode)

    def delete(self, ids: Sequence[str]) -> None:
        named = ", ".join(f"'{id}'" for id in ids)
        self.dataset.delete(f"id in ({named})")

    @property
    def version(self) -> int:
        return int(self.dataset.version)

    def read(self) -> list[dict[str, Any]]:
        return self.dataset.to_table().to_pylist()

    def data_files(self) -> list[str]:
        return [str(self.folder / "data" / file) for file in os.listdir(self.folder / "data")]


Lake = Delta | Iceberg | Lance
LAKES: Mapping[str, Callable[[Path], Lake]] = {"delta": Delta, "iceberg": Iceberg, "lance": Lance}


def rows(name: str, count: int = 20) -> dict[str, list[Any]]:
    texts = [f"{number} of {name} says a little" for number in range(count)]
    ids = [f"{name}-{number}" for number in range(count)]
    return {"text": texts, "id": ids, "source": ["mail", "web"] * (count // 2)}


def shards_of(path: str, cache: Path, columns: Columns = COLUMNS) -> list[Shard]:
    objects = find_objects(path, cache / "cache")
    return [shard for item in objects for shard in cut(item, columns, 4_000)]


def documents(shards: list[Shard]) -> dict[str, str]:
    tables = [all_documents(shard) for shard in shards]
    assert all(len(table) == shard.rows for table, shard in zip(tables, shards, strict=True))
    table = pa.concat_tables(tables)
    return dict(zip(table["doc_id"].to_pylist(), table["text"].to_pylist(), strict=True))
