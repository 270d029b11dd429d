"""The store on S3 and compatible servers. A conditional PUT creates each object.

Requests go through s3fs, so the user's s3fs, fsspec and AWS settings apply.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from s3fs import S3FileSystem

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.errors import (
    REMOTE_ERRORS,
    Cause,
    RetryPolicy,
    cause_of,
    option_errors,
    retry,
    storage_errors,
)
from pipeline.stores.store import StoredObject, check_key, check_prefix, is_listed

# The object's metadata has the nonce of the create that made it. If the reply to a create is lost,
# the retry is told that the object exists, and only the nonce shows which writer made it.
ATTEMPT = "assay-attempt"

DELETE_BATCH = 1_000  # the most keys that one request of S3 takes

Result = TypeVar("Result")


class _SingleTry(S3FileSystem):  # type: ignore[misc]
    """s3fs without its own retries, which treat too few errors as transient."""

    retries = 1


def open_s3(url: str, options: Mapping[str, Any]) -> S3Store:
    """The store at s3://bucket/prefix. The options are s3fs's and override user settings."""
    with storage_errors(url, "opened"), option_errors("storage_options", options):
        file_system = _SingleTry(**options)
        file_system.connect()  # reads the profile and checks the options; sends no request
    bucket, prefix, _ = file_system.split_path(url)
    if not bucket:
        raise RefusedError(f"output: write s3://bucket/prefix (got {url!r})")
    return S3Store(bucket, prefix.strip("/"), file_system)


@dataclass(frozen=True, slots=True)
class S3Store:
    """The objects below a prefix of a bucket."""

    bucket: str
    prefix: str
    file_system: S3FileSystem
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def url(self) -> str:
        """The bucket and the prefix."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def create(self, key: str, data: bytes) -> bool:
        """Whether this call made the object, also if its reply was lost. An existing one stays."""
        nonce = uuid.uuid4().hex
        place = self._place(key)
        put = {"Key": place, "Body": data, "IfNoneMatch": "*", "Metadata": {ATTEMPT: nonce}}
        try:
            self._retry(partial(self._request, "put_object", **put))
        except REMOTE_ERRORS as error:
            with storage_errors(f"{self.url}/{key}", "written"):
                if cause_of(error) is not Cause.EXISTS:
                    raise
                return self._nonce(place) == nonce
        return True

    def read(self, key: str) -> bytes:
        """The object's content."""
        place = f"{self.bucket}/{self._place(key)}"
        with storage_errors(f"{self.url}/{key}", "read"):
            # — one request: with more, s3fs asks for the size first, which may be out of date
            read = partial(self.file_system.cat_file, place, max_concurrency=1)
            data: bytes = self._retry(read)
            return data

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes the objects; a missing one is no error."""
        for batch in (keys[i : i + DELETE_BATCH] for i in range(0, len(keys), DELETE_BATCH)):
            objects = [{"Key": self._place(key)} for key in batch]
            with storage_errors(f"{self.url}/{batch[0]}", "deleted"):
                batch_delete = {"Objects": objects, "Quiet": True}
                reply = self._retry(partial(self._request, "delete_objects", Delete=batch_delete))
            for refused in reply.get("Errors", ()):
                raise StorageError(
                    f"s3://{self.bucket}/{refused.get('Key')}: cannot be deleted: "
                    f"{refused.get('Code')}: {refused.get('Message')}"
                )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, in the order of their keys."""
        check_prefix(prefix)
        with storage_errors(f"{self.url}/{prefix}", "listed"):
            listed = [stored for page in self._pages(prefix) for stored in self._stored(page)]
        # — S3 lists by key, SeaweedFS by folder, and directory buckets of S3 in no order
        listed.sort(key=lambda stored: stored.key)
        yield from (stored for stored in listed if is_listed(stored.key, prefix))

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        query: dict[str, Any] = {"Prefix": self._start + prefix}
        while True:
            page = self._retry(partial(self._request, "list_objects_v2", **query))
            yield page
            if not page.get("IsTruncated"):
                return
            if not page.get("NextContinuationToken"):
                raise StorageError(
                    f"{self.url}/{prefix}: a truncated listing has no continuation token, so "
                    f"finished work would be repeated; use another store"
                )
            query = {**query, "ContinuationToken": page["NextContinuationToken"]}

    def _stored(self, page: dict[str, Any]) -> Iterator[StoredObject]:
        for entry in page.get("Contents", ()):
            key = entry["Key"].removeprefix(self._start)
            yield StoredObject(key, int(entry["Size"]), entry["ETag"].strip('"'))

    def _nonce(self, place: str) -> str | None:
        """The nonce of the create that made the object."""
        head = self._retry(partial(self._request, "head_object", Key=place))
        nonce: str | None = head.get("Metadata", {}).get(ATTEMPT)
        return nonce

    def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.file_system.call_s3(method, Bucket=self.bucket, **arguments)
        return reply

    def _retry(self, call: Callable[[], Result]) -> Result:
        return retry(call, self.retry_policy)

    @property
    def _start(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _place(self, key: str) -> str:
        check_key(key)
        return self._start + key
