"""What `OpenAIEngine` asks a server, and what it makes of answers and of their absence."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_chat import DROP, KEY, FakeChat, shares
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ServerError, SpecError
from pipeline.inference.chunking import chunk_text
from pipeline.inference.openai_client import Journal, ServerClient
from pipeline.inference.openai_engine import ByteEncoder, OpenAIEngine, decode, label_log_probs
from pipeline.spec.model import ModelSpec
from pipeline.spec.schema import PromptSpec
from pipeline.spec.stages import DocumentsSpec, QuestionTask

RUDE = QuestionTask(
    name="toxic", question="Rude?", labels={"toxic": ["Yes", "yes"], "clean": ["No", "no"]}
)
TOPIC = QuestionTask(name="topic", question="About what?", labels=["art", "law", "sport", "tea"])
PROMPT = PromptSpec(system="Be short.", instruction="Read.", document="<{document}>")
DOCUMENTS = [f"Document {number}, déjà vu, 创新." for number in range(12)]
ENCODER = ByteEncoder()


def engine(chat: FakeChat, journal: Journal | None = None, **options: Any) -> OpenAIEngine:
    limits = {key: options.pop(key) for key in ("max_cost", "patience_s") if key in options}
    client = ServerClient(ModelSpec(**chat.spec(**options)), journal, **limits)
    return OpenAIEngine(client, PROMPT, [RUDE, TOPIC])


def asked(document: str, question: str) -> str:
    return f"Read.\n\n<{document}>\n\n{question}"


def tokens(documents: list[str]) -> list[list[int]]:
    return [ENCODER.encode(text) for text in documents]


def test_labels_get_the_probability_of_the_tokens_that_begin_them(chat: FakeChat) -> None:
    own, read = engine(chat, concurrency=3), list[int]()
    chat.slow_s = 0.01
    result = own.label(tokens(DOCUMENTS), on_batch=read.extend)
    assert sorted(read) == [*range(12)] and not result.refused
    questions = ("Rude?", "About what?")
    assert chat.asked == Counter(asked(text, q) for text in DOCUMENTS for q in questions)
    assert 1 < chat.at_once <= 3
    by_question = [np.exp(of_question) for of_question in result.log_probs]
    for text, rude, topic in zip(DOCUMENTS, *by_question, strict=True):
        p = shares(asked(text, "Rude?"))
        expected = [p["Yes"] + p[" yes"] + p["Y"], p["No"] + p["no."]]
        np.testing.assert_allclose(rude, expected, rtol=1e-5)
        np.testing.assert_allclose(topic, [0.6, 0.3, 0.05, 0], rtol=1e-5)
    assert result.usage.prefix_tokens_computed == chat.tokens
    assert result.usage.question_tokens_computed == result.usage.requests == 24
    assert result.usage.not_returned == pytest.approx(24 * 0.035)
    assert own.metadata["not_returned"] == "0.035000"
    [alone] = own.label(tokens(DOCUMENTS[:2]), tasks=["topic"]).log_probs
    np.testing.assert_array_equal(alone, result.log_probs[1][:2])


@pytest.mark.parametrize(
    "token, label",
    [("Ye", 0), ("  yes", 0), ("Yes,", 0), ("Yesterday", None), ("", None), ("N", 1), ("on", None)],
)
def test_a_token_is_of_the_label_that_it_begins(token: str, label: int | None) -> None:
    log_probs, not_returned = label_log_probs(((token, np.log(0.25)),), RUDE)
    expected = [0.25 if number == label else 0.0 for number in range(2)]
    np.testing.assert_allclose(np.exp(log_probs), expected, rtol=1e-6)
    assert not_returned == pytest.approx(0.75)


@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_the_tokens_of_a_text_are_its_bytes_and_cut_no_character(text: str) -> None:
    ids = ENCODER.encode(text)
    parts = [decode([token]) for token in ids]
    assert decode(ids) == "".join(parts) == text
    places = ENCODER.offsets(text)
    assert [text[start:end] for start, end in places] == parts
    sizes = [len(part.encode()) for part in parts]
    assert all(size <= 4 for size in sizes)
    for size, after in zip(sizes, parts[1:], strict=False):  # — none has room for what follows
        assert size + len(after[0].encode()) > 4


def test_chunks_that_do_not_overlap_have_every_character_once() -> None:
    rules = DocumentsSpec(max_tokens=5, too_long="chunk", overlap_tokens=0)
    text = "abc创新 déjà vu 🙂 naïve 新创新 x é" * 3
    tokens = len(ENCODER.encode(text))
    chunks = chunk_text(ENCODER, text, rules).token_ids
    repeated = len(chunks) * 5 - tokens  # — the last chunk is as long as the others
    assert "".join(map(decode, (*chunks[:-1], chunks[-1][repeated:]))) == text


def test_a_busy_server_is_asked_again_after_its_retry_after(
    chat: FakeChat, short_waits: None
) -> None:
    chat.faults.extend([429, 500, DROP, 503])
    own = engine(chat, concurrency=1)
    result = own.label(tokens(DOCUMENTS[:1]), tasks=["toxic"])
    assert chat.asked.total() == 5 and chat.paid.total() == result.usage.requests == 1
    for chat.retry_after in (formatdate(time.time() + 3, usegmt=True), "1", "soon"):
        chat.faults.append(429)
        own.label(tokens(DOCUMENTS[:1]), tasks=["toxic"])
        assert (chat.times[-1] - chat.times[-2] >= 1) == (chat.retry_after != "soon")


@pytest.mark.parametrize("status, after", [(503, ""), (429, "3600"), (DROP, "")])
def test_a_server_that_stays_silent_ends_the_run_in_time(
    status: int, after: str, chat: FakeChat
) -> None:
    own = engine(chat, patience_s=0.5)
    own.prove()
    chat.always, chat.retry_after = status, after
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"gives no answer .*run again") as failed:
        own.label(tokens(DOCUMENTS))
    assert failed.value.exit_code == 3 and time.monotonic() - began < 10
    requests = chat.asked.total()
    with pytest.raises(ServerError):  # — at once, for the shards that wait
        own.label(tokens(DOCUMENTS))
    assert chat.asked.total() == requests


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_WAIT_S", "_LONGEST_WAIT_S"):
        monkeypatch.setattr(f"pipeline.inference.openai_client.{name}", 0.05)


def test_a_rate_limit_is_waited_for_while_others_are_answered(
    chat: FakeChat, short_waits: None
) -> None:
    """Longer than the patience for one document, which is the first one."""
    reports = list[list[int]]()

    def report(rows: Sequence[int]) -> None:
        reports.append([*rows])
        if sum(map(len, reports)) == 11:
            chat.faults_of.clear()

    chat.faults_of, chat.slow_s = {"Document 0,": 429}, 0.1
    result = engine(chat, concurrency=2, patience_s=1.0).label(tokens(DOCUMENTS), on_batch=report)
    assert not result.refused and not any(np.isnan(p).any() for p in result.log_probs)
    # — each question is a sign of life, and each document is reported when it is answered
    assert Counter(map(len, reports)) == {0: 24, 1: 12} and reports[-1] == [0]


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_rate_limit_fails_no_document(status: int, chat: FakeChat, short_waits: None) -> None:
    chat.faults_of, chat.slow_s = {"Document 1,": status}, 0.08
    own = engine(chat, concurrency=4, patience_s=1.0)
    if status == 500:
        result = own.label(tokens(DOCUMENTS))
        assert result.refused == {1: "the server does not answer it: status 500"}
    else:
        with pytest.raises(ServerError, match=f"gives no answer .*status {status}: .*run again"):
            own.label(tokens(DOCUMENTS))
        assert chat.paid.total() == 22


def test_a_refused_document_fails_alone(chat: FakeChat) -> None:
    chat.refuses = "Document 7,"
    result = engine(chat).label(tokens(DOCUMENTS))
    assert result.refused == {7: "the server refuses it: status 400, context_length_exceeded"}
    assert np.isnan(result.log_probs[0]).any(axis=1).tolist() == [n == 7 for n in range(12)]


def test_the_answers_before_that_which_is_refused_are_counted(chat: FakeChat) -> None:
    chat.refuses = "About what?"
    result = engine(chat).label(tokens(DOCUMENTS[:2]))
    assert {*result.refused} == {0, 1} and result.usage.requests == chat.paid.total() == 2
    assert result.usage.prefix_tokens_computed == chat.tokens


def test_another_model_behind_the_url_is_refused_by_both_names(chat: FakeChat) -> None:
    chat.model = "small-2026-11-01"
    with pytest.raises(
        SpecError, match=r"model.revision: .*'small-2026-11-01', and not as 'small'"
    ):
        engine(chat).prove()
    own = engine(chat, revision="small-2026-11-01")
    own.prove()
    chat.renamed_after = 5
    with pytest.raises(ServerError, match="'another', and not as 'small-2026-11-01'"):
        own.label(tokens(DOCUMENTS))


@pytest.mark.parametrize("without", ["logprobs", "top_logprobs"])
def test_a_server_without_log_probabilities_is_refused_at_once(
    without: str, chat: FakeChat
) -> None:
    chat.without = without
    with pytest.raises(SpecError, match=r"model.engine: .*returns no top_logprobs"):
        engine(chat).prove()
    assert chat.asked.total() == 1


@pytest.mark.parametrize(
    "status, message",
    [
        (401, "api_key_env: .*: status 401: fault 401"),
        (404, "base_url: .*: status 404: fault 404"),
        (400, "engine: the first request, .* status 400"),
        (301, "base_url: .*: status 301: it redirects to https://other.example/v1; write"),
    ],
)
def test_a_server_that_refuses_the_first_request_is_a_mistake_in_the_spec(
    status: int, message: str, chat: FakeChat
) -> None:
    chat.always, chat.page = status, b"<html>moved</html>" if status == 301 else b""
    with pytest.raises(SpecError, match=f"model.{message}"):
        engine(chat).prove()
    assert chat.asked.total() == 1


def test_an_unreachable_url_is_reported_within_seconds(
    chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.inference.openai_client.FIRST_PATIENCE_S", 0.2)
    with pytest.raises(ServerError, match="refused"):
        engine(chat, base_url="http://127.0.0.1:1/v1").prove()
    chat.page = b"<html>Welcome</html>"
    with pytest.raises(ServerError, match=r"status 200 without JSON: <html>.*is model.base_url"):
        engine(chat).prove()
    for page, shown in {b'{"error": {"message": "busy"}}': "busy", b"[]": r"\[\]"}.items():
        chat.page = page
        with pytest.raises(ServerError, match=f"status 200 without choices: {shown}; is model"):
            engine(chat).prove()


TOP = '{"logprobs": {"content": [{"top_logprobs": [{"token": "Yes", "logprob": -1}]}]}}'


@pytest.mark.parametrize("choice", ["null", '{"logprobs": {"content": 1}}', TOP])
def test_an_answer_of_another_form_is_one_line(choice: str, chat: FakeChat) -> None:
    chat.page = f'{{"model": "small", "choices": [{choice}], "usage": [1]}}'.encode()
    with pytest.raises(SpecError, match=r"model.engine: .*returns no top_logprobs"):
        engine(chat).prove()


def test_a_token_that_is_impossible_belongs_to_no_label(chat: FakeChat, tmp_path: Path) -> None:
    top = '{"token": "Yes", "logprob": -0.1}, {"token": "No", "logprob": -Infinity}, '
    top += '{"token": "\\ud83d", "logprob": -4}, {"token": "no", "logprob": null}'
    choice = f'{{"logprobs": {{"content": [{{"top_logprobs": [{top}]}}]}}}}'
    chat.page = f'{{"model": "small", "choices": [{choice}]}}'.encode()
    for _ in range(2):  # — the second time from the journal
        own = engine(chat, Journal(tmp_path / "journal"))
        [log_probs] = own.label(tokens(DOCUMENTS[:1]), tasks=["toxic"]).log_probs
        assert log_probs[0].tolist() == [pytest.approx(-0.1), -np.inf]
    assert chat.paid.total() == 1


def test_the_key_comes_from_the_environment_or_a_file(
    chat: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"model.api_key_env: TEST_KEY is not set"):
        engine(chat, api_key_env="TEST_KEY")
    monkeypatch.setenv("TEST_KEY", KEY)
    file = tmp_path / "key.txt"
    file.write_text(f"{KEY}\n")
    for name in ({"api_key_env": "TEST_KEY"}, {"api_key_file": str(file)}):
        chat.keys.clear()
        engine(chat, **name).prove()
        assert chat.keys == {f"Bearer {KEY}"}
    for wrong in (f"{KEY}\nsecond", f"{KEY} x", f"{KEY}é", "\n"):
        monkeypatch.setenv("TEST_KEY", wrong)
        file.write_text(wrong)
        for name in ({"api_key_env": "TEST_KEY"}, {"api_key_file": str(file)}):
            with pytest.raises(SpecError, match="is not one line of plain characters") as failed:
                engine(chat, **name)
            [problem] = failed.value.problems
            assert problem.place == f"model.{next(iter(name))}" and KEY not in str(failed.value)
    file.write_text(KEY)
    chat.always, chat.page = 401, b'{"error": {"message": "Wrong key: %s."}}' % KEY.encode()
    with pytest.raises(SpecError, match=r"model.api_key_file: .*Wrong key: \*\*\*\.") as failed:
        engine(chat, api_key_file=str(file)).prove()
    assert KEY not in str(failed.value)
    file.unlink()
    with pytest.raises(SpecError, match=r"model.api_key_file: cannot be read"):
        engine(chat, api_key_file=str(file))


PRICE = {"input": 3.0, "output": 15.0}


def cost(chat: FakeChat) -> float:
    return (chat.tokens * PRICE["input"] + chat.paid.total() * PRICE["output"]) / 1e6


def test_a_run_never_costs_more_than_it_may_and_goes_on_where_it_ended(
    chat: FakeChat, tmp_path: Path
) -> None:
    file, documents = tmp_path / "answers" / "journal", tokens(DOCUMENTS)
    whole = engine(chat)
    whole.label(documents)
    all_paid, most = Counter(chat.paid), cost(chat) / 2
    chat.paid.clear()
    chat.tokens = 0
    for run in "aabcdef":  # — `a` dies, and its next process has what it spent
        own = engine(chat, Journal(file, run), price=PRICE, max_cost=most)
        before = cost(chat) if run != "a" else 0.0
        try:
            own.label(documents)
        except ServerError as error:
            assert "--max-cost" in str(error) and error.exit_code == 3
        assert before < cost(chat) <= before + most or chat.paid == all_paid
    assert chat.paid == all_paid  # nothing was paid twice


def test_a_request_without_an_answer_in_time_counts_before_it_is_repeated(
    chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.inference.openai_client._TIMEOUT_S", (5.0, 0.1))
    chat.slow_s = 0.4
    own = engine(chat, concurrency=1, price={"input": 1500.0, "output": 0.0}, max_cost=0.7)
    with pytest.raises(ServerError, match=r"ended by --max-cost 0.7: 0.\d+ is spent"):
        own.label(tokens(DOCUMENTS))
    assert 0.35 < own.client.journal.spent <= 0.7 and chat.asked.total() == 1


def test_a_request_that_was_sent_counts_though_its_connection_ended(
    chat: FakeChat, short_waits: None
) -> None:
    own = engine(chat, concurrency=1, price={"input": 1500.0, "output": 0.0})
    chat.faults.append(DROP)
    own.label(tokens(DOCUMENTS[:1]), tasks=["toxic"])
    answered = 1500 * chat.tokens / 1e6
    assert chat.asked.total() == 2 and own.client.journal.spent > 2 * answered
    nowhere = engine(chat, base_url="http://127.0.0.1:1/v1", price=PRICE, patience_s=0.2)
    with pytest.raises(ServerError):
        nowhere.prove()
    assert nowhere.client.journal.spent == 0


def test_paid_answers_are_kept_until_their_shard_is_committed(
    chat: FakeChat, tmp_path: Path
) -> None:
    file, documents = tmp_path / "journal", tokens(DOCUMENTS)
    own = engine(chat, Journal(file, "run"))
    own.begin_shard()
    first = own.label(documents[:4])
    with file.open("ab") as opened:
        opened.write(b'{"key": "cut o')  # — killed while it wrote
    again = engine(chat, Journal(file, "run"))
    again.begin_shard()
    result = again.label(documents[:4])
    assert chat.paid.total() == 8 and result.usage.prefix_tokens_computed == 0
    for one, other in zip(first.log_probs, result.log_probs, strict=True):
        np.testing.assert_array_equal(one, other)
    again.begin_shard()  # — the one before was not committed
    again.label(documents[4:6])
    again.end_shard()
    engine(chat, Journal(file, "run")).label(documents[:6])
    assert chat.paid.total() == 8 + 4 + 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line.get("run") for line in lines} == {"run", ""}
