"""Numbered objects, to which several runs append: `inputs/`, `index/` and `snapshots/`.

Entry points: `numbers` and `free_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.errors import StorageError
from pipeline.ledger.keys import parse_key
from pipeline.stores.store import Store

# A lost race means that another run took the number; this many in a row have another cause.
MAX_LOST_RACES = 100

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


def _folder(key_of: KeyOf) -> str:
    return key_of(1).partition("/")[0] + "/"
