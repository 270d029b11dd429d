"""Retries of requests to object stores, and the errors of those that fail permanently.

Entry points: `retry` repeats a request after transient errors, `cause_of` classifies an error of
S3, Google Cloud Storage or HTTP, and `storage_errors` turns a client's errors into assay's.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from http.client import HTTPException
from itertools import chain
from typing import Any, TypeVar

import botocore.exceptions as boto
from aiohttp import ClientError as HttpClientError
from aiohttp import ClientResponseError, ClientSSLError, InvalidURL
from botocore.parsers import ResponseParserError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from pipeline.errors import Problem, RefusedError, SpecError, StorageError, UnavailableError
from pipeline.stores.hub import HubClientError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Requests that are retried for longer than this are named on the terminal, too.
QUIET_S = 5.0
_answered = threading.Event()  # whether a store has answered this process


class Cause(Enum):
    """Why a request failed. Each cause needs another reaction."""

    EXISTS = auto()  # the object exists
    MISSING = auto()  # no such object or bucket
    BUSY = auto()  # transient: the same request may succeed later
    EXPIRED = auto()  # the credentials are no longer valid
    DENIED = auto()  # the credentials do not allow this
    UNSUPPORTED = auto()  # the store has no such operation
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to retry a request: by default as long as a server takes to start again.

    Each wait is random, from zero to a limit that doubles, so that workers that failed at the same
    time do not retry at the same time. A request without an answer ends after the client's timeout.
    """

    seconds: float = 90.0  # stop retrying after this time
    # The same until any store has answered this process: a wrong endpoint is likelier than an
    # outage.
    first_seconds: float = 15.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0


# What clients raise for a failed request, without gcsfs. s3fs raises OSError for some codes of S3,
# and passes botocore's or aiohttp's own error on for others. NotImplementedError is what fsspec
# raises where a file system cannot write, or cannot list.
_ERRORS = (
    OSError, NotImplementedError, boto.BotoCoreError, boto.ClientError, HttpClientError,
    HTTPException, HubClientError,
)  # fmt: skip

# 409 and its codes: another create of the key is in progress, and which one succeeds is not known.
# The last four: the body was truncated or corrupted on its way.
_BUSY_CODES = """
    ConditionalRequestConflict OperationAborted InternalError ServiceUnavailable SlowDown
    RequestTimeout RequestLimitExceeded BandwidthLimitExceeded Throttling ThrottlingException
    IncompleteBody BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch
"""
# A reply to HEAD has no body for an error code; S3 answers 400 mostly for an expired token.
_EXPIRED_CODES = """
    400 ExpiredToken ExpiredTokenException InvalidToken InvalidTokenId RequestExpired
    TokenRefreshRequired RequestTimeTooSkewed
"""
_CODES = {
    "PreconditionFailed": Cause.EXISTS,
    "NotImplemented": Cause.UNSUPPORTED,
    **dict.fromkeys(_BUSY_CODES.split(), Cause.BUSY),
    **dict.fromkeys(_EXPIRED_CODES.split(), Cause.EXPIRED),
}
_STATUSES = {
    401: Cause.EXPIRED,
    403: Cause.DENIED,
    404: Cause.MISSING,
    412: Cause.EXISTS,
    **dict.fromkeys((408, 409, 429, *range(500, 600)), Cause.BUSY),
    501: Cause.UNSUPPORTED,
}
# In this order: some are subclasses of later ones.
_TYPES: tuple[tuple[Cause, tuple[type[BaseException], ...]], ...] = (
    (Cause.EXISTS, (FileExistsError,)),
    (Cause.MISSING, (FileNotFoundError, ClientResponseError)),
    (Cause.OTHER, (boto.SSLError, ClientSSLError, InvalidURL)),
    (Cause.EXPIRED, (boto.CredentialRetrievalError, boto.SSOError, boto.TokenRetrievalError)),
    (Cause.DENIED, (boto.NoCredentialsError, boto.PartialCredentialsError, PermissionError)),
    (Cause.BUSY, (TimeoutError, ConnectionError, boto.ConnectionError, boto.HTTPClientError)),
    (Cause.BUSY, (boto.IncompleteReadError, boto.FlexibleChecksumError, ResponseParserError)),
    (Cause.BUSY, (HttpClientError, HTTPException, HubClientError)),
)
_ADVICE = {
    Cause.EXPIRED: "renew the credentials, or set the clock, and run again to go on",
    Cause.BUSY: "it may be overloaded or out of reach; run again to go on",
    Cause.MISSING: "check the path, the bucket and the endpoint",
    Cause.DENIED: "check the credentials and what they may do there",
    Cause.OTHER: "check the path, the endpoint and the storage_options",
}
# The limits of the machine or of the process, which look the same in each store.
_LIMITS = {
    errno.EFBIG: "`ulimit -f` limits the size of files; raise it",
    errno.EMFILE: "`ulimit -n` limits the number of open files; raise it",
    errno.ENOSPC: "free some space",
}


def remote_errors() -> tuple[type[BaseException], ...]:
    """All errors that the clients raise for a failed request."""
    return (*_ERRORS, *chain.from_iterable(types for _, types in _gcs_types()))


def _gcs_types() -> tuple[tuple[Cause, tuple[type[BaseException], ...]], ...]:
    """As `_TYPES`, for gcsfs: an extra, and slow to load where nothing else has loaded it."""
    if "gcsfs.retry" not in sys.modules:
        return ()
    from gcsfs.retry import ChecksumError, HttpError
    from google.auth.exceptions import GoogleAuthError, RefreshError

    return (
        (Cause.EXPIRED, (RefreshError,)),
        (Cause.BUSY, (ChecksumError,)),
        (Cause.OTHER, (HttpError, GoogleAuthError)),
    )


def cause_of(error: BaseException) -> Cause:
    """Why the request failed: by the server's error code, else its status, else the exception."""
    for linked in _chain(error):
        cause = _CODES.get(_code(linked)) or _STATUSES.get(_status(linked))
        if cause is not None:
            return cause
    own, kinds = _own(error), (*_TYPES, *_gcs_types())
    return next((cause for cause, types in kinds if isinstance(own, types)), Cause.OTHER)


def retry(call: Callable[[], Result], policy: RetryPolicy = RetryPolicy()) -> Result:
    """The result of the call, repeated after transient errors; its last error at the end.

    Some clients try again themselves, and treat some transient errors as final: s3fs does so with
    status 500.
    """
    seconds = policy.seconds if _answered.is_set() else policy.first_seconds
    retrying = Retrying(
        stop=stop_after_delay(seconds),
        wait=wait_random_exponential(multiplier=policy.first_wait_s, max=policy.longest_wait_s),
        retry=retry_if_exception(_is_busy),
        before_sleep=_log_retry,
        reraise=True,
    )
    result = retrying(call)
    _answered.set()
    return result


def _is_busy(error: BaseException) -> bool:
    if cause_of(error) is Cause.BUSY:
        return True
    _answered.set()
    return False


def _log_retry(state: RetryCallState) -> None:
    seconds = state.seconds_since_start or 0.0
    level = logging.INFO if seconds < QUIET_S else logging.WARNING
    error = None if state.outcome is None else state.outcome.exception()
    reason = "" if error is None else _reason(error)
    logger.log(
        level, "a store did not answer (%s); it is asked again, %.0f s so far", reason, seconds
    )


@contextmanager
def storage_errors(place: str, done: str, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raises a client's error as a StorageError of one line: `place: cannot be read: ...`.

    `more` is what only the client of this place raises for a failed request.
    """
    try:
        yield
    except (*remote_errors(), *more) as error:
        raise as_storage_error(error, place, done) from error


@contextmanager
def option_errors(place: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Raises the error of an unknown storage option as a SpecError at this place of the spec."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        if not options:
            raise
        fix = f"the path cannot be opened with these options: {error}"
        raise SpecError([Problem(place, fix, sorted(options))]) from error


def as_storage_error(error: BaseException, place: str, done: str) -> StorageError | RefusedError:
    """The error with what failed and what to do; the caller raises it."""
    cause, line = cause_of(error), f"{place}: cannot be {done}: {_reason(error)}"
    if cause is Cause.UNSUPPORTED:
        return RefusedError(f"{line}; use a store that honours conditional create")
    if cause in (Cause.EXPIRED, Cause.BUSY):
        return UnavailableError(f"{line}; committed results are kept; {_ADVICE[cause]}")
    limit = _LIMITS.get(getattr(error, "errno", None) or 0)
    return StorageError(f"{line}; {limit or _ADVICE.get(cause, _ADVICE[Cause.OTHER])}")


def _reason(error: BaseException) -> str:
    """The server's code and message, or the exception's, on one line."""
    code = next((_code(linked) for linked in _chain(error) if _code(linked)), "")
    own = _own(error)
    strerror = getattr(own, "strerror", None)
    text = " ".join(str(strerror or own).split()) or type(own).__name__
    return text if not code or code.isdigit() or code in text else f"{code}: {text}"


def _own(error: BaseException) -> BaseException:
    """The client's error: fsspec reports every failure of a web server as a missing file."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return cause if isinstance(cause, HttpClientError | TimeoutError) else error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: s3fs keeps botocore's error there."""
    linked: BaseException | None = error
    while linked is not None:
        yield linked
        linked = linked.__cause__


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _status(error: BaseException) -> int:
    """The HTTP status; 0 without one. Each client keeps it in another attribute."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    # — read last: aiohttp warns when its own `code` is read. gcsfs has an int or a string of digits
    digits = str(status or getattr(error, "code", None))
    return int(digits) if digits.isdigit() else 0
