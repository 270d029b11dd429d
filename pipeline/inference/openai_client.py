"""Requests to a server with the chat API of OpenAI: retried, paid once, and bounded in cost.

Entry point: `ServerClient.ask`. Must not import torch.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from urllib3.exceptions import InvalidHeader, MaxRetryError
from urllib3.util import Retry

from pipeline.errors import DocumentError, Problem, ServerError, SpecError, one_line
from pipeline.hashes import canonical_json, parse_json, short_hash
from pipeline.spec.model import ModelSpec
from pipeline.spec.prompts import Message

TOP_LOGPROBS = 20  # the most that the API allows
# The longest time without an answer; until the first one, a wrong URL is likelier than an outage.
PATIENCE_S, FIRST_PATIENCE_S = 300.0, 15.0
_TIMEOUT_S = (10.0, 120.0)  # to connect, and between two parts of an answer
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
_LATER = (408, 425, 429, 503, 529)  # whatever the document
_BUSY = (*_LATER, 409, 500, 502, 504)
_OF_DOCUMENT = (400, 413, 422)  # too long for the server, or rejected by it
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
    """What a run paid, and its answers that are not committed yet, in a file of this machine.

    A process that is killed leaves them to the next one. Several threads may call the methods, and
    several runs may use the file at once. ServerError if the file cannot be read or written.
    """

    file: Path | None = None  # one for each output; None: no answers are kept
    run: str = ""  # the id of the run whose price is added up
    spent: float = 0.0
    _known: dict[str, Top] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)  # by the shard at work
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.commit()  # — reads the file, and removes a line that a kill has cut off

    def find(self, key: str) -> Top | None:
        """The answer to a request, if it is paid and kept."""
        with self._lock:
            self._used.add(key)
            return self._known.get(key)

    def add(self, price: float, key: str | None = None, top: Top = ()) -> None:
        """Adds what was paid, and with a key the answer."""
        with self._alone() as file:
            self.spent += price
            if file is not None:
                line = {"price": price, "run": self.run}
                if key is not None:
                    self._known[key] = top
                    line |= {"key": key, "top": top}
                with file.open("ab") as opened:
                    opened.write(canonical_json(line) + b"\n")

    def begin(self) -> None:
        """A shard begins."""
        self._used.clear()

    def commit(self) -> None:
        """The answers of the shard at work are committed: no other one needs them."""
        with self._alone() as file:
            if file is not None:
                prices, known = _parsed(file)
                self.spent = max(self.spent, prices.get(self.run, 0.0))
                self._known = known = {k: t for k, t in known.items() if k not in self._used}
                paid = [{"price": price, "run": run} for run, price in prices.items() if price]
                kept = [{"price": 0, "run": "", "key": k, "top": t} for k, t in known.items()]
                written = file.with_suffix(".new")
                written.write_bytes(b"".join(canonical_json(x) + b"\n" for x in (*paid, *kept)))
                written.replace(file)
            self._used.clear()

    @contextmanager
    def _alone(self) -> Iterator[Path | None]:
        """The file, which no other thread or process changes in the block."""
        with self._lock:
            if self.file is None:
                yield None
                return
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.with_suffix(".lock").open("w") as lock:
                    with suppress(OSError):  # — some disks have no locks
                        fcntl.flock(lock, fcntl.LOCK_EX)
                    yield self.file
            except OSError as error:
                fix = "free some space, or name another folder in ASSAY_CACHE"
                raise ServerError(f"paid answers cannot be kept: {error}; {fix}") from error


def _parsed(file: Path) -> tuple[dict[str, float], dict[str, Top]]:
    """By run what it paid, and by key the answers; damaged lines are left out."""
    prices, known = dict[str, float](), dict[str, Top]()
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            content = parse_json(line)
            prices[content["run"]] = prices.get(content["run"], 0.0) + content["price"]
            if "key" in content:
                known[content["key"]] = _top(content["top"])
    return prices, known


def _top(entries: Sequence[Sequence[Any]]) -> Top:
    return tuple((str(text), float(log_prob)) for text, log_prob in entries)


class ServerClient:
    """A model at a server. Several threads may ask it.

    Args:
        model: The spec's, with `engine: openai`.
        journal: Keeps paid answers.
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
        self.journal = journal or Journal()
        self._limit = math.inf if max_cost is None else max_cost
        self._patience_s = patience_s
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
        self._in_flight: list[float] = []  # the most that each request can cost
        self._answered_s: float | None = None  # when the last answer came, on the monotonic clock
        self._over = threading.Event()
        self._end: ServerError | None = None

    def ask(self, messages: Sequence[Message], *, keep: bool = True) -> Answer:
        """The likeliest first tokens of the next turn; without `keep`, the server is always asked.

        DocumentError if the server refuses these messages. ServerError if it does not answer, may
        cost no more, or cannot be used as the spec says; of that, without `keep` SpecError.
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
        if keep and (known := self.journal.find(key)) is not None:
            return Answer(known)
        try:
            return self._retried(body, key if keep else None)
        except (ServerError, SpecError) as error:
            if error is self._end or (isinstance(error, SpecError) and not keep):
                raise
            reason = error.problems[0].fix if isinstance(error, SpecError) else str(error)
            self._end = self._end or ServerError(reason)
            self._over.set()
            raise self._end from error

    def _price(self, read: float, written: float) -> float:
        return self.model.price.of(read, written) if self.model.price else 0.0

    @contextmanager
    def _reserved(self, most: float) -> Iterator[None]:
        """Keeps what a request may cost; ServerError if that may be more than the run has left."""
        journal, at_work = self.journal, self._in_flight
        with self._lock:
            # — what is in flight may cost less than was reserved for it
            while at_work and journal.spent + sum(at_work) + most > self._limit and not self._end:
                self._lock.wait(1.0)
            if self._end is not None:
                raise self._end
            if journal.spent + most > self._limit:
                raise ServerError(
                    f"ended by --max-cost {self._limit:g}: {journal.spent:.4g} is spent, and "
                    f"the next request may take up to {most:.2g}; finished shards and paid answers "
                    "are kept; run again, with another --max-cost, to go on"
                )
            at_work.append(most)
        try:
            yield
        finally:
            with self._lock:
                at_work.remove(most)
                self._lock.notify_all()

    def _retried(self, body: bytes, key: str | None) -> Answer:
        """The answer to a request, which is repeated while the server is busy or out of reach."""
        bound = len(body) + _TOKENS_OF_TURNS  # — a token has a byte or more
        began, wait_s = math.inf, _FIRST_WAIT_S
        while True:
            try:
                with self._reserved(self._price(bound, 1)):
                    began = min(began, time.monotonic())
                    return self._asked_once(body, bound, key)
            except _NoAnswer as error:
                pause_s = max(error.after_s, wait_s * random.random())
                self._check_patience(error, began, pause_s)
            if self._over.wait(pause_s) and self._end is not None:
                raise self._end
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _asked_once(self, body: bytes, bound: int, key: str | None) -> Answer:
        """The answer to one request, which is paid, and with a key kept; _NoAnswer without one."""
        try:
            reply = self._session.post(
                self._url,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=_TIMEOUT_S,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            unsent = (ValueError, MaxRetryError)
            if not any(isinstance(own, unsent) for own in (error, *error.args)):
                self.journal.add(self._price(bound, 1))  # — the server may have answered
            raise _NoAnswer(f"{type(error).__name__}: {one_line(error)}") from error
        status, content = reply.status_code, None
        if status in _BUSY:
            raise _NoAnswer(f"status {status}: {_words(reply)}", reply)
        if status == 200:
            with suppress(ValueError):
                content = parse_json(reply.content)
            if not isinstance(content, dict) or "choices" not in content:
                lacks = "JSON" if content is None else "choices"
                words = f"{_words(reply)}; is model.base_url the URL of the API?"
                raise _NoAnswer(f"status 200 without {lacks}: {words}")
        self._answered_s = time.monotonic()
        answer = self._read(reply, content, bound)
        price = self._price(answer.prompt_tokens, answer.answer_tokens)
        self.journal.add(price, key, answer.top)
        return answer

    def _check_patience(self, error: _NoAnswer, began: float, pause_s: float) -> None:
        """ServerError if nothing is answered for too long; DocumentError if this alone is not.

        A reply that asks for a later retry is no error of the document.
        """
        now, patience_s = time.monotonic(), self._patience_s
        if self._answered_s is None and error.status is None:
            patience_s = min(patience_s, FIRST_PATIENCE_S)
        silent_s = now - max(began, self._answered_s or began)
        if silent_s + pause_s > patience_s:
            raise ServerError(
                f"{self._url} gives no answer for {silent_s:,.0f} s ({error}); finished "
                "shards and paid answers are kept; run again to go on"
            )
        if now + pause_s - began > patience_s and error.status not in _LATER:
            # — without the server's message, so that rows have few different statuses
            raise DocumentError(f"the server does not answer it: {str(error).partition(':')[0]}")

    def _read(self, reply: requests.Response, content: Any, bound: int) -> Answer:
        """The answer of a reply that is not to be repeated."""
        status, own = reply.status_code, self.model
        if status in _OF_DOCUMENT:
            error = DocumentError(f"the server refuses it: status {status}{_kind(reply)}")
            error.add_note(_words(reply))
            raise error
        if status != 200:
            of_key = "api_key_file" if own.api_key_file else "api_key_env"
            place = of_key if status in (401, 403) else "base_url"
            fix = f"the server at {self._url} refuses: status {status}: {_words(reply)}"
            raise SpecError([Problem(f"model.{place}", fix)])
        expected, named = own.revision or own.path, content.get("model")
        if named != expected:
            fix = f"the server at {self._url} answers as {named!r}, and not as {expected!r}"
            fix += "; to accept that model, and to keep its answers apart, write its name"
            raise SpecError([Problem("model.revision", fix, own.revision)])
        try:
            choice = content["choices"][0]
            tokens = (choice.get("logprobs") or {}).get("content") or []
            first = tokens[0]["top_logprobs"] if tokens else []
            # — of an impossible token, a server may write null or -Infinity
            pairs = [(e["token"], e["logprob"]) for e in first if e["logprob"] is not None]
            top = _top([pair for pair in pairs if pair[1] > -math.inf])
            used = content.get("usage") or {}
            read = int(used.get("prompt_tokens") or bound)
            written = int(used.get("completion_tokens") or 1)
            is_without = not top and bool(tokens or choice["message"].get("content"))
        except (AttributeError, LookupError, TypeError, ValueError):
            is_without, top = True, ()
        if is_without:
            fix = f"the server at {self._url} returns no top_logprobs, which label probabilities "
            fix += "are read from; start it with log-probabilities on, or use another server"
            raise SpecError([Problem("model.engine", fix, own.engine)])
        return Answer(top, read, written)


class _NoAnswer(Exception):
    """Why one request has no answer; it may be repeated."""

    def __init__(self, reason: str, reply: requests.Response | None = None) -> None:
        self.status, self.after_s = None if reply is None else reply.status_code, 0.0
        if reply is not None and (header := reply.headers.get("Retry-After")):
            reason += f", Retry-After: {header}"
            with suppress(InvalidHeader, OverflowError, ValueError):
                self.after_s = Retry().parse_retry_after(header)
        super().__init__(reason)


def read_key(model: ModelSpec) -> str | None:
    """The server's key; None if the spec names none. SpecError without repeating it."""
    if (name := model.api_key_env) is not None:
        place, key = "model.api_key_env", os.environ.get(name, "")
        if not key:
            fix = f"{name} is not set here; export it before the run, on each machine of a cluster"
            raise SpecError([Problem(place, fix)])
    elif model.api_key_file is not None:
        place, name = "model.api_key_file", "the file"
        try:
            key = Path(os.path.expanduser(model.api_key_file)).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not text"
            raise SpecError([Problem(place, f"cannot be read: {reason}")]) from None
    else:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", key := key.strip()):  # — an error of HTTP would show it
        fix = f"{name} is not one line of plain characters; write the key there, and nothing else"
        raise SpecError([Problem(place, fix)])
    return key


def _error(reply: requests.Response) -> Mapping[str, Any]:
    """The error object of a reply."""
    with suppress(ValueError, AttributeError):
        content = parse_json(reply.content)
        if isinstance(error := content.get("error", content), dict):
            return error
    return {"message": reply.text}


def _words(reply: requests.Response) -> str:
    """The server's message on one line of at most 200 characters; of a redirect, the other URL."""
    if reply.is_redirect:
        return f"it redirects to {reply.headers['Location'][:200]}; write the URL of that API"
    error = _error(reply)
    words = " ".join(str(error.get("message", error)).split())
    if key := str(reply.request.headers.get("Authorization", "")).removeprefix("Bearer "):
        words = words.replace(key, "***")  # — some servers repeat it
    return words[:200] or str(reply.reason)


def _kind(reply: requests.Response) -> str:
    """The server's word for the kind of error, such as `context_length_exceeded`."""
    words = [w for name in ("code", "type") if isinstance(w := _error(reply).get(name), str)]
    return next((f", {w}" for w in words if re.fullmatch(r"\w{1,60}", w)), "")
