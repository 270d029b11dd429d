"""The log of how input objects were cut into shards: `inputs/<number>.json` in the output.

Entry points: `load_or_cut`, `cut_before` and `logged_shards`. Each run appends the cuts of new
objects. A job that continues on another machine or version thus has the same shards; a finished job
opens no input.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.errors import Problem, SpecError, StorageError, UnreadableError
from pipeline.hashes import canonical_json
from pipeline.ledger.keys import INPUTS, cuts_key, parse_key
from pipeline.sources.shards import ObjectVersion, Piece, Shard, fields_of
from pipeline.sources.source import InputObject, cut
from pipeline.stores.hub import unpinned
from pipeline.stores.store import Store

# A compressed file is read to be cut. Cuts are written this often, so that an interrupted run does
# not lose them.
WRITE_SECONDS = 30.0
CUT_THREADS = 16
# A lost race means that another run wrote an entry; this many in a row have another cause.
MAX_LOST_RACES = 100

_Cut = tuple[ObjectVersion, list[Shard] | str]  # an object's shards, or why it cannot be read


@dataclass(frozen=True, slots=True)
class Cuts:
    """The shards of the current input, and the shard ids of earlier versions of its objects."""

    shards: tuple[Shard, ...]
    # By path: one tuple for each earlier version, the newest first.
    earlier: Mapping[str, tuple[tuple[str, ...], ...]]
    unreadable: tuple[str, ...] = ()  # the error of each object whose rows cannot be counted

    @property
    def earlier_sids(self) -> frozenset[str]:
        """The shards of all earlier versions."""
        versions = (version for of_path in self.earlier.values() for version in of_path)
        return frozenset(sid for version in versions for sid in version)


def load_or_cut(
    store: Store,
    objects: Sequence[InputObject],
    text_column: str,
    id_column: str | None,
    target_bytes: int,
    *,
    keep: bool = True,
) -> Cuts:
    """The shards of all objects in order. New objects are cut and, with `keep`, logged.

    Objects in the log keep their shards; `target_bytes` applies to new ones. An object that cannot
    be read is left out, listed in `unreadable`, and tried again by the next run. StorageError if
    none can be read, SpecError if none has a row.
    """
    log = _Log(store)
    take = log.append if keep else log.take_in
    versions = {each.version(text_column, id_column): each for each in objects}

    def cut_or_reason(version: ObjectVersion) -> _Cut:
        try:
            return version, cut(versions[version], text_column, id_column, target_bytes)
        except UnreadableError as error:
            return version, str(error)

    new = [version for version in versions if version not in log.cuts]
    unreadable: list[str] = []
    with ThreadPoolExecutor(CUT_THREADS) as pool:
        for batch in _batches(pool.map(cut_or_reason, new)):
            unreadable += [shards for _, shards in batch if isinstance(shards, str)]
            take({version: s for version, s in batch if not isinstance(s, str)})
    cuts = log.cuts_of(versions, tuple(unreadable))
    if not cuts.shards and unreadable:
        raise StorageError("\n".join(unreadable))
    if not cuts.shards:
        files = f"none of the {len(objects)} files has a row"
        first = objects[0].path if objects else None
        raise SpecError([Problem("input.path", f"{files}; name files with rows", first)])
    return cuts


def cut_before(
    store: Store, objects: Sequence[InputObject], text_column: str, id_column: str | None
) -> Cuts:
    """The shards of the objects that are in the log; opens no object and writes nothing."""
    return _Log(store).cuts_of([each.version(text_column, id_column) for each in objects])


def logged_shards(store: Store, sids: Collection[str]) -> dict[str, Shard]:
    """The shards in the log with these ids; the input is not looked at."""
    shards = (shard for of_object in _Log(store).cuts.values() for shard in of_object)
    return {shard.id: shard for shard in shards if shard.id in sids}


class _Log:
    """The log in memory: all cuts, in the order in which they were written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self.cuts: dict[ObjectVersion, tuple[Shard, ...]] = {}
        keys = (parse_key(stored.key) for stored in store.list(INPUTS))
        for number in sorted(key.number for key in keys if key):
            self._read(number)

    def append(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Writes the cuts, except of objects that another run has cut in the meantime."""
        for _ in range(MAX_LOST_RACES):
            new = {version: tuple(s) for version, s in cuts.items() if version not in self.cuts}
            if not new:
                return
            entries = [
                {
                    "object": list(fields_of(version).values()),
                    "pieces": [list(fields_of(shard.piece).values()) for shard in shards],
                }
                for version, shards in new.items()
            ]
            if self._store.create(cuts_key(self._last + 1), canonical_json({"cuts": entries})):
                self.take_in(new)
                self._last += 1
                return
            self._read(self._last + 1)
        raise StorageError(
            f"{self._store.url}/{INPUTS}: {MAX_LOST_RACES} numbers in a row were taken"
        )

    def cuts_of(self, current: Collection[ObjectVersion], unreadable: tuple[str, ...] = ()) -> Cuts:
        """The shards of the current objects, and those of their other versions."""
        versions = set(current)
        # — a dataset of the Hub has its commit in the path
        paths = {unpinned(version.path): version.path for version in versions}
        earlier: dict[str, list[tuple[str, ...]]] = {}
        for version, shards in reversed(self.cuts.items()):
            path = paths.get(unpinned(version.path))
            if path is not None and version not in versions:
                earlier.setdefault(path, []).append(tuple(shard.id for shard in shards))
        return Cuts(
            shards=tuple(shard for version in current for shard in self.cuts.get(version, ())),
            earlier={path: tuple(of_path) for path, of_path in earlier.items()},
            unreadable=unreadable,
        )

    def _read(self, number: int) -> None:
        key = cuts_key(number)
        try:
            for entry in json.loads(self._store.read(key))["cuts"]:
                version = ObjectVersion(*entry["object"])
                self.take_in({version: [Shard(version, Piece(*p)) for p in entry["pieces"]]})
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._store.url}/{key}: is not a list of shards: {error!r}; restore it: without "
                f"it the input would be cut and labelled again"
            ) from error
        self._last = number

    def take_in(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Adds the cuts in memory; of two cuts of one object the first is valid."""
        for version, shards in cuts.items():
            self.cuts.setdefault(version, tuple(shards))


def _batches(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """The cuts in batches, one each time that `WRITE_SECONDS` have passed."""
    batch: list[_Cut] = []
    since = time.monotonic()
    for each in cuts:
        batch.append(each)
        if time.monotonic() - since >= WRITE_SECONDS:
            yield batch
            batch, since = [], time.monotonic()
    if batch:
        yield batch
