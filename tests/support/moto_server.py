"""moto's server on 127.0.0.1, with conditional PUTs that are atomic, as S3 promises.

moto looks whether a key exists, and then writes it: of two PUTs at the same time, both may succeed.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

_one_put = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """moto's answer; of requests with `If-None-Match`, one at a time."""
    if "HTTP_IF_NONE_MATCH" not in environ:
        return _moto(environ, start_response)
    # — a client that sends slowly keeps no other waiting
    size_bytes = int(environ.get("CONTENT_LENGTH") or 0)
    if size_bytes:
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size_bytes))
    with _one_put:
        return list(_moto(environ, start_response))


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True)
