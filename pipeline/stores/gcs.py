"""The store on Google Cloud Storage. An upload with `ifGenerationMatch=0` creates each object.

Requests go through gcsfs, which retries them itself. gcsfs is an extra:
`pip install 'corpus-assay[gcs]'`.
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from pipeline.errors import Problem, RefusedError, SpecError
from pipeline.stores.retries import Cause, cause_of, option_errors, remote_errors, storage_errors
from pipeline.stores.store import StoredObject, check_key, check_prefix, is_listed

try:
    from gcsfs.core import GCSFileSystem  # the REST client; `gcsfs.GCSFileSystem` tries gRPC first
except ImportError as missing:
    fix = f"gs:// needs gcsfs ({missing}); pip install 'corpus-assay[gcs]'"
    raise SpecError([Problem("output", fix, "gs://")]) from missing

# The object's metadata has the nonce of the create that made it, as in `stores.s3`.
ATTEMPT = "assay-attempt"
# gcsfs raises ValueError for a reply that contains "invalid".
_storage_errors = partial(storage_errors, more=(ValueError,))


def open_gcs(url: str, options: Mapping[str, Any]) -> GcsStore:
    """The store at gs://bucket/prefix; the options are gcsfs's."""
    with option_errors("storage_options", options), _storage_errors(url, "opened"):
        file_system = GCSFileSystem(**options)
    bucket, prefix, _ = file_system.split_path(url)
    if not bucket:
        raise RefusedError(f"output: write gs://bucket/prefix (got {url!r})")
    return GcsStore(bucket, (prefix.strip("/") + "/").lstrip("/"), file_system)


@dataclass(frozen=True, slots=True)
class GcsStore:
    """The objects below a prefix of a bucket."""

    bucket: str
    prefix: str  # with its slash; "" for the whole bucket
    file_system: GCSFileSystem

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/{self.prefix}".rstrip("/")

    def create(self, key: str, data: bytes) -> str | None:
        nonce, name = uuid.uuid4().hex, self._place(key)
        place = f"{self.bucket}/{name}"
        with _storage_errors(f"{self.url}/{key}", "written"):
            try:
                # — mode="create" is ifGenerationMatch=0
                self.file_system.pipe_file(place, data, metadata={ATTEMPT: nonce}, mode="create")
            except remote_errors() as error:
                if cause_of(error) is not Cause.EXISTS:
                    raise
                metadata = self._get("b/{}/o/{}", self.bucket, name).get("metadata", {})
                if metadata.get(ATTEMPT) != nonce:
                    return None
        return base64.b64encode(hashlib.md5(data).digest()).decode()  # — as LIST shows it

    def read(self, key: str) -> bytes:
        place = f"{self.bucket}/{self._place(key)}"
        with _storage_errors(f"{self.url}/{key}", "read"):
            data: bytes = self.file_system.cat_file(place)
            return data

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with _storage_errors(f"{self.url}/{key}", "deleted"), suppress(FileNotFoundError):
                self.file_system.call("DELETE", "b/{}/o/{}", self.bucket, self._place(key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        with _storage_errors(f"{self.url}/{prefix}", "listed"):
            listed = list(self._listed(prefix))
        yield from (stored for stored in listed if is_listed(stored.key, prefix))

    def _listed(self, prefix: str) -> Iterator[StoredObject]:
        query = {"prefix": self.prefix + prefix}
        while True:
            page = self._get("b/{}/o", self.bucket, **query)
            for entry in page.get("items", ()):
                key = entry["name"].removeprefix(self.prefix)
                yield StoredObject(
                    key,
                    int(entry["size"]),
                    entry.get("md5Hash") or entry["etag"],
                    datetime.fromisoformat(entry["updated"]).timestamp(),
                )
            if not page.get("nextPageToken"):
                return
            query = {**query, "pageToken": page["nextPageToken"]}

    def _get(self, path: str, *names: str, **query: str) -> dict[str, Any]:
        reply: dict[str, Any] = self.file_system.call("GET", path, *names, json_out=True, **query)
        return reply

    def _place(self, key: str) -> str:
        check_key(key)
        return self.prefix + key
