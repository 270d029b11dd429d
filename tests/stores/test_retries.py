"""What an error means: by the server's code, its status, or the client's exception."""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any

import botocore.exceptions as boto
import pytest
from aiohttp import (
    ClientConnectorCertificateError,
    ClientPayloadError,
    ClientResponseError,
    InvalidURL,
    ServerDisconnectedError,
)
from gcsfs.retry import HttpError
from s3fs.errors import translate_boto_error

from pipeline.stores.retries import Cause, cause_of, storage_errors


def answer(code: str, status: int) -> OSError:
    """The error that s3fs raises for an answer of S3."""
    response: Any = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: OSError = translate_boto_error(boto.ClientError(response, "PutObject"))
    return error


def behind_not_found(cause: Exception) -> FileNotFoundError:
    """What fsspec raises for every failure of a web server."""
    error = FileNotFoundError("http://host/a.jsonl")
    error.__cause__ = cause
    return error


def refused(status: int) -> ClientResponseError:
    request: Any = SimpleNamespace(real_url="http://host/a.jsonl")
    return ClientResponseError(request, (), status=status)


KEY: Any = SimpleNamespace(host="host", port=443, ssl=True, is_ssl=True)
CERTIFICATE = ClientConnectorCertificateError(KEY, ssl.CertificateError("self-signed"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (answer("PreconditionFailed", 412), Cause.EXISTS),
        (answer("412", 412), Cause.EXISTS),
        (FileExistsError("key"), Cause.EXISTS),
        (answer("ConditionalRequestConflict", 409), Cause.BUSY),
        (answer("InternalError", 500), Cause.BUSY),
        (answer("SlowDown", 503), Cause.BUSY),
        (answer("SomethingNew", 503), Cause.BUSY),
        (answer("RequestTimeout", 400), Cause.BUSY),
        (boto.EndpointConnectionError(endpoint_url="http://x"), Cause.BUSY),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), Cause.BUSY),
        (boto.ReadTimeoutError(endpoint_url="http://x"), Cause.BUSY),
        (boto.ConnectionClosedError(endpoint_url="http://x"), Cause.BUSY),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), Cause.BUSY),
        (ConnectionResetError(104, "reset by peer"), Cause.BUSY),
        (TimeoutError(), Cause.BUSY),
        (ClientPayloadError("not enough data"), Cause.BUSY),
        (ServerDisconnectedError(), Cause.BUSY),
        (behind_not_found(ServerDisconnectedError()), Cause.BUSY),
        (behind_not_found(TimeoutError()), Cause.BUSY),
        (behind_not_found(refused(520)), Cause.BUSY),
        (behind_not_found(refused(400)), Cause.MISSING),
        (behind_not_found(ValueError("a name")), Cause.MISSING),
        (behind_not_found(CERTIFICATE), Cause.OTHER),
        (CERTIFICATE, Cause.OTHER),
        (InvalidURL("http://["), Cause.OTHER),
        (HttpError({"code": 503, "message": "backend error"}), Cause.BUSY),
        (HttpError({"code": "429", "message": "too many"}), Cause.BUSY),
        (answer("ExpiredToken", 400), Cause.EXPIRED),
        (answer("400", 400), Cause.EXPIRED),
        (answer("RequestTimeTooSkewed", 403), Cause.EXPIRED),
        (boto.UnauthorizedSSOTokenError(), Cause.EXPIRED),
        (HttpError({"code": 401, "message": "Invalid Credentials"}), Cause.EXPIRED),
        (answer("AccessDenied", 403), Cause.DENIED),
        (answer("InvalidAccessKeyId", 403), Cause.DENIED),
        (boto.NoCredentialsError(), Cause.DENIED),
        (answer("NoSuchBucket", 404), Cause.MISSING),
        (FileNotFoundError(2, "No such file"), Cause.MISSING),
        (answer("NotImplemented", 501), Cause.UNSUPPORTED),
        (answer("EntityTooLarge", 400), Cause.OTHER),
        (boto.SSLError(endpoint_url="https://x", error="bad certificate"), Cause.OTHER),
        (OSError(28, "No space left on device"), Cause.OTHER),
    ],
    ids=lambda value: str(value) if isinstance(value, Cause) else type(value).__name__,
)
def test_each_error_has_the_cause_that_decides_the_reaction(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_an_error_of_our_code_is_not_reported_as_a_stores() -> None:
    with pytest.raises(KeyError), storage_errors("s3://bucket/key", "written"):
        raise KeyError("a bug")
