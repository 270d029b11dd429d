"""WebDataset: tar files whose consecutive members with one key are a row.

`dog.jpg`, `dog.txt` and `dog.json` are the columns `jpg`, `txt` and `json` of the row with the
`__key__` dog. Entry points: `tar_units`, `tar_rows`, and `samples` of an open archive.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import IO, cast

from pipeline.sources.documents import MAX_ROW_BYTES, Names, Row, TooLong
from pipeline.sources.records import SAMPLE_ROWS
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Options, opened

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


@dataclass(slots=True)
class Sample:
    """The members of one key."""

    key: str
    start_byte: int
    end_byte: int
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)  # by column


def tar_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each key; SpecError unless one of the first has the columns."""
    with _archive(version.path, options) as archive:
        rows = samples(archive)
        first = list(islice(rows, SAMPLE_ROWS))
        if first:
            check_columns(version, sorted({KEY, *chain.from_iterable(s.members for s in first)}))
        for sample in chain(first, rows):
            size_bytes = sum(member.size for member in sample.members.values())
            yield Unit(1, size_bytes, sample.start_byte, sample.end_byte)


def tar_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows; the members of one key are held at a time.

    Without names, values that are not UTF-8, such as images, are left out.
    """
    with _archive(shard.path, options, shard.piece.start_byte or 0) as archive:
        for sample in islice(samples(archive), shard.rows):
            read = (KEY, *sample.members) if names is None else names
            values = {name: _value(archive, sample, name) for name in read}
            if names is None:
                values = {name: v for name, v in values.items() if not _is_binary(v)}
            yield Row(values)
            del values


def piece_samples(shard: Shard, options: Options) -> Iterator[Sample]:
    """Where the members of the shard's rows are; no content is read."""
    with _archive(shard.path, options, shard.piece.start_byte or 0) as archive:
        yield from islice(samples(archive), shard.rows)


def samples(archive: tarfile.TarFile) -> Iterator[Sample]:
    """The rows of the archive; members that are no files, or have no extension, belong to none.

    OSError where the archive is broken.
    """
    sample: Sample | None = None
    try:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it holds all of them
            match = _NAME.fullmatch(member.name) if member.isreg() else None
            if match is None:
                continue
            key, column = match[1], match[2].lower()
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample
                sample = Sample(key, member.offset, 0)
            sample.members[column] = member
            sample.end_byte = member.offset_data + -(-member.size // 512) * 512
        _check_end(archive)
    except tarfile.TarError as error:
        raise OSError(f"is a broken tar file: {error}") from error
    if sample is not None:
        yield sample


def _check_end(archive: tarfile.TarFile) -> None:
    """OSError unless only zeros follow the last member: `tarfile` also ends at a broken header."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    while block := archive.fileobj.read(BLOCK_BYTES):
        if block.strip(b"\0"):
            raise OSError(
                f"is a broken tar file, or several in one: there is data after the last member, "
                f"from byte {archive.offset} on"
            )


@contextmanager
def _archive(path: str, options: Options, start: int = 0) -> Iterator[tarfile.TarFile]:
    """The archive from this byte on, where the header of a member begins."""
    with opened(path, options) as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], file), mode="r:") as archive:
                yield archive
        except tarfile.TarError as error:
            raise OSError(f"is not a tar file: {error}") from error


def _value(archive: tarfile.TarFile, sample: Sample, column: str) -> str | bytes | TooLong | None:
    """The content of one column of a row."""
    if column == KEY:
        return sample.key
    member = sample.members.get(column)
    if member is None:
        return None
    if member.size > MAX_ROW_BYTES:
        return TooLong()
    content = archive.extractfile(member)
    assert content is not None, member.name
    return content.read()


def _is_binary(value: object) -> bool:
    try:
        return isinstance(value, bytes) and not isinstance(value.decode("utf-8"), str)
    except UnicodeDecodeError:
        return True
