"""The protocol of the peers' bench, with toy engines in this process."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from itertools import cycle
from math import log
from pathlib import Path

import pytest
import torch
from peers import InThisProcess
from transformers import AutoModelForCausalLM

from benchmarks.peers.__main__ import next_rounds
from benchmarks.peers.assay import Engine
from benchmarks.peers.environments import PeerError, Worker, Workers
from benchmarks.peers.serve import Answers, Asked, Documents, Setup, serve
from benchmarks.peers.turns import measure

ASKED = Asked([1], [[2], [3]], [[10, 11], [10, 12]])
ROUNDS = [[[1], [1]], [[2], [2]], [[3], [3]], [[4], [4]]]  # two documents each


@dataclass
class Toy:
    """Answers with one probability, in a given time for each document, and records its turns."""

    name: str
    turns: list[tuple[str, int]]
    seconds: float = 1.0
    p: float = 0.25
    fails_at: int | None = None
    returns: list[int] = field(default_factory=list)  # tokens; none: those that it is asked for

    def prepare(self, asked: Asked) -> None:
        self.asked = asked

    def label(self, documents: Documents) -> tuple[float, Answers]:
        (number,) = documents[0]
        if number == self.fails_at:
            raise PeerError("out of memory")
        self.turns.append((self.name, number))
        answers = [
            [dict.fromkeys(self.returns or own, log(self.p)) for own in self.asked.tokens]
            for _ in documents
        ]
        return self.seconds * number * len(documents), answers  # — later rounds are slower


def test_peers_take_turns_and_their_ratios_are_of_the_same_round() -> None:
    turns: list[tuple[str, int]] = []
    peers = {"assay:float32": Toy("a", turns), "toy:float32": Toy("b", turns, seconds=3.0)}
    reference, row = measure(peers, "1x2", ASKED, ROUNDS)
    expected = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3), ("b", 4), ("a", 4)]
    assert turns == [*expected, ("a", 4)]  # the last one is the comparison of the answers
    assert (reference.seconds, row.seconds) == ((2, 3, 4), (6, 9, 12))
    assert (reference.ratios, row.ratios) == ((1, 1, 1), (3, 3, 3))
    assert str(row).split() == ["1x2", "toy:float32", "9.000", "3.00", "[3.00,", "3.00]", "0"]


def test_no_document_of_a_later_workload_begins_as_one_that_a_cache_holds() -> None:
    text = cycle(range(100))
    rounds = [
        *next_rounds(text, 10, 2, 2),
        *next_rounds(text, 10, 1, 3),
        *next_rounds(text, 3, 1, 1),
    ]
    documents = [document for of_round in rounds for document in of_round]
    assert [len(document) for document in documents] == [10] * 7 + [3]
    assert len({document[0] for document in documents}) == len(documents)


@pytest.mark.parametrize("returns", [[], [13]], ids=["asked tokens", "its own token"])
@pytest.mark.parametrize(
    ("number_format", "p", "counts"),
    [
        ("float32", 0.2505, True),
        ("float32", 0.26, False),
        ("bfloat16", 0.26, True),
        ("q", 1, False),
    ],
)
def test_a_peer_with_other_answers_does_not_count(
    number_format: str, p: float, counts: bool, returns: list[int]
) -> None:
    toy = Toy("b", [], p=p, returns=returns)
    peers = {"assay:float32": Toy("a", []), f"toy:{number_format}": toy}
    reference, row = measure(peers, "1x2", ASKED, ROUNDS)
    assert row.difference == pytest.approx(p - 0.25)
    assert (row.failure is None) is counts
    assert (reference.difference, reference.failure) == (0, None)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_peer_that_fails_has_its_reason_and_the_others_go_on(fails_at: int) -> None:
    toys = {name: Toy(name, []) for name in ("assay:float32", "b:float32", "c:float32")}
    toys["b:float32"].fails_at = fails_at
    _, failed, other = measure(toys, "1x2", ASKED, ROUNDS)
    assert (failed.seconds, failed.failure) == ((), "out of memory")
    assert len(other.seconds) == 3


def test_an_engine_without_requirements_is_named(tmp_path: Path) -> None:
    setup = Setup("model", None, "float32", threads=1, cache=str(tmp_path))
    with pytest.raises(PeerError, match=r"no such engine; there is no file .*/toy\.txt"):
        Worker("toy", setup, tmp_path)


def test_workers_share_out_the_documents_and_the_last_one_ends_the_round(
    model_folder: Path, tmp_path: Path
) -> None:
    """A process and a worker here have three and two documents."""
    setup = Setup(str(model_folder), None, "float32", threads=1, cache="")
    asked = Asked([5, 6], [[7, 8], [9]], [[1, 2], [3]])
    documents = [[20 + i, 21, 22] for i in range(5)]
    alone = Engine(setup)
    process, in_this_process = Worker("assay", setup, tmp_path), InThisProcess(alone)
    try:
        together = Workers([process, in_this_process])
        together.prepare(asked)
        seconds, answers = together.label(documents)
    finally:
        process.close()
    assert seconds >= in_this_process.reply()[0] > 0 and len(in_this_process.reply()[1]) == 2
    for log_probs, expected in zip(answers, alone.label(documents), strict=True):
        for of_question, own in zip(log_probs, expected, strict=True):
            assert of_question == pytest.approx(own, abs=1e-5)


def test_assay_as_a_peer_scores_tokens_as_plain_forwards_do(model_folder: Path) -> None:
    engine = Engine(Setup(str(model_folder), None, "float32", threads=1, cache=""))
    asked = {"prefix": [5, 6], "questions": [[7, 8], [9]], "tokens": [[1, 2], [3]]}
    documents = [[20, 21, 22], [23, 24]]
    replies = io.StringIO()
    serve(engine, [json.dumps({"prepare": asked}), json.dumps({"label": documents})], replies)
    version, (_, nothing), (seconds, answers) = map(json.loads, replies.getvalue().splitlines())
    assert version.startswith("torch ") and nothing == [] and seconds > 0
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for document, of_document in zip(documents, answers, strict=True):
        for question, log_probs in zip([[7, 8], [9]], of_document, strict=True):
            logits = plain(torch.tensor([[5, 6, *document, *question]])).logits[0, -1]
            expected = logits.log_softmax(-1)
            for token, log_prob in log_probs.items():
                assert log_prob == pytest.approx(expected[int(token)].item(), abs=1e-5)
    assert [list(log_probs) for log_probs in answers[0]] == [["1", "2"], ["3"]]
