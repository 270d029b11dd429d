"""The store on Google Cloud Storage, beyond the contract that all stores are tested for."""

from __future__ import annotations

import importlib
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Faults, proxied
from google.auth.exceptions import RefreshError
from servers import Server, serving

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.sources.source import find_objects
from pipeline.stores import gcs as gcs_store
from pipeline.stores.named_files import open_target
from pipeline.stores.store import open_store


@pytest.mark.parametrize("fault", ["lost_reply", "reset"])
def test_a_create_whose_request_or_reply_was_lost_is_recognised_as_our_own(
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


def test_credentials_that_cannot_be_renewed_are_reported_and_to_be_run_again(
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


class Refusing(BaseHTTPRequestHandler):
    """Answers as Google does without rights."""

    def do_GET(self) -> None:
        reply = b'{"error": {"code": 401, "message": "Anonymous caller may not list"}}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def test_a_refusal_is_one_line_for_an_input_and_for_a_target(tmp_path: Path) -> None:
    with serving(Refusing) as endpoint:
        options = {"endpoint_url": endpoint, "token": "anon"}
        with pytest.raises(StorageError, match=r"gs://b/x/\*.jsonl: cannot be read: Anonymous"):
            find_objects("gs://b/x/*.jsonl", tmp_path, options)
        with pytest.raises(StorageError, match=r"gs://b/out: cannot be read: Anonymous"):
            open_target("gs://b/out", options).read()


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    message = r"output: gs:// needs gcsfs .*pip install 'corpus-assay\[gcs\]'"
    with pytest.raises(SpecError, match=message):
        importlib.reload(gcs_store)
