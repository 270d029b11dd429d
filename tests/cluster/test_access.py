"""Whether a cluster may be trusted with a job, asked of a server that records what it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from servers import serving

from pipeline.cluster import access as cluster_access
from pipeline.cluster.access import requires_token
from pipeline.errors import RefusedError


@dataclass
class Dashboard:
    """Answers every request with one status, and keeps the request's headers."""

    status: int = 200
    address: str = ""
    requests: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    state = Dashboard()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append({"path": self.path, **dict(self.headers)})
            self.send_response(state.status)
            if state.status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

    with serving(Handler) as state.address:
        yield state


@pytest.mark.parametrize(("status", "required"), [(200, False), (401, True), (403, True)])
def test_a_cluster_on_this_machine_is_asked_and_nothing_is_shown_to_it(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, status: int, required: bool
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "canary" * 6)
    dashboard.status = status
    assert requires_token(dashboard.address) is required
    (request,) = dashboard.requests
    assert request["path"] == "/api/jobs/"
    assert "Authorization" not in request and "canary" not in str(request)


def test_an_open_cluster_that_others_can_reach_is_refused(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one server stands in for a remote one: only its name's judgement is changed."""
    monkeypatch.setattr(cluster_access, "is_loopback", lambda address: False)
    with pytest.raises(RefusedError, match=r"without a token.*RAY_AUTH_MODE=token") as raised:
        requires_token(dashboard.address)
    assert raised.value.exit_code == 4
    assert requires_token(dashboard.address, insecure=True) is False
    dashboard.status = 401
    assert requires_token(dashboard.address) is True


@pytest.mark.parametrize("status", [302, 404, 500])
def test_what_is_no_job_api_is_refused_and_not_followed(dashboard: Dashboard, status: int) -> None:
    dashboard.status = status
    with pytest.raises(RefusedError, match=rf"no Ray Job API answers .* status {status}"):
        requires_token(dashboard.address)
    assert len(dashboard.requests) == 1


def test_an_address_with_a_password_is_refused_without_showing_it(dashboard: Dashboard) -> None:
    address = dashboard.address.replace("//", "//me:hunter2@")
    with pytest.raises(RefusedError) as raised:
        requires_token(address)
    assert "hunter2" not in str(raised.value) and not dashboard.requests


def test_an_address_where_nothing_listens_is_refused(dashboard: Dashboard) -> None:
    with pytest.raises(RefusedError, match="no Ray cluster answers"):
        requires_token("http://127.0.0.1:1")
