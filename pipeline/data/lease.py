"""A lease: one process says that it is at work, so that another need not do the same work.

It spares work and protects nothing: the ledger is right without it. Knows numbered objects below
`attempts/`, which only hold what was started and is not finished. Knows nothing of the work.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from pipeline.data.hashes import canonical_json
from pipeline.data.storage import ATTEMPTS, Store
from pipeline.errors import AssayError, StorageError

# Longer than a worker takes to load a model and label a first shard; after a crash, so long
# nobody else works.
LEASE_SECONDS = 30 * 60.0


class HeldError(AssayError):
    """Another process is at it: what it does need not be done twice."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds it and until when, in seconds since 1970."""

    number: int
    holder: str
    expires_s: float


class HeldLease:
    """A lease that this process holds; renewed while there is progress."""

    def __init__(self, store: Store, name: str, lease: Lease, now_s: Callable[[], float]) -> None:
        self._store, self._name, self._now_s = store, name, now_s
        self.lease = lease

    def renew(self) -> None:
        """Makes it last on, once half of it has passed."""
        if self.lease.expires_s - self._now_s() > LEASE_SECONDS / 2:
            return
        expires_s = self._now_s() + LEASE_SECONDS
        following = Lease(self.lease.number + 1, self.lease.holder, expires_s)
        # — lost to another only where this one had expired: then two work, and nothing is wrong
        if self._store.create(_key(self._name, following.number), _content(following)):
            self._store.delete([_key(self._name, self.lease.number)])
            self.lease = following

    def release(self) -> None:
        self._store.delete([_key(self._name, self.lease.number)])


@contextmanager
def held_lease(
    store: Store, name: str, now_s: Callable[[], float], *, holder: str | None = None
) -> Iterator[HeldLease]:
    """The lease of this name, given back at the end; HeldError where another holds it."""
    held = HeldLease(store, name, _taken(store, name, now_s, holder or _this_process()), now_s)
    try:
        yield held
    finally:
        held.release()


def _taken(store: Store, name: str, now_s: Callable[[], float], holder: str) -> Lease:
    leases = sorted(_leases(store, name), key=lambda lease: lease.number)
    last = leases[-1] if leases else Lease(0, "", 0.0)
    if _holds(last, now_s()):
        raise _refused(store, name, last, now_s())
    lease = Lease(last.number + 1, holder, now_s() + LEASE_SECONDS)
    if not store.create(_key(name, lease.number), _content(lease)):
        raise _refused(store, name, lease, now_s())
    store.delete([_key(name, expired.number) for expired in leases])
    return lease


def _holds(lease: Lease, now_s: float) -> bool:
    """Until it ends; but one that ends later than any can was written by a wrong clock."""
    return now_s < lease.expires_s <= now_s + 2 * LEASE_SECONDS


def _refused(store: Store, name: str, lease: Lease, now_s: float) -> HeldError:
    minutes = max(0.0, lease.expires_s - now_s) / 60
    return HeldError(
        f"{store.url}/{_key(name, lease.number)}: {name} is being worked on by "
        f"{lease.holder or 'another process'}; run again later: without a sign of life its lease "
        f"ends in {minutes:.0f} minutes"
    )


def _leases(store: Store, name: str) -> Iterator[Lease]:
    for stored in store.list(f"{ATTEMPTS}leases/{name}/"):
        if re.fullmatch(r"\d{8}\.json", stored.key.rpartition("/")[2]):
            try:
                yield Lease(**json.loads(store.read(stored.key)))
            except StorageError:  # given back since it was listed
                continue
            except (ValueError, TypeError) as error:
                raise StorageError(
                    f"{store.url}/{stored.key}: is no lease: {error!r}; delete it"
                ) from error


def _key(name: str, number: int) -> str:
    return f"{ATTEMPTS}leases/{name}/{number:08d}.json"


def _content(lease: Lease) -> bytes:
    return canonical_json(asdict(lease))


def _this_process() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
