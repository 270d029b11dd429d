"""The store on S3 and what speaks like it: one conditional PUT makes an object, or nothing does.

Knows S3's requests, made through s3fs so that the user's own s3fs, fsspec and AWS settings hold.
Knows nothing of what the objects hold.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from s3fs import S3FileSystem

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.errors import (
    DEFAULT_RETRY_POLICY,
    REMOTE_ERRORS,
    Cause,
    RetryPolicy,
    cause_of,
    explained,
    is_passing,
    options_of,
    retry,
)
from pipeline.stores.store import StoredObject, check_key, check_prefix, is_listed

# The object's metadata names the create that made it. A reply can be lost after the object is
# there; the retry then hears that it exists, and only this tells whose it is.
ATTEMPT = "assay-attempt"

DELETED_AT_ONCE = 1_000  # what one request of S3 takes

Result = TypeVar("Result")


class _SingleTry(S3FileSystem):  # type: ignore[misc]
    """s3fs without retries of its own: it asks five times, and knows half of the passing errors."""

    retries = 1


def open_s3(url: str, options: Mapping[str, Any]) -> S3Store:
    """The store at s3://bucket/prefix; the options are s3fs's, and stand over the user's own."""
    with explained(url, "opened"), options_of("storage_options", options):
        file_system = _SingleTry(**options)
        file_system.connect()  # reads the profile, and takes or refuses the options; asks nobody
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
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY

    @property
    def url(self) -> str:
        """The bucket and the prefix."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def create(self, key: str, data: bytes) -> bool:
        """True: this call made the object, even if the reply was lost. False: it was there."""
        nonce = uuid.uuid4().hex
        place = self._place(key)
        put = {"Key": place, "Body": data, "IfNoneMatch": "*", "Metadata": {ATTEMPT: nonce}}
        try:
            self._retry(partial(self._request, "put_object", **put))
        except REMOTE_ERRORS as error:
            with explained(f"{self.url}/{key}", "written"):
                if cause_of(error) is not Cause.EXISTS:
                    raise
                return self._maker(place) == nonce
        return True

    def read(self, key: str) -> bytes:
        """The object's content."""
        place = f"{self.bucket}/{self._place(key)}"
        with explained(f"{self.url}/{key}", "read"):
            # — one request: with more, s3fs asks for the size first and may be told an older one
            read = partial(self.file_system.cat_file, place, max_concurrency=1)
            data: bytes = self._retry(read)
            return data

    def delete(self, keys: Sequence[str]) -> None:
        """The objects are gone; one that was not there is no error."""
        for batch in (keys[i : i + DELETED_AT_ONCE] for i in range(0, len(keys), DELETED_AT_ONCE)):
            objects = [{"Key": self._place(key)} for key in batch]
            with explained(f"{self.url}/{batch[0]}", "deleted"):
                wanted = {"Objects": objects, "Quiet": True}
                reply = self._retry(partial(self._request, "delete_objects", Delete=wanted))
            for refused in reply.get("Errors", ()):
                raise StorageError(
                    f"s3://{self.bucket}/{refused.get('Key')}: cannot be deleted: "
                    f"{refused.get('Code')}: {refused.get('Message')}"
                )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, in the order of their keys."""
        check_prefix(prefix)
        with explained(f"{self.url}/{prefix}", "listed"):
            found = [stored for page in self._pages(prefix) for stored in self._stored(page)]
        # — S3 lists by key, but SeaweedFS by folder and directory buckets in no order at all
        found.sort(key=lambda stored: stored.key)
        yield from (stored for stored in found if is_listed(stored.key, prefix))

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        asked: dict[str, Any] = {"Prefix": self._start + prefix}
        while True:
            page = self._retry(partial(self._request, "list_objects_v2", **asked))
            yield page
            if not page.get("IsTruncated"):
                return
            if not page.get("NextContinuationToken"):
                raise StorageError(
                    f"{self.url}/{prefix}: a listing breaks off and does not say where it goes "
                    f"on, so work that is done would be done again; use another store"
                )
            asked = {**asked, "ContinuationToken": page["NextContinuationToken"]}

    def _stored(self, page: dict[str, Any]) -> Iterator[StoredObject]:
        for entry in page.get("Contents", ()):
            key = entry["Key"].removeprefix(self._start)
            yield StoredObject(key, int(entry["Size"]), entry["ETag"].strip('"'))

    def _maker(self, place: str) -> str | None:
        """The nonce of the create that made the object."""
        head = self._retry(partial(self._request, "head_object", Key=place))
        nonce: str | None = head.get("Metadata", {}).get(ATTEMPT)
        return nonce

    def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.file_system.call_s3(method, Bucket=self.bucket, **arguments)
        return reply

    def _retry(self, call: Callable[[], Result]) -> Result:
        return retry(call, is_passing, self.retry_policy)

    @property
    def _start(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _place(self, key: str) -> str:
        check_key(key)
        return self._start + key
