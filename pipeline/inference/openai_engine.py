"""A server with the chat API of OpenAI in place of assay's own engine: `model.engine: openai`.

Entry points: `OpenAIEngine.label`, which replaces that of `LabelEngine`, and `ByteEncoder`,
which makes the documents' tokens where the server's tokenizer is not known. Must not import Ray.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DocumentError, Problem, SpecError
from pipeline.inference.engine import DocumentIds, Labelled
from pipeline.inference.openai_client import Answer, ServerClient, Top
from pipeline.inference.schedules.batching import Usage
from pipeline.spec.model import BYTES_A_TOKEN
from pipeline.spec.prompts import Message, messages
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

_TOKENS = np.dtype("<i4")  # so that a token is its bytes
_FILLING = b"\xff"  # no byte of UTF-8
# Up to four bytes, which end where a character does.
_WHOLE_CHARACTERS = re.compile(rb"(?s).{1,%d}(?![\x80-\xbf])" % BYTES_A_TOKEN)


class ByteEncoder:
    """Takes as many characters as four bytes of UTF-8 hold for a token."""

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""
        filled = (whole.ljust(BYTES_A_TOKEN, _FILLING) for whole in _tokens(text))
        tokens: list[int] = np.frombuffer(b"".join(filled), _TOKENS).tolist()
        return tokens

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        yield from map(self.encode, texts)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the text begins and ends, in characters."""
        ends = accumulate((len(whole.decode()) for whole in _tokens(text)), initial=0)
        return list(pairwise(ends))


def _tokens(text: str) -> list[bytes]:
    """The bytes of each token: no character is in two of them."""
    return _WHOLE_CHARACTERS.findall(text.encode())


def decode(tokens: DocumentIds) -> str:
    """The text of tokens of a `ByteEncoder`."""
    return np.asarray(tokens, _TOKENS).tobytes().replace(_FILLING, b"").decode()


class OpenAIEngine:
    """A model that a server runs.

    A question about a document is one request, whose answer has one token. The server returns the
    likeliest tokens as text; one that begins a text of a label belongs to the label. The
    probability of a label is the sum of its tokens', and 0 of a label without any. It is at most
    what was not returned too small, and `Usage.not_returned` has the sum of that.

    Args:
        client: The server.
        prompt: The text around documents and questions.
        parts: The questions; no two labels of one begin with the same letter.
    """

    def __init__(self, client: ServerClient, prompt: PromptSpec, parts: Sequence[TaskSpec]) -> None:
        self.client = client
        self._prompt, self._parts = prompt, parts
        self._of_shard = Usage()

    def prove(self) -> None:
        """Asks the first question about no document: SpecError if the server cannot answer."""
        try:
            self.client.ask(self.chat((), self._parts[0]), keep=False)
        except DocumentError as error:
            words = "".join(f": {note}" for note in getattr(error, "__notes__", ()))
            fix = f"the first request, for one token with top_logprobs: {error}{words}"
            raise SpecError([Problem("model.engine", fix, "openai")]) from error

    def chat(self, document: DocumentIds, part: TaskSpec) -> list[Message]:
        """The turns that ask a question about a document."""
        return messages(self._prompt, decode(document), part.question or "")

    def begin_shard(self) -> None:
        """Begins a shard; answers that were paid for the shard before may be used again."""
        self._of_shard = Usage()
        self.client.journal.begin()

    def end_shard(self) -> None:
        """What was answered since `begin_shard` is committed."""
        self.client.journal.commit()

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the shard's label files about their answers."""
        own, usage = self.client.model, self._of_shard
        return {
            "engine": f"openai {own.base_url}",
            "server_model": own.revision or own.path,
            "not_returned": f"{usage.not_returned / max(1, usage.requests):.6f}",
        }

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """As `LabelEngine.label`: [docs, labels] log-probabilities for each question.

        Several threads call `on_batch`, one at a time, as documents are answered in any order, and
        without a document after each question: the server may take minutes for one.
        """
        asked = [part for part in self._parts if tasks is None or part.name in tasks]
        log_probs = [np.full((len(documents), len(p.labels)), np.nan, np.float32) for p in asked]
        usage, refused, reporting = Usage(), dict[int, str](), Lock()

        def report(*rows: int) -> None:
            with reporting:
                on_batch(rows)

        def ask(row: int) -> list[Answer]:
            answers = list[Answer]()
            try:  # — one question after the other: the server keeps what they have in common
                for part in asked:
                    answers.append(self.client.ask(self.chat(documents[row], part)))
                    report()
            except DocumentError as error:
                refused[row] = str(error)
            report(row)
            return answers

        with ThreadPoolExecutor(self.client.model.concurrency) as pool:
            try:
                for row, answers in enumerate(pool.map(ask, range(len(documents)))):
                    # — a refused document may have answers to its first questions
                    for own, part, answer in zip(log_probs, asked, answers, strict=False):
                        of_labels, not_returned = label_log_probs(answer.top, part)
                        own[row] = np.nan if row in refused else of_labels
                        usage += Usage(answer.prompt_tokens, answer.answer_tokens, 1, not_returned)
            finally:
                pool.shutdown(cancel_futures=True)
        self._of_shard += usage
        return Labelled(tuple(log_probs), usage, refused=refused)


def label_log_probs(top: Top, part: TaskSpec) -> tuple[NDArray[np.float32], float]:
    """[labels] the log-probability of each, and the probability of the tokens that are not known.

    -inf of a label without a token.
    """
    p = np.zeros(len(part.labels))
    for text, log_prob in top:
        for number, texts in enumerate(part.labels.values()):
            if any(_begins(text.lstrip(), own.lstrip()) for own in texts):
                p[number] += math.exp(log_prob)
    known = sum(math.exp(log_prob) for _, log_prob in top)
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32), max(0.0, 1 - known)


def _begins(token: str, text: str) -> bool:
    """Whether a token is the beginning of a text, or the whole text before another word."""
    if text.startswith(token):
        return bool(token)
    return token.startswith(text) and not token[len(text)].isalnum()
