"""What the journal of paid answers keeps, for several runs and after kills."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_chat import FakeChat

from pipeline.errors import ServerError
from pipeline.inference.openai_client import Journal, ServerClient
from pipeline.spec.model import ModelSpec
from pipeline.spec.prompts import Message

TURNS: list[Message] = [{"role": "user", "content": "Rude?"}]


def test_two_runs_at_once_keep_the_answers_and_the_prices_of_each_other(tmp_path: Path) -> None:
    file, top = tmp_path / "journal", (("Yes", -0.5),)
    one, other = Journal(file, "one"), Journal(file, "other")
    for own, key in ((one, "a"), (other, "b")):
        own.begin()
        assert own.find(key) is None
        own.add(0.5, key, top)
    one.commit()
    again = Journal(file, "other")
    assert again.find("b") == top and again.find("a") is None and again.spent == 0.5

    def work(journal: Journal) -> None:
        for number in range(30):
            journal.begin()
            journal.find(key := f"{journal.run}-{number}")
            journal.add(1.0, key, top)
            journal.commit()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(work, (one, other))] == [None, None]
    assert (Journal(file, "one").spent, Journal(file, "other").spent) == (30.5, 30.5)


def test_a_line_that_was_cut_off_costs_no_other_line(tmp_path: Path) -> None:
    file, top = tmp_path / "journal", (("Yes", -0.5),)
    Journal(file, "run").add(1.0, "a", top)
    with file.open("ab") as opened:
        opened.write(b'{"key": "cut o')
    Journal(file, "run").add(2.0, "b", top)
    again = Journal(file, "run")
    assert again.find("a") == again.find("b") == top and again.spent == 3.0


def test_paid_answers_that_cannot_be_kept_end_the_run(chat: FakeChat, tmp_path: Path) -> None:
    own = ServerClient(ModelSpec(**chat.spec()), Journal(tmp_path / "answers" / "journal", "run"))
    own.ask(TURNS)
    shutil.rmtree(tmp_path / "answers")
    (tmp_path / "answers").touch()
    with pytest.raises(ServerError, match=r"paid answers cannot be kept: .*ASSAY_CACHE") as failed:
        own.ask([{"role": "user", "content": "Kind?"}])
    assert failed.value.exit_code == 3
    with pytest.raises(ServerError, match="paid answers cannot be kept"):
        Journal(tmp_path / "answers" / "journal", "run")
