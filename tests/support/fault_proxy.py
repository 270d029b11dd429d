"""A proxy in front of an S3 server that breaks requests, in ways and shares that a seed decides.

It implements HTTP, and of S3 only the text of three errors. What it does to a request:

    reset        the connection is reset, and nothing reaches the server
    error_500    InternalError, without asking the server
    slow_down    503, without asking the server
    conflict     409, as S3 answers a create while another of the same key is under way
    lost_reply   the server executes the request, and the connection is reset before the reply
    cut_off      half of the data, up or down, and then a reset
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from servers import serving

from pipeline.stores.retries import RetryPolicy

REFUSALS = {
    "error_500": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "not_implemented": (501, "NotImplemented"),
}

# Short waits. A share of faults of 0.4 to the power of 20 is one in a hundred million.
STUBBORN = RetryPolicy(30.0, 30.0, first_wait_s=0.001, longest_wait_s=0.02)


@dataclass
class Faults:
    """What goes wrong: a share of the requests for each kind, drawn from a seed, and counted."""

    shares: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    dropped_headers: frozenset[str] = frozenset()  # never forwarded, in lower case
    watch: Callable[[list[str]], None] | None = (
        None  # is called with all requests, before each is served
    )
    counted: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)
        self._once: dict[str, str] = {}

    def once(self, kind: str, method: str) -> None:
        """Do this to the next request of the method, and then no more."""
        self._once[method] = kind

    def draw(self, method: str, path: str, conditional: bool) -> str | None:
        """What is done to the next request."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            if self.watch is not None:
                self.watch(self.requests)
            if method in self._once:
                kind = self._once.pop(method)
                self.counted[kind] += 1
                return kind
            left = self._source.random()
            for kind, share in self.shares.items():
                if left < share and (kind != "conflict" or conditional):
                    self.counted[kind] += 1
                    return kind
                left -= share
        return None


def proxied(endpoint: str, faults: Faults) -> AbstractContextManager[str]:
    """The endpoint of a proxy in front of another endpoint."""
    return serving(_Handler, upstream=urlsplit(endpoint).netloc, plan=faults)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    plan: Faults

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        conditional = "If-None-Match" in self.headers
        fault = self.plan.draw(self.command, self.path, conditional)
        if fault in REFUSALS:
            self._refuse(*REFUSALS[fault])
        elif fault == "reset":
            self._reset()
        elif fault == "cut_off" and body:
            self._forward(body, sent_bytes=len(body) // 2)
            self._reset()
        else:
            status, headers, data = self._forward(body, sent_bytes=len(body))
            if fault == "lost_reply":
                self._reset()
            else:
                self._reply(status, headers, data, cut_off=fault == "cut_off")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

    def _forward(self, body: bytes, sent_bytes: int) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer; nothing where the body was not sent whole."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in {"expect", "connection"} | self.plan.dropped_headers:
                    connection.putheader(name, value)
            connection.endheaders(body[:sent_bytes])
            if sent_bytes < len(body):
                return 0, [], b""
            answer = connection.getresponse()
            headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in _HOP_BY_HOP]
            data = answer.read()
            if self.command != "HEAD":
                headers = [(n, v) for n, v in headers if n.lower() != "content-length"]
                headers.append(("Content-Length", str(len(data))))
            return answer.status, headers, data
        finally:
            connection.close()

    def _reply(
        self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut_off: bool
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut_off else data)
        if cut_off:
            self._reset()

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a fault</Message></Error>"
        data = b"" if self.command == "HEAD" else text.encode()
        self._reply(status, [("Content-Length", str(len(data)))], data, cut_off=False)

    def _reset(self) -> None:
        # — a linger of zero: close() then sends RST and not the end of a stream
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}
