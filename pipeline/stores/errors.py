"""What an error of a remote store means: try again, renew the credentials, or give up.

Knows the exceptions and the answers of S3, Google Cloud Storage and HTTP clients. Knows nothing of
what was asked for, nor of how often to try again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from http.client import HTTPException
from typing import Any, TypeVar

from aiohttp import ClientError as HttpClientError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError
from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from pipeline.errors import Problem, RefusedError, SpecError, StorageError, UnavailableError


class Cause(Enum):
    """Why a request failed, as far as it matters to what is done next."""

    EXISTS = auto()  # the object was there
    MISSING = auto()  # no such object, or no such bucket
    BUSY = auto()  # the same request may well succeed later
    EXPIRED = auto()  # the credentials were good once
    DENIED = auto()  # the credentials are not good for this
    UNSUPPORTED = auto()  # the store has no such operation
    OTHER = auto()


# Whatever the clients raise that is not a mistake of this program's. S3 errors come through s3fs
# as OSErrors where it knows their code, and as botocore's or aiohttp's own where it does not.
REMOTE_ERRORS = (OSError, BotoCoreError, ClientError, HttpClientError, HTTPException)

_CODES: dict[str, Cause] = {
    "PreconditionFailed": Cause.EXISTS,
    # 409: another create of the key was under way, and which of them made it is not yet known
    "ConditionalRequestConflict": Cause.BUSY,
    "OperationAborted": Cause.BUSY,
    "InternalError": Cause.BUSY,
    "ServiceUnavailable": Cause.BUSY,
    "SlowDown": Cause.BUSY,
    "RequestTimeout": Cause.BUSY,
    "RequestLimitExceeded": Cause.BUSY,
    "BandwidthLimitExceeded": Cause.BUSY,
    "Throttling": Cause.BUSY,
    "ThrottlingException": Cause.BUSY,
    # the body was cut off, or came through another than it was sent
    "IncompleteBody": Cause.BUSY,
    "BadDigest": Cause.BUSY,
    "XAmzContentSHA256Mismatch": Cause.BUSY,
    "XAmzContentChecksumMismatch": Cause.BUSY,
    # a HEAD has no room for a word: S3 answers an expired token with this, and with little else
    "400": Cause.EXPIRED,
    "ExpiredToken": Cause.EXPIRED,
    "ExpiredTokenException": Cause.EXPIRED,
    "InvalidToken": Cause.EXPIRED,
    "InvalidTokenId": Cause.EXPIRED,
    "RequestExpired": Cause.EXPIRED,
    "TokenRefreshRequired": Cause.EXPIRED,
    "RequestTimeTooSkewed": Cause.EXPIRED,
    "NotImplemented": Cause.UNSUPPORTED,
}
_STATUSES: dict[int, Cause] = {
    401: Cause.EXPIRED,
    403: Cause.DENIED,
    404: Cause.MISSING,
    408: Cause.BUSY,
    409: Cause.BUSY,
    412: Cause.EXISTS,
    429: Cause.BUSY,
    500: Cause.BUSY,
    501: Cause.UNSUPPORTED,
    502: Cause.BUSY,
    503: Cause.BUSY,
    504: Cause.BUSY,
}
# In this order: some are kinds of others.
_TYPES: tuple[tuple[type[BaseException], Cause], ...] = (
    (FileExistsError, Cause.EXISTS),
    (FileNotFoundError, Cause.MISSING),
    (SSLError, Cause.OTHER),
    (NoCredentialsError, Cause.DENIED),
    (PartialCredentialsError, Cause.DENIED),
    (CredentialRetrievalError, Cause.EXPIRED),
    (SSOError, Cause.EXPIRED),
    (TokenRetrievalError, Cause.EXPIRED),
    (PermissionError, Cause.DENIED),
    (TimeoutError, Cause.BUSY),
    (ConnectionError, Cause.BUSY),
    (BotoConnectionError, Cause.BUSY),
    (HTTPClientError, Cause.BUSY),
    (IncompleteReadError, Cause.BUSY),
    (FlexibleChecksumError, Cause.BUSY),
    (ResponseParserError, Cause.BUSY),
    (HttpClientError, Cause.BUSY),
    (HTTPException, Cause.BUSY),
)
_ADVICE = {
    Cause.EXPIRED: "renew the credentials, or set the clock, and run again to go on",
    Cause.BUSY: "it may be overloaded or out of reach; run again to go on",
    Cause.MISSING: "check the path, the bucket and the endpoint",
    Cause.DENIED: "check the credentials and what they may do there",
    Cause.OTHER: "check the path, the endpoint and the storage_options",
}


def cause_of(error: BaseException) -> Cause:
    """Why the request failed: by the server's own word, then its status, then the exception."""
    for found in _chain(error):
        cause = _CODES.get(_code(found)) or _STATUSES.get(_status(found))
        if cause is not None:
            return cause
    return next((cause for kind, cause in _TYPES if isinstance(error, kind)), Cause.OTHER)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed if it is made again."""
    return cause_of(error) is Cause.BUSY


@contextmanager
def explained(place: str, done: str) -> Iterator[None]:
    """Whatever a client raises, as one line that says what to do: `place: cannot be read: ...`."""
    try:
        yield
    except REMOTE_ERRORS as error:
        raise as_storage_error(error, place, done) from error


@contextmanager
def options_of(place: str, options: Mapping[str, Any]) -> Iterator[None]:
    """An option that the file system does not take, as a problem of the spec at the place."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        if not options:
            raise
        fix = f"the path cannot be opened with these options: {error}"
        raise SpecError([Problem(place, fix, sorted(options))]) from error


def as_storage_error(error: BaseException, place: str, done: str) -> StorageError | RefusedError:
    """The error for what could not be done at the place; the caller raises it."""
    cause, line = cause_of(error), f"{place}: cannot be {done}: {reason_of(error)}"
    if cause is Cause.UNSUPPORTED:
        return RefusedError(f"{line}; use a store that honours conditional create")
    if cause in (Cause.EXPIRED, Cause.BUSY):
        return UnavailableError(f"{line}; what is committed stands; {_ADVICE[cause]}")
    return StorageError(f"{line}; {_ADVICE.get(cause, _ADVICE[Cause.OTHER])}")


def reason_of(error: BaseException) -> str:
    """The server's code and message, or the exception's, on one line."""
    code = next((_code(found) for found in _chain(error) if _code(found)), "")
    strerror = getattr(error, "strerror", None)
    text = " ".join(str(strerror or error).split()) or type(error).__name__
    return text if not code or code.isdigit() or code in text else f"{code}: {text}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from: s3fs keeps botocore's error there."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _status(error: BaseException) -> int:
    """The HTTP status, wherever this client keeps it; 0 where there is none."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    places = ((response, "status_code"), (error, "status"))
    told = next((status for of, name in places if (status := getattr(of, name, None))), None)
    # — gcsfs writes it as a number or as its digits; aiohttp warns of its own `code`
    status = str(told or getattr(error, "code", None))
    return int(status) if status.isdigit() else 0


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a store may be out of reach before the run gives up: by default about a minute.

    Each wait is drawn from zero to a limit that doubles, so that workers who failed together do
    not come back together.
    """

    attempts: int = 8
    first_wait_s: float = 0.2
    longest_wait_s: float = 20.0


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry(
    call: Callable[[], Result], is_passing: Callable[[BaseException], bool], policy: RetryPolicy
) -> Result:
    """What the call gives once it succeeds; its last error when patience is at an end."""
    retrying = Retrying(
        stop=stop_after_attempt(policy.attempts),
        wait=wait_random_exponential(multiplier=policy.first_wait_s, max=policy.longest_wait_s),
        retry=retry_if_exception(is_passing),
        before_sleep=before_sleep_log(logger, logging.INFO),
        reraise=True,
    )
    return retrying(call)
