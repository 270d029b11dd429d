"""The server answers the page alone, and every answer is on the disk before its reply."""

from __future__ import annotations

import asyncio
import html
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import make_mocked_request
from reviews import Corpus

from pipeline.errors import SpecError
from pipeline.review.server import TOKEN_HEADER, _refusal, listen, make_app
from pipeline.review.session import Pool, Session

HOST = "127.0.0.1"
TOKEN, COMMAND = "secret", "assay fit spec.yaml --gold gold.jsonl"
Result = TypeVar("Result")


@asynccontextmanager
async def served(session: Session, host: str = HOST) -> AsyncIterator[tuple[ClientSession, str]]:
    """A client of the session's page on a port of this machine, and its address."""
    runner = web.AppRunner(make_app(session, TOKEN, COMMAND, host), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        async with ClientSession() as client:
            yield client, f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Page:
    """A person's page: what it sends, and the replies."""

    def __init__(self, client: ClientSession, address: str, person: str) -> None:
        self.client, self.address, self.person = client, address, person

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        sent = {"by": self.person, **body}
        headers = {TOKEN_HEADER: TOKEN}
        async with self.client.post(self.address + path, json=sent, headers=headers) as reply:
            return reply.status, await reply.json()

    async def next(self) -> dict[str, Any]:
        status, view = await self.post("/next")
        assert status == 200
        return dict(view)

    async def answer(self, label: object) -> dict[str, Any]:
        row = (await self.next())["row"]
        status, view = await self.post("/answer", id=row["id"], action="label", label=label)
        assert status == 200, view
        return dict(view)


def with_page(
    corpus: Corpus, file: Path, act: Callable[[Page], Awaitable[Result]], **rules: Any
) -> Result:
    """What this does with the page of a person."""

    async def opened(session: Session) -> Result:
        async with served(session) as (client, address):
            return await act(Page(client, address, "ann"))

    with corpus.session(file, **rules) as session:
        return asyncio.run(opened(session))


def test_the_page_runs_no_script_but_its_own_and_fetches_nothing_else(
    corpus: Corpus, file: Path
) -> None:
    async def act(page: Page) -> tuple[str, Any, dict[str, Any]]:
        async with page.client.get(f"{page.address}/?token={TOKEN}") as reply:
            text, headers = await reply.text(), reply.headers
        async with page.client.get(f"{page.address}/task", headers={TOKEN_HEADER: TOKEN}) as reply:
            return text, headers, await reply.json()

    text, headers, task = with_page(corpus, file, act)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and policy.count("'sha256-") == 2
    assert "http" not in text and " style=" not in text
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert (task["question"], task["labels"]) == ("Is it rude?", ["toxic", "clean"])
    assert task["command"] == COMMAND


@pytest.mark.parametrize(
    ("method", "path", "headers", "reason"),
    [
        ("GET", "/", {}, "token is missing or wrong"),
        ("GET", "/?token=other", {}, "token is missing or wrong"),
        ("GET", "/task", {}, "token is missing or wrong"),
        ("POST", "/next", {TOKEN_HEADER: "other"}, "token is missing or wrong"),
        ("POST", f"/next?token={TOKEN}", {}, "token is missing or wrong"),
        ("POST", "/answer", {TOKEN_HEADER: TOKEN, "Host": "evil.example"}, "Host 'evil.example'"),
        ("GET", f"/?token={TOKEN}", {"Host": "evil.example"}, "Host 'evil.example'"),
        ("POST", "/answer", {TOKEN_HEADER: TOKEN, "Origin": "http://evil.example"}, "another site"),
        ("POST", "/answer", {TOKEN_HEADER: TOKEN, "Origin": "null"}, "another site"),
        ("POST", "/undo", {TOKEN_HEADER: TOKEN, "Content-Type": "text/plain"}, "application/json"),
    ],
)
def test_a_request_that_is_not_of_the_page_is_refused(
    method: str, path: str, headers: dict[str, str], reason: str, corpus: Corpus, file: Path
) -> None:
    async def act(page: Page) -> tuple[int, Any]:
        row = (await page.next())["row"]
        body = {"by": "ann", "id": row["id"], "action": "label", "label": "toxic"}
        sent = {"Content-Type": "application/json", **headers}
        request = page.client.request(
            method, page.address + path, data=json.dumps(body), headers=sent
        )
        async with request as reply:
            return reply.status, await reply.text()

    status, content = with_page(corpus, file, act)
    assert status == 403 and reason in html.unescape(content)
    is_page = path.partition("?")[0] == "/"
    assert content.startswith("<!doctype html>" if is_page else '{"error": ')
    assert file.read_bytes() == b""


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/answer", {"label": "rude"}, 409, "'rude' is not a label of tone: toxic, clean."),
        ("/answer", {"id": "0" * 31 + "x"}, 409, "was not shown to you"),
        ("/answer", {"by": "bob"}, 409, "was not shown to you"),
        ("/answer", {"action": "undo"}, 400, "action: "),
        ("/answer", {"by": ""}, 400, "by: "),
        ("/answer", {"by": "a\nb"}, 400, "by: "),
        ("/answer", {"label": "x" * 70_000}, 413, ""),
        ("/answer", {"at": "2020-01-01"}, 400, "at: "),
        ("/undo", {}, 400, ""),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_a_wrong_answer_is_refused_in_words_and_nothing_is_written(
    path: str, body: dict[str, Any], status: int, reason: str, corpus: Corpus, file: Path
) -> None:
    async def act(page: Page) -> tuple[int, Any]:
        row = (await page.next())["row"]
        own = {"id": row["id"], "action": "label", "label": "toxic"}
        return await page.post(path, **{**own, **body})

    refused, content = with_page(corpus, file, act)
    assert refused == status and reason in content["error"]
    assert file.read_bytes() == b""


def test_one_name_in_two_browsers_is_refused_in_words_until_one_of_them_is_closed(
    corpus: Corpus, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(page: Page) -> list[tuple[int, Any]]:
        own = (await page.post("/next", browser="one"))[1]["row"]
        sent = {"id": own["id"], "action": "label", "label": "toxic"}
        replies = [await page.post("/next", browser="two")]
        replies.append(await page.post("/answer", browser="two", **sent))
        replies.append(await page.post("/answer", browser="one", **sent))
        monkeypatch.setattr("pipeline.review.server.SAME_NAME_S", 0.0)
        return [*replies, await page.post("/next", browser="two")]

    *refused, (first, _), (second, _) = with_page(corpus, file, act)
    for status, content in refused:
        assert status == 409 and "ann labels in another browser" in content["error"]
    assert (first, second) == (200, 200) and len(file.read_text().splitlines()) == 1


def test_an_answer_is_synced_before_its_reply(
    corpus: Corpus, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr("os.fsync", record)

    async def act(page: Page) -> None:
        for n in range(1, 4):
            await page.answer("toxic")
            assert len(synced) == n and synced[-1] == file.stat().st_size

    with_page(corpus, file, act)
    assert len(file.read_text().splitlines()) == 3


def test_an_answer_that_cannot_be_written_can_be_sent_again(
    corpus: Corpus, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError("the disk is full")

    async def act(page: Page) -> tuple[int, Any]:
        row = (await page.next())["row"]
        sent = {"id": row["id"], "action": "label", "label": "toxic"}
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            failed = await page.post("/answer", **sent)
        assert file.read_bytes() == b""
        assert (await page.post("/answer", **sent))[0] == 200
        return failed

    status, content = with_page(corpus, file, act)
    assert status == 500 and "the disk is full" in content["error"]


def test_the_next_document_is_waited_for_while_documents_are_read(
    corpus: Corpus, file: Path
) -> None:
    first, *others = corpus.pool.documents
    corpus.pool = Pool(is_read=False)
    corpus.pool.add(first)

    def read() -> None:
        for document in others:
            corpus.pool.add(document)
        corpus.pool.is_read = True

    async def act(page: Page) -> dict[str, Any]:
        assert (await page.next())["row"]["id"] == first.hash
        asyncio.get_running_loop().call_later(0.2, read)
        return await page.answer("toxic")

    view = with_page(corpus, file, act)
    assert view["row"]["id"] in {document.hash for document in others}
    assert view["progress"]["labels"] == 1


def test_a_document_that_is_not_read_in_time_is_reported(
    corpus: Corpus, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.review.server._WAIT_S", 0)
    corpus.pool = Pool(is_read=False)
    view = with_page(corpus, file, Page.next)
    assert view["row"] is None and "still being read" in view["note"]


def test_an_older_answer_is_corrected_from_the_history(corpus: Corpus, file: Path) -> None:
    async def act(page: Page) -> tuple[str, dict[str, Any]]:
        first = (await page.next())["row"]["id"]
        for _ in range(3):
            await page.answer("toxic")
        status, view = await page.post("/undo", id=first)
        assert status == 200 and view["row"]["id"] == first
        return first, await page.answer("clean")

    first, view = with_page(corpus, file, act)
    assert view["progress"]["answers"] == 3
    newest = view["progress"]["history"][0]
    assert (newest["id"], newest["answer"]) == (first, "clean")
    assert view["progress"]["by_label"] == {"toxic": 2, "clean": 1}
    with corpus.session(file) as session:
        assert session.gold.answers[first, "ann"].label == "clean"


def test_all_answers_of_a_person_are_in_the_history(corpus: Corpus, file: Path) -> None:
    async def act(page: Page) -> tuple[list[Any], Any]:
        ids = []
        for _ in range(12):
            ids.append((await page.next())["row"]["id"])
            await page.answer("toxic")
        return ids, (await page.post("/history"))[1]

    ids, history = with_page(corpus, file, act)
    assert [past["id"] for past in history] == ids[::-1]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_no_address_of_this_machine_is_one_line(host: str) -> None:
    with pytest.raises(SpecError, match=r"^host: [^\n]*$"):
        listen(host, None)


@pytest.mark.parametrize("host", ["labels.example", "Labels.Example"])
def test_the_page_accepts_requests_to_its_own_host(host: str, corpus: Corpus, file: Path) -> None:
    async def opened(session: Session) -> list[int]:
        async with served(session, host) as (client, address):
            statuses = []
            for name in ("labels.example", "evil.example"):
                sent = {"Host": f"{name}:{address.rpartition(':')[2]}"}
                async with client.get(f"{address}/?token={TOKEN}", headers=sent) as reply:
                    statuses.append(reply.status)
            return statuses

    with corpus.session(file) as session:
        assert asyncio.run(opened(session)) == [200, 403]


@pytest.mark.parametrize("origin", [{}, {"Origin": "http://labels.example"}])
def test_at_port_80_browsers_leave_the_port_out(
    origin: dict[str, str], corpus: Corpus, file: Path
) -> None:
    transport = Mock()
    transport.get_extra_info.return_value = (HOST, 80)
    sent = {"Host": "labels.example", TOKEN_HEADER: TOKEN, **origin}
    with corpus.session(file) as session:
        app = make_app(session, TOKEN, COMMAND, "labels.example")
        request = make_mocked_request("GET", "/task", sent, app=app, transport=transport)
        assert _refusal(request) is None
