"""The page of a review on this machine. Entry point: `serve`; `make_app` for tests.

Every request needs the token of the address, and comes from the page itself: another Host is a
name that points here (DNS rebinding), another Origin is another site's script. An answer is on the
disk before its reply.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from aiohttp import hdrs, web
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipeline.errors import AssayError, option_error
from pipeline.review.session import RefusedAnswer, Session
from pipeline.review.view import task_json, view_json

HOST = "127.0.0.1"
TOKEN_HEADER = "X-Review-Token"
_MOST_BYTES = 64 * 1024  # of a request
_SESSION = web.AppKey("session", Session)
_TOKEN = web.AppKey("token", str)
_COMMAND = web.AppKey("command", str)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# A name that a table and a terminal show on one line.
Name = Annotated[
    str, StringConstraints(strip_whitespace=True, max_length=60, pattern=r"^[^\x00-\x1f\x7f]+$")
]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Name = Field(min_length=1)


class _Undo(_Body):
    id: str | None = None


class _Answer(_Body):
    id: str
    action: Literal["label", "skip", "flag"]
    label: str | list[str] | None = None


def make_app(session: Session, token: str, command: str) -> web.Application:
    """The page and its requests; `command` is what to run after the review."""
    app = web.Application(middlewares=[_guard], client_max_size=_MOST_BYTES)
    app[_SESSION], app[_TOKEN], app[_COMMAND] = session, token, command
    app.add_routes(
        [
            web.get("/", _page),
            web.get("/task", _task),
            web.post("/next", _next),
            web.post("/answer", _answer),
            web.post("/undo", _undo),
        ]
    )
    return app


def listen(port: int | None) -> socket.socket:
    """A socket at a port of this machine, or at a free one; SpecError if the port is taken."""
    try:
        return socket.create_server((HOST, port or 0))
    except OSError as error:
        fix = f"cannot be opened ({error.strerror}); write another one, or leave it out"
        raise option_error("port", fix, port) from error


async def serve(
    session: Session, own: socket.socket, *, command: str, announce: Callable[[str], None]
) -> None:
    """Shows the page at a socket (`listen`) until Ctrl-C or SIGTERM.

    `announce` gets its address.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    token = secrets.token_urlsafe(16)
    runner = web.AppRunner(make_app(session, token, command), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, own).start()
        announce(f"http://{HOST}:{own.getsockname()[1]}/?token={token}")
        await stop.wait()
    finally:
        await runner.cleanup()


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests that are not of the page, and answers errors in words."""
    if (reason := _stranger(request)) is not None:
        return _refused(403, reason)
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


def _stranger(request: web.Request) -> str | None:
    """Why a request is refused; None for one of the page."""
    assert request.transport is not None
    port = request.transport.get_extra_info("sockname")[1]
    own = {f"{name}:{port}" for name in (HOST, "localhost")}
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
    return _view(request, body.by)


async def _answer(request: web.Request) -> web.Response:
    body = _Answer.model_validate_json(await request.read())
    request.app[_SESSION].answer(body.by, body.id, body.action, body.label)
    return _view(request, body.by)


async def _undo(request: web.Request) -> web.Response:
    body = _Undo.model_validate_json(await request.read())
    request.app[_SESSION].undo(body.by, body.id)
    return _view(request, body.by)


def _view(request: web.Request, person: str) -> web.Response:
    content: dict[str, Any] = view_json(request.app[_SESSION], person)
    return web.json_response(content)
