"""Whether a cluster may be trusted with a job: who can reach it, and whether it asks for a token.

Knows addresses and one unauthenticated request. Knows nothing of Ray's client, of tokens' values or
of jobs: what asks for a job's token is asked before Ray is even imported.
"""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.parse import urlsplit

from pipeline.errors import RefusedError

_TIMEOUT_S = 20
# The list of jobs, which whoever may submit one may read.
_ASKED = "/api/jobs/"
_OPEN, _CLOSED = 200, (401, 403)


def is_job_api(address: str) -> bool:
    """Whether an address is that of Ray's Job API, to which a job is handed over."""
    return address.startswith(("http://", "https://"))


def requires_token(address: str, *, insecure: bool = False) -> bool:
    """Whether the Job API there wants a token.

    RefusedError if it does not, and others than this machine's users can reach it: whoever does
    can run programs there and read all that a job reads. `insecure` takes the risk.
    """
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise RefusedError(
            "--address: a name or password in it would be written to logs; leave it out, Ray takes "
            "its token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        )
    status = _status(address.rstrip("/") + _ASKED, address)
    if status in _CLOSED:
        return True
    if status != _OPEN:
        raise RefusedError(f"--address: no Ray Job API answers at {address}: status {status}")
    if not insecure and not is_loopback(address):
        raise RefusedError(
            f"--address: {address} takes jobs without a token from whoever reaches it; start the "
            f"cluster with RAY_AUTH_MODE=token, or accept the risk with --insecure-cluster"
        )
    return False


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address (an SSH tunnel's end is such a one)."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What answers for itself is asked, and nobody else."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _status(url: str, address: str) -> int:
    """The answer's status to a request that carries nothing."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(url, timeout=_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)
    except (OSError, HTTPException, ValueError) as error:
        raise RefusedError(f"--address: no Ray cluster answers at {address}: {error}") from error
