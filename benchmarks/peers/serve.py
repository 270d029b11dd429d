"""One engine in a process of its own: `PYTHON -m benchmarks.peers.serve ENGINE SETUP`.

Requests and replies are lines of JSON on stdin and stdout. Must import the standard library only:
the environments of other engines do not have assay's dependencies.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO, cast

Documents = list[list[int]]
Answers = list[list[dict[int, float]]]  # by document, by question: token id -> log-probability


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is loaded with."""

    folder: str  # the model's configuration, tokenizer and float32 safetensors
    gguf: str | None  # the file that the folder was made of, if it is one
    number_format: str
    threads: int
    cache: str  # folder for the weights in the engine's own file format


@dataclass(frozen=True, slots=True)
class Asked:
    """The token ids of the prompts `prefix + document + question`, and the tokens to score."""

    prefix: list[int]
    questions: list[list[int]]
    tokens: list[list[int]]  # by question: the tokens that may come next


@dataclass(frozen=True, slots=True)
class Writing:
    """Prompts, after each of which a JSON text is written."""

    prompts: list[list[int]]
    schema: dict[str, Any]  # a JSON schema
    max_tokens: int  # of a text


@dataclass(frozen=True, slots=True)
class Written:
    """A JSON text."""

    text: str
    read: int  # tokens of the prompt that were not in the prefix cache
    tokens: int  # that were written


class Engine(Protocol):
    """An engine with its model. Its module has a class of this name, made from a `Setup`."""

    version: str

    def prepare(self, asked: Asked) -> None:
        """Take the prompt of the next documents. Not measured: the engine may read the prefix."""

    def label(self, documents: Documents) -> Answers:
        """The log-probabilities of the tokens to score, out of the whole vocabulary.

        An engine that cannot return chosen tokens returns its most probable ones.
        """


class WritingEngine(Engine, Protocol):
    """An engine that also writes JSON."""

    def write(self, request: Writing) -> list[Written]:
        """The texts that follow the prompts."""


def serve(engine: Engine, requests: Iterable[str], replies: TextIO) -> None:
    """Answer requests until there are no more. Seconds are those of the engine alone."""
    print(json.dumps(engine.version), file=replies, flush=True)
    for line in requests:
        [(verb, value)] = json.loads(line).items()
        started = time.perf_counter()
        answers: list[Any] = []
        if verb == "prepare":
            engine.prepare(Asked(**value))
        elif verb == "label":
            answers = engine.label(value)
        else:
            answers = [asdict(each) for each in cast(WritingEngine, engine).write(Writing(**value))]
        print(json.dumps([time.perf_counter() - started, answers]), file=replies, flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the bench (PR_SET_PDEATHSIG)
    # — libraries print to stdout: from now on that is stderr
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}")
    serve(module.Engine(Setup(**json.loads(sys.argv[2]))), sys.stdin, answers_to)
