"""Whether a cluster is safe for a job. Entry point: `requires_token`.

Sends one request without credentials. Must not import Ray, which would read the token.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import requests

from pipeline.errors import Option, Problem, RefusedError
from pipeline.spec.portable import is_loopback

_TIMEOUT_S = 20
# The list of jobs: who may read it may also submit a job.
_JOBS = "/api/jobs/"
_OPEN, _CLOSED = 200, (401, 403)


def requires_token(address: str, *, insecure: bool = False) -> bool:
    """Whether the Job API at the address requires a token.

    RefusedError if it does not and other machines can reach it: anyone who reaches it can run
    programs there and read the job's data. `insecure` accepts that risk.
    """
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise _refused(
            "a name or password in it would be written to logs; remove it; Ray takes its token "
            "from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        )
    try:
        # — no redirect is followed, and with an `auth` of its own no password of ~/.netrc is sent
        answer = requests.get(
            address.rstrip("/") + _JOBS,
            timeout=_TIMEOUT_S,
            allow_redirects=False,
            auth=lambda request: request,
        )
    except (requests.RequestException, ValueError) as error:
        raise _refused(f"no Ray cluster answers at {address}: {error}") from error
    if answer.status_code in _CLOSED:
        return True
    if answer.status_code != _OPEN:
        raise _refused(f"no Ray Job API answers at {address}: status {answer.status_code}")
    if not insecure and not is_loopback(address):
        raise _refused(
            f"{address} accepts jobs without a token from anyone who reaches it; start the cluster "
            f"with RAY_AUTH_MODE=token, or accept the risk with --insecure-cluster"
        )
    return False


def _refused(reason: str) -> RefusedError:
    return RefusedError(Problem(Option("address"), reason))
