"""Numbered objects, to which several runs append, such as `inputs/` and `snapshots/`.

Entry points: `numbers` and `free_numbers`; of a log of tables, also `read_numbered`.

Law of a log: an object whose number is a multiple of `CHECKPOINT` has the rows of all objects
before it, too, apart from those of what `assay gc` deletes. A reader starts at the last one, so it
reads at most `CHECKPOINT` objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from pipeline.errors import StorageError
from pipeline.ledger.keys import parse_key
from pipeline.ledger.label_files import table_in
from pipeline.stores.store import Store

# A lost race means that another run took the number; this many in a row have another cause.
MAX_LOST_RACES = 100
CHECKPOINT = 32
READ_THREADS = 16

KeyOf = Callable[[int], str]  # the key of a number, such as `snapshot_key`


def numbers(store: Store, key_of: KeyOf) -> list[int]:
    """The numbers of the objects with such keys, in rising order."""
    listed = [(item.key, parse_key(item.key)) for item in store.list(_folder(key_of))]
    return sorted(key.number for name, key in listed if key and name == key_of(key.number))


def free_numbers(store: Store, key_of: KeyOf) -> Iterator[int]:
    """The next number, and the one after it if the caller could not create that object.

    StorageError after `MAX_LOST_RACES` numbers.
    """
    first = 1 + max(numbers(store, key_of), default=0)
    yield from range(first, first + MAX_LOST_RACES)
    raise StorageError(
        f"{store.url}/{_folder(key_of)}: {MAX_LOST_RACES} numbers in a row were taken"
    )


def is_checkpoint(number: int) -> bool:
    """Whether the object of a log with this number has all rows before it, too."""
    return number % CHECKPOINT == 0


def numbers_from_checkpoint(store: Store, key_of: KeyOf) -> list[int]:
    """The numbers of a log from its last checkpoint on, in rising order."""
    existing = numbers(store, key_of)
    first = max(filter(is_checkpoint, existing), default=0)
    return [number for number in existing if number >= first]


def read_numbered(
    store: Store, key_of: KeyOf, numbers: Sequence[int]
) -> Iterator[tuple[int, pa.Table | ValueError]]:
    """The table of each of these objects of a log; of a damaged one, the error."""

    def read(number: int) -> pa.Table | ValueError:
        try:
            return table_in(store.read(key_of(number)))
        except ValueError as error:
            return error

    with ThreadPoolExecutor(READ_THREADS) as pool:
        yield from zip(numbers, pool.map(read, numbers), strict=True)


def _folder(key_of: KeyOf) -> str:
    return key_of(1).partition("/")[0] + "/"
