"""The store on S3 and compatible servers. A conditional PUT creates each object.

Requests go through s3fs, so the user's s3fs, fsspec and AWS settings apply.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.retries import (
    Cause,
    RetryPolicy,
    cause_of,
    option_errors,
    remote_errors,
    retry,
    storage_errors,
)
from pipeline.stores.store import StoredObject, check_key, check_prefix, is_listed

# The object's metadata has the nonce of the create that made it. If the reply to a create is lost,
# the store answers the retry that the object exists; only the nonce shows which writer made it.
ATTEMPT = "assay-attempt"

DELETE_BATCH = 1_000  # the most keys that one request of S3 takes


class _SingleTry(S3FileSystem):  # type: ignore[misc]
    """s3fs without its own retries, which treat too few errors as transient."""

    retries = 1


# botocore's own retries, of which each may wait for the client's timeout, are not needed either.
_ONE_TRY = {"retries": {"total_max_attempts": 1}}


def open_s3(url: str, options: Mapping[str, Any]) -> S3Store:
    """The store at s3://bucket/prefix. The options are s3fs's and override user settings."""
    with storage_errors(url, "opened"), option_errors("storage_options", options):
        config = {**_ONE_TRY, **options.get("config_kwargs", {})}
        file_system = _SingleTry(**{**options, "config_kwargs": config})
        file_system.connect()  # reads the profile and checks the options; sends no request
    bucket, prefix, _ = file_system.split_path(url)
    if not bucket:
        raise RefusedError(f"output: write s3://bucket/prefix (got {url!r})")
    return S3Store(bucket, (prefix.strip("/") + "/").lstrip("/"), file_system)


@dataclass(frozen=True, slots=True)
class S3Store:
    """The objects below a prefix of a bucket."""

    bucket: str
    prefix: str  # with its slash; "" for the whole bucket
    file_system: S3FileSystem
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def create(self, key: str, data: bytes) -> str | None:
        nonce = uuid.uuid4().hex
        place = self._place(key)
        put = {"Key": place, "Body": data, "IfNoneMatch": "*", "Metadata": {ATTEMPT: nonce}}
        try:
            reply = self._request("put_object", **put)
        except remote_errors() as error:
            with storage_errors(f"{self.url}/{key}", "written"):
                if cause_of(error) is not Cause.EXISTS:
                    raise
                reply = self._request("head_object", Key=place)
                if reply.get("Metadata", {}).get(ATTEMPT) != nonce:
                    return None
        return str(reply.get("ETag", nonce)).strip('"')

    def read(self, key: str) -> bytes:
        place = f"{self.bucket}/{self._place(key)}"
        with storage_errors(f"{self.url}/{key}", "read"):
            # — one request: with more, s3fs requests the size first, which may be out of date
            read = partial(self.file_system.cat_file, place, max_concurrency=1)
            data: bytes = retry(read, self.retry_policy)
            return data

    def delete(self, keys: Sequence[str]) -> None:
        for batch in (keys[i : i + DELETE_BATCH] for i in range(0, len(keys), DELETE_BATCH)):
            objects = {"Objects": [{"Key": self._place(key)} for key in batch], "Quiet": True}
            with storage_errors(f"{self.url}/{batch[0]}", "deleted"):
                retry(partial(self._delete, objects), self.retry_policy)

    def _delete(self, objects: dict[str, Any]) -> None:
        reply = self.file_system.call_s3("delete_objects", Bucket=self.bucket, Delete=objects)
        for refused in reply.get("Errors", ()):  # — in a reply with status 200
            error = ClientError({"Error": refused}, "DeleteObjects")
            if cause_of(error) is Cause.BUSY:
                raise error
            raise StorageError(
                f"s3://{self.bucket}/{refused.get('Key')}: cannot be deleted: "
                f"{refused.get('Code')}: {refused.get('Message')}"
            )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        with storage_errors(f"{self.url}/{prefix}", "listed"):
            # — S3 lists by key, SeaweedFS by folder, and directory buckets of S3 in no order
            listed = sorted(self._listed(prefix), key=attrgetter("key"))
        yield from (stored for stored in listed if is_listed(stored.key, prefix))

    def _listed(self, prefix: str) -> Iterator[StoredObject]:
        query: dict[str, Any] = {"Prefix": self.prefix + prefix}
        while True:
            page = self._request("list_objects_v2", **query)
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self.prefix)
                yield StoredObject(
                    key,
                    int(entry["Size"]),
                    entry["ETag"].strip('"'),
                    entry["LastModified"].timestamp(),
                )
            if not page.get("IsTruncated"):
                return
            if not page.get("NextContinuationToken"):
                raise StorageError(
                    f"{self.url}/{prefix}: a truncated listing has no continuation token, so "
                    f"finished work would be repeated; use another store"
                )
            query = {**query, "ContinuationToken": page["NextContinuationToken"]}

    def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        call = partial(self.file_system.call_s3, method, Bucket=self.bucket, **arguments)
        reply: dict[str, Any] = retry(call, self.retry_policy)
        return reply

    def _place(self, key: str) -> str:
        check_key(key)
        return self.prefix + key
