"""A lease keeps a second process from the same work, and ends by itself if the first is gone."""

from __future__ import annotations

import pytest

from pipeline.data.lease import LEASE_SECONDS, HeldError, held_lease
from pipeline.data.local_store import LocalStore


class Clock:
    """A clock that stands until it is set."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def keys(store: LocalStore) -> list[str]:
    return [stored.key for stored in store.list("attempts/leases/")]


def test_a_second_holder_is_told_who_is_at_it(store: LocalStore) -> None:
    clock = Clock()
    with held_lease(store, "job", clock, holder="first"):
        clock.now_s += LEASE_SECONDS - 60
        with (
            pytest.raises(HeldError, match=r"job is being worked on by first; .* in 1 minutes"),
            held_lease(store, "job", clock),
        ):
            raise AssertionError("two held it")
        with held_lease(store, "other", clock):
            assert len(keys(store)) == 2
    assert not keys(store)
    with held_lease(store, "job", clock):
        assert keys(store) == ["attempts/leases/job/00000001.json"]


def test_the_lease_of_a_holder_that_is_gone_ends(store: LocalStore) -> None:
    clock = Clock()
    gone = held_lease(store, "job", clock, holder="gone")
    gone.__enter__()
    clock.now_s += LEASE_SECONDS + 1
    with held_lease(store, "job", clock, holder="next") as held:
        assert held.lease.number == 2
        assert keys(store) == ["attempts/leases/job/00000002.json"]
        with pytest.raises(HeldError, match="by next"), held_lease(store, "job", clock):
            raise AssertionError("two held it")
    assert not keys(store)


def test_progress_makes_it_last(store: LocalStore) -> None:
    clock = Clock()
    with held_lease(store, "job", clock) as held:
        for _ in range(10):
            clock.now_s += LEASE_SECONDS / 3
            held.renew()
            assert len(keys(store)) == 1
            with pytest.raises(HeldError), held_lease(store, "job", clock):
                raise AssertionError("two held it")
    assert not keys(store)


def test_it_is_given_back_after_an_error(store: LocalStore) -> None:
    with pytest.raises(ZeroDivisionError), held_lease(store, "job", Clock()):
        raise ZeroDivisionError
    assert not keys(store)


def test_a_lease_of_a_clock_far_ahead_blocks_nobody(store: LocalStore) -> None:
    ahead, clock = Clock(), Clock()
    ahead.now_s += 365 * 86_400
    gone = held_lease(store, "job", ahead, holder="ahead")
    gone.__enter__()
    with held_lease(store, "job", clock, holder="next") as held:
        assert held.lease.number == 2
        clock.now_s -= LEASE_SECONDS - 1  # a clock a little behind is no such case
        with pytest.raises(HeldError, match="by next"), held_lease(store, "job", clock):
            raise AssertionError("two held it")
