"""The store on S3: lost replies, passing faults, credentials, and stores that cannot be trusted."""

from __future__ import annotations

import datetime
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import botocore.auth
import pytest
from fault_proxy import STUBBORN, Faults, proxied
from servers import BUCKET, KEY, SECRET, Server

from pipeline.errors import RefusedError, SpecError, StorageError, UnavailableError
from pipeline.stores.retries import RetryPolicy
from pipeline.stores.s3 import S3Store, open_s3
from pipeline.stores.store import check_create_only, open_store

QUICK = RetryPolicy(3.0, 3.0, first_wait_s=0.001, longest_wait_s=0.01)
LOGIN = {"key": KEY, "secret": SECRET}
Faulty = Callable[..., tuple[S3Store, Faults]]


@pytest.fixture
def faulty(moto: Server) -> Iterator[Faulty]:
    """Opens a store on moto behind a proxy that does the faults."""
    with ExitStack() as stack:

        def make(**settings: Any) -> tuple[S3Store, Faults]:
            faults = Faults(**settings)
            endpoint = stack.enter_context(proxied(moto.endpoint, faults))
            store = open_s3(moto.new_url(), {**moto.options, "endpoint_url": endpoint})
            return replace(store, retry_policy=STUBBORN), faults

        yield make


def test_anothers_create_during_a_lost_request_is_not_taken_for_our_own(faulty: Faulty) -> None:
    store, faults = faulty()
    faults.once("reset", "PUT")
    open_s3(store.url, store.file_system.storage_options).create("key", b"theirs")
    faults.once("reset", "PUT")
    assert not store.create("key", b"ours")
    assert store.read("key") == b"theirs"


@pytest.mark.parametrize(
    "fault", ["reset", "error_500", "slow_down", "conflict", "lost_reply", "cut_off"]
)
def test_a_transient_fault_is_retried_until_it_ends(faulty: Faulty, fault: str) -> None:
    store, faults = faulty()
    faults.once(fault, "PUT")
    assert store.create("key", b"data" * 1000)
    if fault != "conflict":
        faults.once(fault, "GET")
    assert store.read("key") == b"data" * 1000
    assert not store.create("key", b"second")
    if fault != "conflict":
        faults.once(fault, "GET")
    assert [stored.key for stored in store.list("")] == ["key"]
    assert faults.counted[fault] == (1 if fault == "conflict" else 3)


class Refusing:
    """Deletes nothing while it has replies with errors of keys; S3 gives them the status 200."""

    def __init__(self, *codes: str) -> None:
        self.codes, self.asked = [*codes], 0

    def call_s3(self, method: str, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        assert method == "delete_objects" and Bucket == BUCKET
        self.asked += 1
        errors = [
            {"Key": Delete["Objects"][1]["Key"], "Code": code, "Message": "Wait."}
            for code in self.codes[:1]
        ]
        del self.codes[:1]
        return {"Errors": errors} if errors else {}


def test_a_key_that_s3_is_too_busy_to_delete_is_deleted_later() -> None:
    busy = Refusing("SlowDown", "InternalError")
    S3Store(BUCKET, "out/", busy, STUBBORN).delete(["a", "b"])
    assert busy.asked == 3
    store = S3Store(BUCKET, "out/", Refusing(*["SlowDown"] * 999), RetryPolicy(0, 0))
    with pytest.raises(UnavailableError, match=r"SlowDown.*run again") as raised:
        store.delete(["a", "b"])
    assert "\n" not in str(raised.value)
    denied = Refusing("AccessDenied")
    with pytest.raises(StorageError, match=r"out/b: cannot be deleted: AccessDenied"):
        S3Store(BUCKET, "out/", denied, STUBBORN).delete(["a", "b"])
    assert denied.asked == 1


def test_a_store_that_stays_unavailable_is_one_line_and_to_be_run_again(faulty: Faulty) -> None:
    store, faults = faulty(shares={"slow_down": 1.0})
    store = replace(store, retry_policy=QUICK)
    for attempt in (lambda: store.create("key", b""), lambda: store.read("key")):
        with pytest.raises(
            UnavailableError, match=r"key: cannot be .*SlowDown.*run again"
        ) as raised:
            attempt()
        assert raised.value.exit_code == 3 and "\n" not in str(raised.value)
    methods = Counter(request.split()[0] for request in faults.requests)
    assert methods["PUT"] > 5 and methods["GET"] > 5


def test_a_server_that_never_answers_is_named_and_given_up_sooner_if_it_never_did(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {
            **LOGIN,
            "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "config_kwargs": {"read_timeout": 0.2, "connect_timeout": 1},
        }
        # Only the second try names the server: the first must end within `first_seconds`, on a
        # busy machine, too.
        policy = RetryPolicy(seconds=600, first_seconds=3.0, first_wait_s=0.1, longest_wait_s=2.0)
        store = replace(open_s3(f"s3://{BUCKET}/out", options), retry_policy=policy)
        monkeypatch.setattr("pipeline.stores.retries._answered", threading.Event())
        monkeypatch.setattr("pipeline.stores.retries.QUIET_S", 0.0)
        with pytest.raises(UnavailableError, match=r"out/key: cannot be read: .*timeout"):
            store.read("key")
    named = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert named
    assert all("did not answer" in line and "functools" not in line for line in named)


def test_expired_credentials_are_reported_at_once_and_nothing_is_lost(faulty: Faulty) -> None:
    store, faults = faulty()
    store.create("before", b"")
    faults.shares = {"expired": 1.0}
    asked = len(faults.requests)
    with pytest.raises(UnavailableError, match=r"ExpiredToken.*renew the credentials") as raised:
        store.create("after", b"")
    assert raised.value.exit_code == 3 and len(faults.requests) == asked + 1
    faults.shares = {}
    assert store.create("after", b"") and not store.create("before", b"")


def test_what_the_credentials_do_not_allow_is_not_tried_again(faulty: Faulty) -> None:
    store, faults = faulty(shares={"denied": 1.0})
    with pytest.raises(StorageError, match=r"AccessDenied.*check the credentials") as raised:
        store.create("key", b"")
    assert raised.value.exit_code == 1 and len(faults.requests) == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dropped_headers": {"if-none-match"}}, "a second create of .* was not refused"),
        ({"shares": {"not_implemented": 1.0}}, "NotImplemented.*honours conditional create"),
    ],
)
def test_a_server_without_conditional_create_is_refused(
    faulty: Faulty, settings: dict[str, Any], line: str
) -> None:
    store, _ = faulty(**settings)
    with pytest.raises(RefusedError, match=line) as raised:
        check_create_only(store)
    assert raised.value.exit_code == 4


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"key": "nobody"}, "InvalidAccessKeyId.*check the credentials"),
        ({"secret": "wrong"}, "SignatureDoesNotMatch.*check the credentials"),
    ],
)
def test_a_wrong_login_is_one_line(seaweedfs: Server, change: dict[str, str], line: str) -> None:
    store = open_store(seaweedfs.new_url(), seaweedfs.options | change)
    with pytest.raises(StorageError, match=line) as raised:
        store.create("key", b"")
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ({"endpont_url": "http://x"}, SpecError, "storage_options: .*endpont_url"),
        ({"profile": "nobody"}, StorageError, "s3://bucket/out: cannot be opened: .*nobody"),
    ],
)
def test_options_that_s3fs_rejects_are_reported_before_any_request(
    options: dict[str, str], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line):
        open_store("s3://bucket/out", options)


def test_endpoint_and_login_may_come_from_the_environment_alone(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unknown")
    # — s3fs would return the cached instance of other variables
    store = open_store(moto.new_url(), {"skip_instance_cache": True})
    assert store.create("key", b"data")
    assert f"{BUCKET}/" in store.url


def test_a_server_that_refuses_a_wrong_clock_is_named_and_the_run_can_go_on(
    seaweedfs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(seaweedfs.new_url(), seaweedfs.options)
    with monkeypatch.context() as patch:
        turn_the_clock(patch)
        with pytest.raises(UnavailableError, match=r"TimeTooSkewed.*set the clock.*run again"):
            store.create("key", b"")
    assert store.create("key", b"")


def turn_the_clock(patch: pytest.MonkeyPatch) -> None:
    """Requests are signed as if it were an hour later."""
    now = botocore.auth.get_current_datetime

    def later(*arguments: Any, **named: Any) -> datetime.datetime:
        time: datetime.datetime = now(*arguments, **named) + datetime.timedelta(hours=1)
        return time

    patch.setattr(botocore.auth, "get_current_datetime", later)
