"""The cut that lasts: the shards of each input object, written down once in the output.

Knows `inputs/<number>.json`, a log that only grows: every run that finds new objects adds what it
cut of them. A job that goes on elsewhere, or under another version of this program, thus works on
the same shards, and a finished job opens no input. Knows nothing of formats, nor of labels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from pipeline.errors import Problem, SpecError, StorageError, UnreadableError
from pipeline.hashes import canonical_json
from pipeline.ledger.keys import INPUTS, cuts_key, parse_key
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.sources.source import InputObject, cut
from pipeline.stores.store import Store

# Cutting a compressed file means reading it. What was cut is written down this often, so that a
# run which ends before the last of many files has not read the others for nothing.
KEEP_SECONDS = 30.0
CUT_THREADS = 16
# Each lost race is another run's entry; so many in a row mean that something else is wrong.
MAX_LOST_RACES = 100


@dataclass(frozen=True, slots=True)
class Cuts:
    """The shards of the input as it is now, and the ids of those that its paths had before."""

    shards: tuple[Shard, ...]
    # By path, a tuple for each earlier version, the newest first; only paths that have one.
    earlier: Mapping[str, tuple[tuple[str, ...], ...]]
    unreadable: tuple[str, ...] = ()  # why, of each object whose rows cannot even be counted

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
    """The shards of all objects, in order. What was cut before is read; the rest is cut and kept.

    `target_bytes` is for what is cut now: an object keeps the shards that it has. An object that
    cannot be read is left out, named in `unreadable`, and tried again the next time. Without
    `keep` nothing is written, and the next one cuts anew.
    """
    log = _Log(store)
    log.read_on()
    take = log.append if keep else log.take_in
    wanted = {found.version(text_column, id_column): found for found in objects}
    new = [found for version, found in wanted.items() if version not in log.cuts]
    cut_one = partial(_cut_or_reason, text=text_column, id=id_column, target_bytes=target_bytes)
    unreadable: list[str] = []
    with ThreadPoolExecutor(CUT_THREADS) as pool:
        for batch in _batches(zip(new, pool.map(cut_one, new), strict=True)):
            unreadable += [shards for _, shards in batch if isinstance(shards, str)]
            take(
                {
                    found.version(text_column, id_column): shards
                    for found, shards in batch
                    if not isinstance(shards, str)
                }
            )
    shards = tuple(shard for version in wanted for shard in log.cuts.get(version, ()))
    if not shards and unreadable:
        raise StorageError("\n".join(unreadable))
    if not shards:
        files = f"none of the {len(objects)} files has a row"
        first = objects[0].path if objects else None
        raise SpecError([Problem("input.path", f"{files}; name files with rows", first)])
    return Cuts(shards, log.earlier(wanted), tuple(unreadable))


def cut_before(
    store: Store, objects: Sequence[InputObject], text_column: str, id_column: str | None
) -> Cuts:
    """The shards of those of the objects that were cut already; opens none, and writes nothing."""
    log = _Log(store)
    log.read_on()
    wanted = [found.version(text_column, id_column) for found in objects]
    shards = tuple(shard for version in wanted for shard in log.cuts.get(version, ()))
    return Cuts(shards, log.earlier(wanted))


class _Log:
    """Everything that was ever cut, in the order in which it was written down."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self.cuts: dict[ObjectVersion, tuple[Shard, ...]] = {}

    def read_on(self) -> None:
        """Takes in the entries added since; of two cuts of one object the first stands."""
        keys = (parse_key(stored.key) for stored in self._store.list(INPUTS))
        for number in sorted(key.number for key in keys if key):
            if number > self._last:
                self.take_in(_parsed(self._store, number))
                self._last = number

    def append(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Writes these down, but for those that another run wrote down first."""
        for _ in range(MAX_LOST_RACES):
            new = {version: tuple(s) for version, s in cuts.items() if version not in self.cuts}
            if not new:
                return
            if self._store.create(cuts_key(self._last + 1), _content(new)):
                self.take_in(new)
                self._last += 1
                return
            self.take_in(_parsed(self._store, self._last + 1))
            self._last += 1
        raise StorageError(f"{self._store.url}/{INPUTS}: {MAX_LOST_RACES} numbers were taken")

    def earlier(self, current: Iterable[ObjectVersion]) -> dict[str, tuple[tuple[str, ...], ...]]:
        """By path, the shards of other versions of the current objects, the newest first."""
        versions = set(current)
        paths = {version.path for version in versions}
        found: dict[str, list[tuple[str, ...]]] = {}
        for version, shards in reversed(self.cuts.items()):
            if version.path in paths and version not in versions:
                found.setdefault(version.path, []).append(tuple(shard.id for shard in shards))
        return {path: tuple(of_path) for path, of_path in found.items()}

    def take_in(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Holds these in memory; of two cuts of one object the first stands."""
        for version, shards in cuts.items():
            self.cuts.setdefault(version, tuple(shards))


def _cut_or_reason(
    found: InputObject, text: str, id: str | None, target_bytes: int
) -> list[Shard] | str:
    """The object's shards, or why it has none."""
    try:
        return cut(found, text, id, target_bytes)
    except UnreadableError as error:
        return str(error)


def _batches(
    cuts: Iterable[tuple[InputObject, list[Shard] | str]],
) -> Iterator[list[tuple[InputObject, list[Shard] | str]]]:
    """What was cut since the last batch, each time that half a minute has passed."""
    batch: list[tuple[InputObject, list[Shard] | str]] = []
    since = time.monotonic()
    for found in cuts:
        batch.append(found)
        if time.monotonic() - since >= KEEP_SECONDS:
            yield batch
            batch, since = [], time.monotonic()
    if batch:
        yield batch


def _content(cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> bytes:
    entries = [
        {"object": list(_values(version)), "pieces": [list(_values(s.piece)) for s in shards]}
        for version, shards in cuts.items()
    ]
    return canonical_json({"cuts": entries})


def _values(of: ObjectVersion | Piece) -> Iterator[object]:
    return (getattr(of, each.name) for each in fields(of))


def _parsed(store: Store, number: int) -> dict[ObjectVersion, tuple[Shard, ...]]:
    key = cuts_key(number)
    try:
        entries = json.loads(store.read(key))["cuts"]
        return dict(_cut(entry["object"], entry["pieces"]) for entry in entries)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{store.url}/{key}: is not a list of shards: {error!r}; restore it: without it "
            f"the input would be cut, and labelled, anew"
        ) from error


def _cut(
    values: Sequence[Any], pieces: Iterable[Sequence[Any]]
) -> tuple[ObjectVersion, tuple[Shard, ...]]:
    version = ObjectVersion(*values)
    return version, tuple(Shard(version, Piece(*piece)) for piece in pieces)
