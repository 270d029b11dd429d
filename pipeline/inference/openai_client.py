"""Requests to a server with the chat API of OpenAI: retried, paid once, and bounded in cost.

Entry point: `ServerClient.ask`. Must not import torch.
"""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import requests

from pipeline.errors import DocumentError, Problem, ServerError, SpecError, one_line
from pipeline.hashes import canonical_json, parse_json, short_hash
from pipeline.spec.model import ModelSpec
from pipeline.spec.prompts import Message

TOP_LOGPROBS = 20  # the most that the API allows
# The longest time without an answer; until the first one, a wrong URL is likelier than an outage.
PATIENCE_S, FIRST_PATIENCE_S = 300.0, 15.0
_TIMEOUT_S = (10.0, 120.0)  # to connect, and between two parts of an answer
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_OF_DOCUMENT = (400, 413, 422)  # too long for the server, or not to its taste
_PATHS = {401: "api_key_env", 403: "api_key_env", 404: "base_url"}
_TOKENS_OF_TURNS = 64  # the most that a chat template adds to the bytes of a request

Top = tuple[tuple[str, float], ...]  # texts of tokens with their log-probabilities


@dataclass(frozen=True, slots=True)
class Answer:
    """The first token of an answer: the likeliest ones, and what they were paid with."""

    top: Top
    prompt_tokens: int = 0  # that this process paid for
    answer_tokens: int = 0


@dataclass
class Journal:
    """Answers that are paid and not committed yet, in a file of this machine.

    A process that is killed leaves them to the next one. Several threads may call the methods.

    Args:
        file: One for each output.
        run: The id of the run, whose price is kept, too.
    """

    file: Path
    run: str
    spent: float = 0.0
    _known: dict[str, Top] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)  # by the shard at work
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for line in self.file.read_bytes().splitlines() if self.file.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # — the last one may be cut off
                content = parse_json(line)
                if content["run"] == self.run:
                    self.spent += content["price"]
                if "key" in content:
                    self._known[content["key"]] = _top(content["top"])

    def find(self, key: str) -> Top | None:
        with self._lock:
            self._used.add(key)
            return self._known.get(key)

    def add(self, key: str, top: Top, price: float) -> None:
        with self._lock:
            self._known[key] = top
            self.spent += price
            _append(self.file, [{"key": key, "top": top, "price": price, "run": self.run}])

    def add_price(self, price: float) -> None:
        """Adds what may have been paid for no answer."""
        with self._lock:
            self.spent += price
            _append(self.file, [{"price": price, "run": self.run}])

    def begin(self) -> None:
        """A shard begins."""
        self._used.clear()

    def commit(self) -> None:
        """The answers of the shard at work are committed: no other one needs them."""
        with self._lock:
            for key in self._used & self._known.keys():
                del self._known[key]
            self._used.clear()
            left = [{"key": k, "top": top, "run": ""} for k, top in self._known.items()]
            written = self.file.with_suffix(".new")
            written.unlink(missing_ok=True)
            _append(written, [{"price": self.spent, "run": self.run}, *left])
            written.replace(self.file)


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with file.open("ab") as opened:
        opened.write(b"".join(canonical_json(line) + b"\n" for line in lines))


def _top(entries: Sequence[Sequence[Any]]) -> Top:
    return tuple((str(text), float(log_prob)) for text, log_prob in entries)


class ServerClient:
    """A model at a server. Several threads may ask it.

    Args:
        model: The spec's, with `engine: openai`.
        journal: Keeps paid answers; None for a check.
        max_cost: The most that the run may cost; it needs the model's price.
        patience_s: The longest time without an answer.

    Raises:
        SpecError: The key is not there.
    """

    def __init__(
        self,
        model: ModelSpec,
        journal: Journal | None = None,
        *,
        max_cost: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        assert model.base_url is not None, model
        self.model = model
        self._url = f"{model.base_url.rstrip('/')}/chat/completions"
        self._journal, self._max_cost, self._patience_s = journal, max_cost, patience_s
        self._session, key = requests.Session(), read_key(model)
        size = requests.adapters.HTTPAdapter(pool_maxsize=model.concurrency)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, size)

        def authorised(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if key:  # — without an `auth` of its own, a password of ~/.netrc would be sent
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        self._session.auth = authorised
        self._lock = threading.Condition()
        self._reserved: list[float] = []  # the most that each request in flight can cost
        self._answers = 0
        self._failing_since: float | None = None  # no request was answered since then
        self._over = threading.Event()
        self._end: ServerError | None = None

    def ask(self, messages: Sequence[Message], *, keep: bool = True) -> Answer:
        """The likeliest first tokens of the next turn; without `keep`, the server is asked anew.

        DocumentError if the server refuses these messages; SpecError if it cannot be used as the
        spec says, and ServerError if it does not answer or may cost no more.
        """
        body = canonical_json(
            {
                "model": self.model.path,
                "messages": [dict(turn) for turn in messages],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": TOP_LOGPROBS,
            }
        )
        key = short_hash(canonical_json(self.model.revision) + body)
        if keep and self._journal is not None and (known := self._journal.find(key)) is not None:
            return Answer(known)
        bound = len(body) + _TOKENS_OF_TURNS  # — a token has a byte or more
        self._reserve(most := self._price(bound, 1))
        try:
            answer = self._retried(body, bound)
            if self._journal is not None:
                price = self._price(answer.prompt_tokens, answer.answer_tokens)
                if keep:
                    self._journal.add(key, answer.top, price)
                else:
                    self._journal.add_price(price)
            return answer
        except ServerError as error:
            self._end = self._end or error
            self._over.set()
            raise
        finally:
            with self._lock:
                self._reserved.remove(most)
                self._lock.notify_all()

    def begin_shard(self) -> None:
        if self._journal is not None:
            self._journal.begin()

    def end_shard(self) -> None:
        """The answers of the shard are committed."""
        if self._journal is not None:
            self._journal.commit()

    def _price(self, read: float, written: float) -> float:
        return self.model.price.of(read, written) if self.model.price else 0.0

    def _reserve(self, most: float) -> None:
        """ServerError if this request may take more than is left of the run's cost."""
        with self._lock:
            spent, limit = 0.0, math.inf if self._max_cost is None else self._max_cost
            while self._end is None:  # — what is in flight may cost less than was reserved
                spent = 0.0 if self._journal is None else self._journal.spent
                if not self._reserved or spent + sum(self._reserved) + most <= limit:
                    break
                self._lock.wait(1.0)
            if spent + most > limit:
                self._end = self._end or ServerError(
                    f"ended by --max-cost {limit:g}: {spent:.4g} is spent, and the next "
                    f"request may take up to {most:.2g}; finished shards and paid answers are "
                    "kept; run again, with another --max-cost, to go on"
                )
            if self._end is not None:
                raise self._end
            self._reserved.append(most)

    def _retried(self, body: bytes, bound: int) -> Answer:
        """The answer to a request, which is repeated while the server is busy or out of reach."""
        began, wait_s = time.monotonic(), _FIRST_WAIT_S
        while True:
            asked_to_wait_s, patience_s = 0.0, self._patience_s
            try:
                reply = self._session.post(
                    self._url,
                    data=body,
                    headers={"Content-Type": "application/json"},
                    timeout=_TIMEOUT_S,
                    allow_redirects=False,
                )
                if reply.status_code not in _BUSY:
                    answer = self._read(reply, bound)
                    with self._lock:
                        self._answers, self._failing_since = self._answers + 1, None
                    return answer
                reason = f"status {reply.status_code}: {_words(reply)}"
                asked_to_wait_s = _retry_after_s(reply.headers.get("Retry-After", ""))
            except requests.RequestException as error:
                reason = one_line(error)
                if not self._answers:
                    patience_s = min(patience_s, FIRST_PATIENCE_S)
                if isinstance(error, requests.ReadTimeout) and self._journal is not None:
                    self._journal.add_price(self._price(bound, 1))  # — it may have answered
            pause_s = max(asked_to_wait_s, wait_s * random.random())
            self._check_patience(patience_s, began, pause_s, reason)
            if self._over.wait(pause_s) and self._end is not None:
                raise self._end
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _check_patience(self, patience_s: float, began: float, pause_s: float, reason: str) -> None:
        """ServerError if nothing is answered for too long; DocumentError if this alone is not."""
        now = time.monotonic()
        with self._lock:
            self._failing_since = self._failing_since or now
            if now + pause_s - self._failing_since > patience_s:
                silent_s = now - self._failing_since
                wait = f", and asks to wait for {pause_s:,.0f} s" if pause_s > patience_s else ""
                raise ServerError(
                    f"{self._url} gives no answer for {silent_s:,.0f} s{wait} ({reason}); finished "
                    "shards and paid answers are kept; run again to go on"
                )
        if now + pause_s - began > patience_s:
            # — few different statuses of rows: without what the server says of this one
            raise DocumentError(f"the server does not answer it: {reason.partition(':')[0]}")

    def _read(self, reply: requests.Response, bound: int) -> Answer:
        """The answer of a reply that is not to be repeated."""
        status, own = reply.status_code, self.model
        if status in _OF_DOCUMENT:
            error = DocumentError(f"the server refuses it: status {status}{_kind(reply)}")
            error.add_note(_words(reply))
            raise error
        if status != 200:
            place = _PATHS.get(status, "base_url")
            fix = f"the server at {self._url} refuses: status {status}: {_words(reply)}"
            raise SpecError([Problem(f"model.{place}", fix)])
        content = reply.json()
        content = content if isinstance(content, dict) else {}
        expected, named = own.revision or own.path, content.get("model")
        if named != expected:
            fix = f"the server at {self._url} answers as {named!r}, and not as {expected!r}"
            fix += "; to accept that model, and to keep its answers apart, write its name here"
            raise SpecError([Problem("model.revision", fix, own.revision)])
        try:
            choice = content["choices"][0]
            tokens = (choice.get("logprobs") or {}).get("content") or []
            first = tokens[0]["top_logprobs"] if tokens else []
            top = _top([(entry["token"], entry["logprob"]) for entry in first])
            is_without = not top and bool(tokens or choice["message"].get("content"))
        except (AttributeError, LookupError, TypeError, ValueError):
            is_without, top = True, ()
        if is_without:
            fix = f"the server at {self._url} returns no top_logprobs, which label probabilities "
            fix += "are read from; start it with log-probabilities on, or use another server"
            raise SpecError([Problem("model.engine", fix, own.engine)])
        used = content.get("usage") or {}
        return Answer(
            top, int(used.get("prompt_tokens", bound)), int(used.get("completion_tokens", 1))
        )


def read_key(model: ModelSpec) -> str | None:
    """The server's key; None if the spec names none. SpecError without repeating it."""
    if (name := model.api_key_env) is not None:
        if not os.environ.get(name):
            fix = f"{name} is not set here; export it before the run, on each machine of a cluster"
            raise SpecError([Problem("model.api_key_env", fix)])
        return os.environ[name].strip()
    if model.api_key_file is None:
        return None
    try:
        return Path(os.path.expanduser(model.api_key_file)).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise SpecError([Problem("model.api_key_file", f"cannot be read: {reason}")]) from None


def _error(reply: requests.Response) -> Mapping[str, Any]:
    """What the server says of an error."""
    with suppress(ValueError, AttributeError):
        content = reply.json()
        if isinstance(error := content.get("error", content), dict):
            return error
    return {"message": reply.text}


def _words(reply: requests.Response) -> str:
    """The same on one line of at most 200 characters."""
    error = _error(reply)
    return " ".join(str(error.get("message", error)).split())[:200] or str(reply.reason)


def _kind(reply: requests.Response) -> str:
    """The server's word for the kind of error, such as `context_length_exceeded`."""
    words = (_error(reply).get(name) for name in ("code", "type"))
    return next(
        (f", {w}" for w in words if isinstance(w, str) and re.fullmatch(r"\w{1,60}", w)), ""
    )


def _retry_after_s(header: str) -> float:
    """The seconds of a header Retry-After, which is a number or a date; 0 without it."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0
