"""The log of how input objects were cut into shards: `inputs/<number>.json` in the output.

Entry points: `load_or_cut`, `cut_before` and `logged_shards`. Each run appends the cuts of new
objects. A job that continues on another machine or version thus has the same shards; a finished job
opens no input.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.errors import (
    AssayError,
    ForeignContentError,
    MissingColumnsError,
    Problem,
    SpecError,
    StorageError,
    UnreadableError,
    one_line,
)
from pipeline.hashes import parse_sealed_json, sealed_json
from pipeline.ledger.keys import cuts_key
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.sources.shards import ObjectVersion, Piece, Shard, fields_of
from pipeline.sources.source import InputObject, cut
from pipeline.sources.tables import TABLES
from pipeline.spec.schema import Columns
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

# A compressed file is read to be cut. Cuts are written this often, so that an interrupted run does
# not lose them.
WRITE_SECONDS = 30.0
CUT_THREADS = 16


@dataclass(frozen=True, slots=True)
class Cuts:
    """The shards of the current input."""

    shards: tuple[Shard, ...]
    unreadable: tuple[str, ...] = ()  # the error of each object whose rows cannot be counted
    uncut: int = 0  # the number of objects that are not in the log


def load_or_cut(
    store: Store,
    objects: Sequence[InputObject],
    columns: Columns,
    target_bytes: int,
    *,
    keep: bool = True,
) -> Cuts:
    """The shards of all objects in order. New objects are cut and, with `keep`, logged.

    Objects in the log keep their shards; `target_bytes` applies to new ones. An object that cannot
    be read is left out, listed in `unreadable`, and tried again by the next run. StorageError if
    none can be read, SpecError if none has a row or the columns.
    """
    log = _Log(store)
    take = log.append if keep else log.take_in
    versions = {item.version(columns): item for item in objects}
    new = [version for version in versions if version not in log.cuts]
    unreadable: list[AssayError] = []
    unwritten: dict[ObjectVersion, Sequence[Shard]] = {}
    # — in a format without a schema, the columns of such an object are null if others have them
    lacking: dict[ObjectVersion, MissingColumnsError] = {}
    written_s = time.monotonic()

    def cut_or_error(version: ObjectVersion) -> Sequence[Shard] | AssayError:
        try:
            return cut(versions[version], columns, target_bytes, lacking=version in lacking)
        except (UnreadableError, MissingColumnsError) as error:
            if version.format in TABLES and isinstance(error, MissingColumnsError):
                raise
            return error

    def add(version: ObjectVersion, shards: Sequence[Shard] | AssayError) -> None:
        match shards:
            case MissingColumnsError():
                lacking[version] = shards
            case AssayError():
                unreadable.append(shards)
            case _:
                unwritten[version] = shards

    with ThreadPoolExecutor(CUT_THREADS) as pool:
        for version, shards in zip(new, pool.map(cut_or_error, new), strict=True):
            add(version, shards)
            if time.monotonic() - written_s >= WRITE_SECONDS:
                take(unwritten)
                unwritten, written_s = {}, time.monotonic()
    others_have = any(log.cuts.get(version) or unwritten.get(version) for version in versions)
    for number, (version, lacks) in enumerate(lacking.items()):
        if not others_have:
            raise lacks
        if number == 0:
            text = "%d files are read without columns that others have: %s"
            logger.warning(text, len(lacking), lacks)
        add(version, cut_or_error(version))
    if unwritten:
        take(unwritten)
    cuts = log.cuts_of(versions, tuple(map(str, unreadable)))
    _require_rows(cuts, objects, unreadable)
    return cuts


def _require_rows(
    cuts: Cuts, objects: Sequence[InputObject], unreadable: Sequence[AssayError]
) -> None:
    """StorageError if no object can be read, SpecError if none has a row."""
    if not cuts.shards and unreadable:
        are_foreign = all(isinstance(error, ForeignContentError) for error in unreadable)
        kind = ForeignContentError if are_foreign else StorageError
        raise kind("\n".join(map(one_line, unreadable)))
    if not cuts.shards:
        fix = f"none of the {len(objects)} files has a row; name files with rows"
        if len(objects) == 1:
            fix = "the file has no row; name a file with rows"
        first = objects[0].path if objects else None
        raise SpecError([Problem("input.path", fix, first)])


def cut_before(store: Store, objects: Sequence[InputObject], columns: Columns) -> Cuts:
    """The shards of the objects that are in the log; opens no object and writes nothing."""
    return _Log(store).cuts_of([item.version(columns) for item in objects])


def logged_shards(store: Store, sids: Collection[str]) -> dict[str, Shard]:
    """The shards in the log with these ids; the input is not looked at."""
    shards = (shard for of_object in _Log(store).cuts.values() for shard in of_object)
    return {shard.id: shard for shard in shards if shard.id in sids}


class _Log:
    """All cuts in memory; of two cuts of one object the first is valid."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self.cuts: dict[ObjectVersion, tuple[Shard, ...]] = {}
        for number in numbers(store, cuts_key):
            self._read(number)

    def append(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Writes the cuts, except of objects that another run has cut in the meantime."""
        for number in free_numbers(self._store, cuts_key):
            for written in range(self._last + 1, number):
                self._read(written)
            entries = [
                {
                    "object": list(version.to_json().values()),
                    "pieces": [list(fields_of(shard.piece).values()) for shard in shards],
                }
                for version, shards in cuts.items()
                if version not in self.cuts
            ]
            if not entries:
                break
            if self._store.create(cuts_key(number), sealed_json({"cuts": entries})):
                self._last = number
                break
        self.take_in(cuts)

    def take_in(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Adds the cuts in memory."""
        for version, shards in cuts.items():
            self.cuts.setdefault(version, tuple(shards))

    def cuts_of(self, current: Collection[ObjectVersion], unreadable: tuple[str, ...] = ()) -> Cuts:
        """The shards of the current objects."""
        cut = [self.cuts[version] for version in current if version in self.cuts]
        shards = tuple(shard for of_object in cut for shard in of_object)
        return Cuts(shards, unreadable, len(current) - len(cut))

    def _read(self, number: int) -> None:
        key = cuts_key(number)
        try:
            for entry in parse_sealed_json(self._store.read(key))["cuts"]:
                version = ObjectVersion(*entry["object"])
                self.take_in({version: [Shard(version, Piece(*p)) for p in entry["pieces"]]})
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._store.url}/{key}: is not a list of shards: {error!r}; restore it from a "
                f"copy, or delete it: the input is cut again, and labelled where its shards differ"
            ) from error
        self._last = number
