"""The store on Google Cloud Storage, beyond the contract that all stores are tested for."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from fault_proxy import Faults, proxied
from google.auth.exceptions import RefreshError
from servers import Server

from pipeline.errors import SpecError, UnavailableError
from pipeline.stores import gcs as gcs_store
from pipeline.stores.store import open_store


@pytest.mark.parametrize("fault", ["lost_reply", "reset"])
def test_a_create_whose_request_or_reply_was_lost_is_known_for_our_own(
    fake_gcs: Server, fault: str
) -> None:
    faults = Faults()
    with proxied(fake_gcs.endpoint, faults) as endpoint:
        store = open_store(fake_gcs.new_url(), {**fake_gcs.options, "endpoint_url": endpoint})
        faults.once(fault, "POST")
        assert store.create("key", b"first")
        assert not store.create("key", b"second")
        assert store.read("key") == b"first"
    assert faults.counted == {fault: 1}
    uploads = [line for line in faults.requests if line.startswith("POST")]
    assert len(uploads) == 3 and all("ifGenerationMatch=0" in line for line in uploads)


def test_credentials_that_cannot_be_renewed_are_told_and_to_be_run_again(
    fake_gcs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise RefreshError("invalid_grant: Token has been expired or revoked.")

    store = open_store(fake_gcs.new_url(), fake_gcs.options)
    monkeypatch.setattr(store.file_system, "pipe_file", refuse)
    with pytest.raises(
        UnavailableError, match=r"key: .*invalid_grant.*renew the credentials"
    ) as raised:
        store.create("key", b"")
    assert raised.value.exit_code == 3


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    message = r"output: gs:// needs gcsfs .*pip install 'corpus-assay\[gcs\]'"
    with pytest.raises(SpecError, match=message):
        importlib.reload(gcs_store)
