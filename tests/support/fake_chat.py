"""A small server with the chat API of OpenAI, on 127.0.0.1: the fixture `chat`.

Its answers follow from the text of the last turn, by `shares`. It can be busy, drop connections,
refuse a text, answer as another model or without log-probabilities, and counts what it is asked.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from servers import serving

KEY = "sk-a-key-of-the-tests"
DROP = 0  # a status: the connection ends without an answer


def shares(text: str) -> dict[str, float]:
    """The probabilities of the 20 likeliest tokens, which are .965 together."""
    if "About what?" in text:
        return {"art": 0.6, " la": 0.3, "sp": 0.05, **{f"<{n}>": 0.001 for n in range(15)}}
    yes = 0.05 + 0.8 * hashlib.sha256(text.encode()).digest()[0] / 255
    tokens = {"Yes": 0.7 * yes, " yes": 0.2 * yes, "Y": 0.1 * yes}
    tokens |= {"No": 0.9 * (0.9 - yes), "no.": 0.1 * (0.9 - yes), "Not": 0.05}
    return {**tokens, **{f"<{n}>": 0.001 for n in range(15)}}


@dataclass
class FakeChat:
    """What the server does, and what it was asked."""

    url: str = ""
    model: str = "small"  # the name in its answers
    faults: deque[int] = field(default_factory=deque)  # statuses of the next requests
    always: int | None = None  # the status of all requests
    faults_of: dict[str, int] = field(default_factory=dict)  # statuses of texts with these parts
    page: bytes = b""  # what each answer has in place of JSON
    retry_after: str = ""
    refuses: str = "\0"  # a part of texts that are refused
    without: str = ""  # the key of an answer that is left out
    slow_s: float = 0.0
    renamed_after: int = 1_000_000  # answers until it has another name
    asked: Counter[str] = field(default_factory=Counter)  # requests by text
    paid: Counter[str] = field(default_factory=Counter)  # answers by text
    tokens: int = 0  # of all prompts that were answered
    keys: set[str] = field(default_factory=set)
    at_once: int = 0  # the most requests at work
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _at_work: int = 0

    def spec(self, **changes: Any) -> dict[str, Any]:
        """The model of a spec that asks it."""
        own = {"engine": "openai", "base_url": f"{self.url}/v1", "path": "small"}
        return {**own, **changes}

    def answer(self, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        """The status and the content of an answer."""
        text, began = body["messages"][-1]["content"], time.monotonic()
        with self.lock:
            self._at_work += 1
            self.at_once = max(self.at_once, self._at_work)
            self.asked[text] += 1
            self.times.append(began)
            self.keys.add(key)
            fault = self.faults.popleft() if self.faults else self.always
            fault = next((s for part, s in self.faults_of.items() if part in text), fault)
        time.sleep(self.slow_s)
        with self.lock:
            self._at_work -= 1
            if fault is not None:
                return fault, {"error": {"message": f"fault {fault}"}}
            if self.refuses in text:
                reason = {"message": f"too long: {len(text)}", "code": "context_length_exceeded"}
                return 400, {"error": reason}
            assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)
            self.paid[text] += 1
            # — fewer than the bytes of the request, as of each tokenizer
            prompt_tokens = len(json.dumps(body)) // 4
            self.tokens += prompt_tokens
            name = self.model if self.paid.total() <= self.renamed_after else "another"
        top = [{"token": t, "logprob": math.log(p)} for t, p in shares(text).items()]
        token = {"token": "x", "logprob": -1.0, "top_logprobs": top}
        choice = {
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": [token]},
        }
        for holder in (choice, token):
            holder.pop(self.without, None)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
        return 200, {"model": name, "choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    chat: FakeChat

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = 404, {"detail": "Not Found"}
        if self.path == "/v1/chat/completions":
            status, content = self.chat.answer(body, self.headers.get("Authorization", ""))
        if status == DROP:
            self.close_connection = True
            return
        data = self.chat.page or json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if 300 <= status < 400:
            self.send_header("Location", "https://other.example/v1")
        if status != 200 and self.chat.retry_after:
            self.send_header("Retry-After", self.chat.retry_after)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def chat() -> Iterator[FakeChat]:
    """A server of the model `small`."""
    own = FakeChat()
    with serving(_Handler, chat=own) as own.url:
        yield own
