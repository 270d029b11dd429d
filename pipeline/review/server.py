"""The page of a review. Entry points: `listen` and `serve`; `make_app` for tests.

Every request needs the token of the address, and must come from the page itself: another Host is a
name that resolves to this machine (DNS rebinding), another Origin is another site's script. An
answer is on the disk before its reply.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import html
import re
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from aiohttp import hdrs, web
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipeline.errors import AssayError, option_error
from pipeline.review.session import RefusedAnswer, Session
from pipeline.review.view import history_json, task_json, view_json

LOCAL = ("127.0.0.1", "localhost")
SAME_NAME_S = 120.0  # after that, another browser may go on under a name
TOKEN_HEADER = "X-Review-Token"
_MOST_BYTES = 64 * 1024  # of a request
_WAIT_S = 10.0  # for the next document
_SESSION = web.AppKey("session", Session)
_TOKEN = web.AppKey("token", str)
_COMMAND = web.AppKey("command", str)
_HOSTS = web.AppKey("hosts", frozenset[str])
# By name of a person: the browser, and when it last sent something.
_BROWSERS = web.AppKey("browsers", dict[str, tuple[str, float]])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# A name that a table and a terminal show on one line.
Name = Annotated[
    str, StringConstraints(strip_whitespace=True, max_length=60, pattern=r"^[^\x00-\x1f\x7f]+$")
]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Name = Field(min_length=1)
    browser: str = ""


class _Undo(_Body):
    id: str | None = None


class _Answer(_Body):
    id: str
    action: Literal["label", "skip", "flag"]
    label: str | list[str] | None = None


def make_app(session: Session, token: str, command: str, host: str = LOCAL[0]) -> web.Application:
    """The page and its requests; `command` is what to run after the review."""
    app = web.Application(middlewares=[_guard], client_max_size=_MOST_BYTES)
    app[_SESSION], app[_TOKEN], app[_COMMAND] = session, token, command
    app[_HOSTS], app[_BROWSERS] = frozenset((host.lower(), *LOCAL)), {}
    app.add_routes(
        [
            web.get("/", _page),
            web.get("/task", _task),
            web.post("/next", _next),
            web.post("/answer", _answer),
            web.post("/undo", _undo),
            web.post("/history", _history),
        ]
    )
    return app


def listen(host: str, port: int | None) -> socket.socket:
    """A socket at a port of an address of this machine, or at a free one.

    SpecError if the port is taken, or the address is not this machine's.
    """
    if host in ("", "0.0.0.0", "::"):
        fix = "write the address or name under which others reach this machine"
        raise option_error("host", fix, host)
    try:
        return socket.create_server((host, port or 0))
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            fix = f"cannot be opened ({reason}); write another one, or leave it out"
            raise option_error("port", fix, port) from error
        fix = f"is not an address of this machine ({reason}); write one, or leave it out"
        raise option_error("host", fix, host) from error


async def serve(
    session: Session,
    own: socket.socket,
    *,
    host: str,
    command: str,
    announce: Callable[[str], None],
) -> None:
    """Shows the page at a socket (`listen`) of this host until Ctrl-C or SIGTERM.

    `announce` gets its address.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    token = secrets.token_urlsafe(16)
    runner = web.AppRunner(make_app(session, token, command, host), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, own).start()
        announce(f"http://{host}:{own.getsockname()[1]}/?token={token}")
        await stop.wait()
    finally:
        await runner.cleanup()


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests that are not of the page, and answers errors in words."""
    if (reason := _refusal(request)) is not None:
        return _closed(reason) if request.path == "/" else _refused(403, reason)
    try:
        response = await handler(request)
    except RefusedAnswer as refusal:
        return _refused(409, str(refusal))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        return _refused(400, f"{place}: {first['msg']}")
    except web.HTTPException as error:
        return _refused(error.status, error.reason)
    except AssayError as error:
        return _refused(500, str(error))
    response.headers.update(_HEADERS)
    return response


def _refusal(request: web.Request) -> str | None:
    """Why a request is refused; None for one of the page."""
    assert request.transport is not None
    port = request.transport.get_extra_info("sockname")[1]
    # — browsers write names in lower case, and leave port 80 out
    own = {name if port == 80 else f"{name}:{port}" for name in request.app[_HOSTS]}
    host, origin = request.headers.get(hdrs.HOST, ""), request.headers.get(hdrs.ORIGIN)
    if host not in own:
        return f"The Host {host!r} is not this page's address; open the address as printed."
    if origin is not None and origin != f"http://{host}":
        return f"The Origin {origin!r} is another site; only the page itself may send requests."
    is_page = request.path == "/"
    sent = request.query.get("token", "") if is_page else request.headers.get(TOKEN_HEADER, "")
    if not secrets.compare_digest(sent.encode(), request.app[_TOKEN].encode()):
        return "The token is missing or wrong; open the address that `assay review` printed."
    if request.method == hdrs.METH_POST and request.content_type != "application/json":
        return "The body is not application/json."
    return None


_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=_HEADERS)


def _closed(reason: str) -> web.Response:
    """A page in place of the review."""
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Review</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><h1>The review cannot be opened</h1><p>{html.escape(reason)}</p>'
    )
    headers = {**_HEADERS, "Content-Security-Policy": "default-src 'none'"}
    return web.Response(text=text, content_type="text/html", status=403, headers=headers)


async def _page(_request: web.Request) -> web.Response:
    text = Path(__file__).with_name("page.html").read_text("utf-8")
    sources = {
        f"{kind}-src": " ".join(f"'sha256-{_sha256(each)}'" for each in re.findall(pattern, text))
        for kind, pattern in (
            ("script", r"(?s)<script>(.*?)</script>"),
            ("style", r"(?s)<style>(.*?)</style>"),
        )
    }
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "img-src": "data:",
        **sources,
    }
    written = "; ".join(f"{name} {value}" for name, value in policy.items())
    headers = {"Content-Security-Policy": written}
    return web.Response(text=text, content_type="text/html", headers=headers)


def _sha256(part: str) -> str:
    return base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()


async def _task(request: web.Request) -> web.Response:
    return web.json_response(task_json(request.app[_SESSION], request.app[_COMMAND]))


async def _next(request: web.Request) -> web.Response:
    body = _Body.model_validate_json(await request.read())
    return await _view(request, body)


async def _answer(request: web.Request) -> web.Response:
    body = _Answer.model_validate_json(await request.read())
    _refuse_a_second(request, body)
    request.app[_SESSION].answer(body.by, body.id, body.action, body.label)
    return await _view(request, body)


async def _undo(request: web.Request) -> web.Response:
    body = _Undo.model_validate_json(await request.read())
    _refuse_a_second(request, body)
    request.app[_SESSION].undo(body.by, body.id)
    return await _view(request, body)


async def _history(request: web.Request) -> web.Response:
    body = _Body.model_validate_json(await request.read())
    return web.json_response(history_json(request.app[_SESSION], body.by))


async def _view(request: web.Request, body: _Body) -> web.Response:
    _refuse_a_second(request, body)
    session, until = request.app[_SESSION], time.monotonic() + _WAIT_S
    # — the first document may be answered before others are read
    while not (session.open_document(body.by) or session.pool.is_read or time.monotonic() > until):
        await asyncio.sleep(0.05)
    content: dict[str, Any] = view_json(session, body.by)
    return web.json_response(content)


def _refuse_a_second(request: web.Request, body: _Body) -> None:
    """RefusedAnswer if another browser labels under the same name: their answers would mix."""
    browsers, now = request.app[_BROWSERS], time.monotonic()
    browser, at = browsers.get(body.by, (body.browser, now))
    if browser != body.browser and now - at < SAME_NAME_S:
        raise RefusedAnswer(
            f"{body.by} labels in another browser at this moment; write another name, or close "
            f"that page and wait {SAME_NAME_S / 60:.0f} minutes."
        )
    browsers[body.by] = body.browser, now
