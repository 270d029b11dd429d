"""The recipes of the manual: their files become gold, and their servers answer."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from annotator import address_in
from local_cluster import free_port
from manual import REPOSITORY, blocks, run_line

pytestmark = pytest.mark.xdist_group("manual")
PAGE = REPOSITORY / "docs" / "recipes.md"


def recipe(language: str, words: str) -> str:
    """The one block of the page with these words."""
    (block,) = [each for each in blocks(PAGE) if each.language == language and words in each.code]
    return block.code


@pytest.mark.parametrize("tool", ["label_studio", "argilla"])
def test_labels_of_people_in_another_tool_are_gold(tool: str, in_manual: Path) -> None:
    exec(recipe("python", f"gold_of_{tool}.csv"), {})
    with Path(f"gold_of_{tool}.csv").open(newline="") as file:
        rows = {row["doc"]: row["toxic"] for row in csv.DictReader(file)}
    gold = map(json.loads, Path("gold.jsonl").read_text().splitlines())
    assert rows == {row["doc"]: row["toxic"] for row in gold}
    run_line(["assay", "eval", "my.yaml", "--gold", f"gold_of_{tool}.csv"])


def test_a_calibrated_score_and_its_threshold_agree(in_manual: Path) -> None:
    names: dict[str, Any] = {}
    exec(recipe("python", "LogisticRegression"), names)
    threshold = names["expit"](
        (names["target"] - names["fitted"].intercept_) / names["fitted"].coef_[0]
    )
    (calibrated,) = names["fitted"].predict_proba(names["logit"](threshold).reshape(-1, 1))
    assert calibrated[1] == pytest.approx(0.9)


@pytest.mark.usefixtures("in_manual")
def test_the_replacement_of_perspective_answers_its_requests() -> None:
    pytest.importorskip("fastapi", reason="`make test` installs FastAPI")
    names: dict[str, Any] = {}
    exec(recipe("python", "FastAPI"), names)
    request = {"comment": {"text": "Get lost."}, "requestedAttributes": {"TOXIC": {}}}
    status, answer = asyncio.run(
        posted(names["app"], "/v1alpha1/comments:analyze", json.dumps(request).encode())
    )
    assert status == 200
    value = json.loads(answer)["attributeScores"]["TOXIC"]["summaryScore"]["value"]
    assert value == names["labeller"].label(["Get lost."])["toxic"].to_pylist()[0]["p"]["toxic"]
    status, _ = asyncio.run(posted(names["app"], "/v1alpha1/comments:analyze", b"{}"))
    assert status == 422


async def posted(app: Callable[..., Any], path: str, body: bytes) -> tuple[int, bytes]:
    """The answer of an ASGI application to a request with a JSON body."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


@contextmanager
def running(words: list[str], log: Path) -> Iterator[None]:
    """The program runs until the block ends."""
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_review_is_reached_through_tls_with_its_token_alone(in_manual: Path) -> None:
    page, proxy = free_port(), free_port()
    code = recipe("python", "tls_proxy.py").replace(":8400", f":{page}")
    code = code.replace("port=8443", f'host="127.0.0.1", port={proxy}')
    Path("tls_proxy.py").write_text(code)
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run(
        [*made, "-keyout", "key.pem", "-out", "cert.pem"], check=True, capture_output=True
    )
    review = ["-m", "pipeline", "review", "my.yaml", "--task", "toxic", "--to", "network.jsonl"]
    log = in_manual / "network.log"
    with (
        running([*review, "--port", str(page)], log),
        running(["tls_proxy.py"], in_manual / "proxy.log"),
    ):
        token = address_in(log).partition("?token=")[2]
        trusted = ssl.create_default_context(cafile="cert.pem")

        def fetched(request: str | Request) -> str:
            with urlopen(request, timeout=60, context=trusted) as reply:
                return str(reply.read().decode())

        address = f"https://127.0.0.1:{proxy}"
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                shown = fetched(f"{address}/?token={token}")
                break
            assert time.monotonic() < deadline, (in_manual / "proxy.log").read_text()
            time.sleep(0.2)
        assert "<html" in shown
        headers = {"X-Review-Token": token, "Content-Type": "application/json"}
        body = json.dumps({"by": "bea"}).encode()
        view = json.loads(fetched(Request(f"{address}/next", body, headers)))
        assert re.match("This is text", view["row"]["text"])
        with pytest.raises(OSError, match="403"):
            fetched(Request(f"{address}/next", body, {**headers, "X-Review-Token": "guess"}))
