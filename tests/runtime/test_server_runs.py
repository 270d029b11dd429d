"""Runs that a server with the chat API answers: what is stored, printed, asked again and paid."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from calls import Assay, WriteSpec
from command import WITH_MODEL, start
from fake_chat import FakeChat, shares
from local_cluster import wait_until
from stages import run_without_ray

FILES, ROWS = 3, 8
PRICE = {"input": 2.0, "output": 8.0}


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """The input of a spec: three files of eight different texts."""
    for number in range(FILES):
        rows = [{"id": f"{number}-{n}", "text": f"Text {number}, {n}."} for n in range(ROWS)]
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / f"corpus_{number}.jsonl").write_text(lines)
    return {"path": str(tmp_path / "corpus_*.jsonl"), "id": "id"}


def asked(text: str, question: str = "Rude?") -> str:
    return f"Read the text, then answer the question.\n\nText:\n{text}\n\n{question}"


def paid(chat: FakeChat) -> list[int]:
    """How often each question about a document was paid."""
    return [n for text, n in chat.paid.items() if "Text:\n\n" not in text]


def cost(chat: FakeChat) -> float:
    return (chat.tokens * PRICE["input"] + chat.paid.total() * PRICE["output"]) / 1e6


def test_a_server_labels_a_corpus_once_and_its_price_is_reported(
    chat: FakeChat,
    write_spec: WriteSpec,
    corpus: dict[str, Any],
    assay: Assay,
    without_ray: None,
    tmp_path: Path,
) -> None:
    spec = write_spec(model=chat.spec(price=PRICE), input=corpus)
    planned = assay("run", spec, "--dry-run", "--json").json
    requests = 2 * FILES * ROWS
    assert planned["server_tokens"][1] == requests and not chat.asked
    words = assay("run", spec, "--dry-run", "--price", 3).words
    assert ", without the hours of the workers: their speed is not known" in words
    done = assay("run", spec, "--json").json
    assert done["complete"] and paid(chat) == [1] * requests
    # — the price of the first request, which only proves the server, is not of a shard
    [proof] = [text for text in chat.paid if "Text:\n\n" in text]
    assert done["question_tokens_computed"] == requests
    assert cost(chat) * 0.9 < done["cost"] < cost(chat)
    assert 0.2 * cost(chat) < planned["cost"] < cost(chat)
    assert done["not_returned"] == pytest.approx(0.035)

    again = assay("run", spec).words
    assert "every document has its answers" in again and paid(chat) == [1] * requests
    assert chat.paid[proof] == 1
    export = tmp_path / "labels.jsonl"
    assay("export", spec, "--to", export)
    for row in map(json.loads, export.read_text().splitlines()):
        number, n = row["doc_id"].split("-")
        p = shares(asked(f"Text {number}, {n}."))
        yes, no = p["Yes"] + p[" yes"] * 0 + p["Y"], p["No"] + p["no."] * 0
        assert row["toxic_p_toxic"] == pytest.approx(yes / (yes + no), rel=1e-5)
        assert row["topic"] == "art" and row["topic_p_sport"] == pytest.approx(0.05 / 0.95)
    files = [*(tmp_path / "out" / "labels" / "toxic").rglob("*.parquet")]
    for file in files:
        metadata = pq.read_metadata(file).metadata
        assert metadata[b"assay.engine"] == f"openai {chat.url}/v1".encode()
        assert metadata[b"assay.server_model"] == b"small"
        assert metadata[b"assay.not_returned"] == b"0.035000"
    assert files and not [*(tmp_path / "cache").rglob("*.new")]
    # — another machine with the same model: nothing is asked again
    moved = chat.spec(price=PRICE, base_url="http://127.0.0.1:1/v1")
    write_spec(model=moved, input=corpus)
    assert "every document has its answers" in assay("run", spec).words


def test_a_dry_run_counts_the_requests_of_an_added_question_alone(
    chat: FakeChat, write_spec: WriteSpec, corpus: dict[str, Any], assay: Assay, without_ray: None
) -> None:
    toxic = {"name": "toxic", "question": "Rude?", "labels": {"toxic": ["Yes"], "clean": ["No"]}}
    topic = {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]}
    content = {"model": chat.spec(price=PRICE), "input": corpus}
    spec = write_spec(**content, tasks=[toxic])
    assay("run", spec)
    write_spec(**content, tasks=[toxic, topic])
    planned = assay("run", spec, "--dry-run", "--json").json
    assert planned["server_tokens"][1] == FILES * ROWS
    assay("run", spec)
    assert paid(chat) == [1] * (2 * FILES * ROWS)


def test_a_run_ends_before_it_costs_too_much_and_a_later_one_goes_on(
    chat: FakeChat, write_spec: WriteSpec, corpus: dict[str, Any], assay: Assay, without_ray: None
) -> None:
    spec = write_spec(model=chat.spec(concurrency=1), input=corpus)
    printed = assay("run", spec, "--max-cost", 1, code=2).error
    assert printed.startswith("--max-cost: needs the price") and not chat.asked
    write_spec(model=chat.spec(concurrency=1, price=PRICE), input=corpus)
    printed = assay("run", spec, "--max-cost", 0.004, code=3).err
    assert "ended by --max-cost 0.004" in printed
    assert 0.001 < cost(chat) <= 0.004 and len(paid(chat)) < 2 * FILES * ROWS
    before = sum(paid(chat))
    done = assay("run", spec, "--max-cost", 1, "--json").json
    assert done["complete"] and paid(chat) == [1] * (2 * FILES * ROWS)
    assert done["question_tokens_computed"] <= 2 * FILES * ROWS - before + 2 * ROWS


def test_the_sample_of_a_cascade_and_its_run_have_one_limit_and_one_cost(
    chat: FakeChat, write_spec: WriteSpec, assay: Assay, without_ray: None, tmp_path: Path
) -> None:
    file, documents = tmp_path / "many.jsonl", 200
    rows = [{"id": f"{n}", "text": f"Text {n}."} for n in range(documents)]
    file.write_text("\n".join(map(json.dumps, rows)))
    stages = [{"question": "Rude, maybe?", "documents": {"max_tokens": 4}}, {"question": "Rude?"}]
    labels = {"toxic": ["Yes"], "clean": ["No"]}
    content = {
        "model": chat.spec(price=PRICE),
        "input": {"path": str(file), "id": "id"},
        "tasks": [{"name": "toxic", "labels": labels, "cascade": {"stages": stages}}],
    }
    spec, most = write_spec(**content), 0.012
    printed = assay("run", spec, "--max-cost", most, code=3).err
    assert f"ended by --max-cost {most:g}" in printed
    assert documents * 0.2 < chat.paid.total() < documents and 0.9 * most < cost(chat) <= most
    write_spec(**content, output=str(tmp_path / "other"))
    before = cost(chat)
    done = assay("run", spec, "--json").json
    whole = cost(chat) - before
    # — with those of the sample; two first requests only prove the server
    assert 0.97 * whole < done["cost"] < whole and done["certificates"]["toxic"]["reason"]
    assert done["question_tokens_computed"] == documents


@pytest.mark.parametrize("command", WITH_MODEL)
def test_after_a_kill_only_requests_in_flight_are_paid_again(
    command: Sequence[str], chat: FakeChat, write_spec: WriteSpec, corpus: dict[str, Any]
) -> None:
    spec, concurrency = write_spec(model=chat.spec(concurrency=2), input=corpus), 2
    environment = {**os.environ, "ASSAY_CACHE": str(spec.parent / "cache")}
    chat.slow_s = 0.05
    killed = start(command, "run", str(spec), environment=environment)
    # — in the second shard
    wait_until(lambda: chat.paid.total() >= ROWS * 3, killed.poll, pause_s=0.005)
    killed.kill()
    killed.communicate(timeout=60)
    chat.slow_s = 0.0
    resumed = start(command, "run", str(spec), "--json", environment=environment)
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and json.loads(out)["complete"], err
    again = [times for times in paid(chat) if times > 1]
    assert len(paid(chat)) == 2 * FILES * ROWS
    assert len(again) <= concurrency and set(again) <= {2}, chat.paid


def test_a_server_that_is_renamed_or_silent_ends_a_run_at_once(
    chat: FakeChat, write_spec: WriteSpec, corpus: dict[str, Any], assay: Assay, without_ray: None
) -> None:
    spec = write_spec(model=chat.spec(concurrency=1), input=corpus)
    chat.renamed_after = 2 * ROWS + 4
    printed = assay("run", spec, code=3).err
    assert "answers as 'another', and not as 'small'" in printed and "others go on" not in printed
    assert chat.paid.total() == chat.renamed_after + 1
    printed = assay("run", spec, code=2).err
    assert "model.revision: the server at" in printed and str(spec) in printed
    chat.renamed_after, chat.always, chat.retry_after = 1_000, 429, "7200"
    printed = assay("run", spec, code=3).err
    assert "status 429: fault 429, Retry-After: 7200" in printed
    chat.always = None
    assert assay("run", spec, "--json").json["complete"]
    assert sorted(paid(chat))[-2:] in ([1, 1], [1, 2])  # the answer of the other model alone


def test_a_command_that_needs_the_model_itself_is_refused(
    chat: FakeChat, write_spec: WriteSpec, corpus: dict[str, Any], assay: Assay, tmp_path: Path
) -> None:
    spec, gold = write_spec(model=chat.spec(), input=corpus), tmp_path / "gold.csv"
    labels = [f"{n % 2}-{n // 2},{('toxic', 'clean')[n % 2]}" for n in range(2 * ROWS)]
    gold.write_text("\n".join(["id,toxic", *labels]))
    for words in (("fit", spec, "--gold", gold), ("check", spec)):
        assert "model.engine: this command reads the model itself" in assay(*words, code=2).err
