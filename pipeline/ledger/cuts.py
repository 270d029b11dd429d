"""The log of how input objects were cut into shards: `inputs/<number>.parquet` in the output.

Entry points: `load_or_cut`, and `CutLog` for what was cut before. Each run appends the cuts of new
objects. A job that continues on another machine or version thus has the same shards; a finished job
opens no input.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import (
    AssayError,
    ForeignContentError,
    MissingColumnsError,
    Problem,
    SpecError,
    StorageError,
    UnavailableError,
    one_line,
)
from pipeline.ledger.keys import cuts_key
from pipeline.ledger.label_files import to_parquet
from pipeline.ledger.numbered import (
    free_numbers,
    is_checkpoint,
    numbers_from_checkpoint,
    read_numbered,
)
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
# To count the rows of text, all of it is read. More than this is read by the nodes of a cluster.
MOST_TEXT_BYTES = 1_000_000_000
NODE_THREADS = 256  # each waits for a file that a node reads

Cut = Callable[..., list[Shard]]  # as `source.cut`

PIECES = "pieces"
_INTEGERS = ("size_bytes", *Piece.__slots__)
_TYPES = dict.fromkeys(_INTEGERS, pa.int64()) | {"quoted": pa.bool_()}
# A row of the log is an object.
_SCHEMA = pa.schema(
    [
        *((name, _TYPES.get(name, pa.string())) for name in ObjectVersion.__slots__),
        (PIECES, pa.list_(pa.struct([(name, _TYPES[name]) for name in Piece.__slots__]))),
    ]
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The shards of the current input."""

    shards: tuple[Shard, ...]
    unreadable: tuple[str, ...] = ()  # the error of each object whose rows cannot be counted


def load_or_cut(
    store: Store,
    objects: Sequence[InputObject],
    columns: Columns,
    target_bytes: int,
    *,
    keep: bool = True,
    by_nodes: Cut | None = None,
) -> Cuts:
    """The shards of all objects in order. New objects are cut and, with `keep`, logged.

    Objects in the log keep their shards; `target_bytes` applies to new ones. Large text is cut by
    `by_nodes`, which does what `source.cut` does, on the nodes of a cluster. An object that cannot
    be read is left out, listed in `unreadable`, and tried again by the next run. StorageError if
    none can be read, SpecError if none has a row or the columns.
    """
    log = CutLog(store)
    take = log.append if keep else log.take_in
    versions = {item.version(columns): item for item in objects}
    new = [version for version in versions if version not in log.cuts]
    unreadable: list[AssayError] = []
    unwritten: dict[ObjectVersion, Sequence[Shard]] = {}
    # — in a format without a schema, the columns of such an object are null if others have them
    lacking: dict[ObjectVersion, MissingColumnsError] = {}
    written_s = time.monotonic()
    cut_text, threads = _text_cutter(new, by_nodes)

    def cut_or_error(version: ObjectVersion) -> Sequence[Shard] | AssayError:
        cut_one = cut if version.format in TABLES else cut_text
        own = partial(cut_one, versions[version], columns, target_bytes, lacking=version in lacking)
        return _shards_or_error(own, version)

    def add(version: ObjectVersion, shards: Sequence[Shard] | AssayError) -> None:
        match shards:
            case MissingColumnsError():
                lacking[version] = shards
            case AssayError():
                unreadable.append(shards)
            case _:
                unwritten[version] = shards

    with ThreadPoolExecutor(threads) as pool:
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


def _text_cutter(new: Iterable[ObjectVersion], by_nodes: Cut | None) -> tuple[Cut, int]:
    """What cuts text, and in how many threads: the nodes, if there are nodes and much text."""
    text_bytes = sum(version.size_bytes for version in new if version.format not in TABLES)
    if by_nodes is None or text_bytes <= MOST_TEXT_BYTES:
        return cut, CUT_THREADS
    return by_nodes, NODE_THREADS


def _shards_or_error(
    cut_it: Callable[[], list[Shard]], version: ObjectVersion
) -> Sequence[Shard] | AssayError:
    """The shards of an object, or why it is left out; SpecError if a table lacks a column."""
    try:
        return cut_it()
    except MissingColumnsError as error:
        if version.format in TABLES:
            raise
        return error
    except UnavailableError:
        raise
    except StorageError as error:  # — gone, without permission, or damaged
        return error


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


class CutLog:
    """All cuts in memory; of two cuts of one object the first is valid."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self.cuts: dict[ObjectVersion, tuple[Shard, ...]] = {}
        self._read(numbers_from_checkpoint(store, cuts_key))

    def append(self, cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> None:
        """Writes the cuts, except of objects that another run has cut in the meantime."""
        for number in free_numbers(self._store, cuts_key):
            self._read(range(self._last + 1, number))
            new = {version: cuts[version] for version in cuts if version not in self.cuts}
            if not new:
                break
            entries = {**self.cuts, **new} if is_checkpoint(number) else new
            if self._store.create(cuts_key(number), to_parquet(_table_of(entries), {})):
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
        return Cuts(shards, unreadable)

    def _read(self, numbers: Sequence[int]) -> None:
        """Takes in the entries with these numbers, which are in rising order."""
        for number, table in read_numbered(self._store, cuts_key, numbers):
            try:
                if isinstance(table, ValueError):
                    raise table
                self.take_in(_cuts_in(table))
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(
                    f"{self._store.url}/{cuts_key(number)}: is not a list of shards: {error!r}; "
                    f"restore it from a copy, or delete it: the input is cut again, and labelled "
                    f"where its shards differ"
                ) from error
            self._last = number


def _table_of(cuts: Mapping[ObjectVersion, Sequence[Shard]]) -> pa.Table:
    """A row for each object, with the list of its pieces; `_cuts_in` is the inverse."""
    rows = [
        {**fields_of(version), PIECES: [fields_of(shard.piece) for shard in shards]}
        for version, shards in cuts.items()
    ]
    return pa.Table.from_pylist(rows, _SCHEMA)


def _cuts_in(table: pa.Table) -> dict[ObjectVersion, tuple[Shard, ...]]:
    """The cuts of a table of the log; KeyError or TypeError if it is another table."""
    objects = zip(*(table[name].to_pylist() for name in ObjectVersion.__slots__), strict=True)
    lists = table[PIECES].combine_chunks()
    fields = (pc.struct_field(lists.flatten(), name).to_pylist() for name in Piece.__slots__)
    pieces = map(Piece, *fields)
    cuts = {}
    for fields_of_object, count in zip(objects, lists.value_lengths().to_pylist(), strict=True):
        version = ObjectVersion(*fields_of_object)
        cuts[version] = tuple(Shard(version, piece) for piece in islice(pieces, count))
    return cuts
