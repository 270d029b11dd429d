"""`assay review` refuses wrong options before it reads documents, and loads no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calls import Assay, WriteSpec
from known_corpus import Known

from pipeline.errors import SpecError
from pipeline.options import ReviewOptions
from pipeline.review.server import listen
from pipeline.review.session import DIVERSE, Session
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec, parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.verbs.review import open_review, reviewed


def spec_of(known: Known, **changes: Any) -> JobSpec:
    """The spec of the corpus, without a filter."""
    content = {**known.content(), **changes}
    return parse_spec(json.dumps({key: content[key] for key in content if key != "filter"}))


def labels(session: Session, times: int, label: str = "clean") -> list[dict[str, Any]]:
    """Gives labels; returns the lines that they are."""
    for _ in range(times):
        asked = session.open_document("ann")
        assert asked is not None
        session.answer("ann", session.pool.documents[asked.row].hash, "label", label)
    return [{"doc_id": line.doc_id, "shown": line.shown} for line in session.gold.lines[-times:]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--task tone", "--task: the spec has no such task; it has toxic, topic (got 'tone')"),
        ("--by most", "--by: "),
        ("--by audit --where true", "--where: a part of an audit's sample is no sample"),
        ("--by audit", "--task: an audit labels drop or keep for the filter, not for a task"),
        ("--port 0", "--port: write a number above 0 (got 0)"),
        ("--host 0.0.0.0", "--host: write the address or name under which others reach"),
        ("--to gold.csv", "--to: end the name in .jsonl (got 'gold.csv')"),
        ("--to s3://bucket/gold.jsonl", "--to: people's labels are written to a local file"),
    ],
)
def test_a_wrong_option_is_one_line_and_no_file_is_made(
    words: str,
    line: str,
    write_spec: WriteSpec,
    assay: Assay,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "review", write_spec(), "--task", "toxic", "--to", "gold.jsonl"
    assert assay(*command, *words.split(), code=2).error.startswith(line)
    assert not list(tmp_path.glob("gold*"))


def test_a_port_in_use_is_one_line_before_any_document_is_read(
    write_spec: WriteSpec, assay: Assay, tmp_path: Path
) -> None:
    command = "review", write_spec(), "--task", "toxic", "--to", tmp_path / "gold.jsonl"
    (tmp_path / "corpus.jsonl").unlink()
    with listen("127.0.0.1", None) as own:
        port = own.getsockname()[1]
        error = assay(*command, "--port", port, code=2).error
    assert error.startswith("--port: cannot be opened (") and error.endswith(f"(got {port})")


def test_images_and_a_corpus_without_texts_are_refused(
    write_spec: WriteSpec, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.jsonl"
    spec = load_spec(write_spec(input={"path": str(file), "id": "id"}))
    source = spec.input.model_copy(update={"image": "picture"})
    with pytest.raises(SpecError, match=r"^input.image: a review shows texts"):
        opened(spec.model_copy(update={"input": source}), tmp_path, task="toxic")
    file.write_text('{"id": "a", "text": " "}\n')
    with pytest.raises(SpecError, match=r"^input.path: no document that was drawn has a text"):
        opened(spec, tmp_path, task="toxic")


def opened(spec: Any, folder: Path, times: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The lines of labels of a review that is opened and ended."""
    own = ReviewOptions(**{"task": "toxic", "to": str(folder / "gold.jsonl"), **options})
    with open_review(spec, own, cache_dir=folder / "cache") as session:
        return labels(session, times)


@pytest.mark.parametrize(
    "answers",
    [
        {"cascade": {"stages": [{"question": "Rude?"}, {"question": "Sure?"}]}},
        {"question": None, "readout": "readout.safetensors"},
        {"classifier": {"kind": "onnx", "path": "model.onnx"}},
    ],
)
def test_the_task_may_be_of_any_reader(
    answers: dict[str, Any], known: Known, tmp_path: Path
) -> None:
    content = known.content()
    kept = {name: value for name, value in answers.items() if value is not None}
    content["tasks"][0] = {"name": "toxic", "labels": ["toxic", "clean"], **kept}
    [line] = opened(spec_of(known, tasks=content["tasks"]), tmp_path, 1)
    assert line["shown"].chosen == "random"


def test_stored_answers_are_shown_and_decide_after_the_diverse_documents(
    known: Known, tmp_path: Path
) -> None:
    lines = opened(spec_of(known), tmp_path, DIVERSE + 2)
    assert [line["shown"].chosen for line in lines[-2:]] == ["uncertain", "random"]
    for line in lines:
        expected = known.p["toxic"][int(line["doc_id"])]
        assert [*line["shown"].p.values()] == pytest.approx(expected.tolist())
        assert line["shown"].fp == Fingerprint({"task": "toxic"}).id
    margins = {str(n): abs(p[0] - p[1]) for n, p in enumerate(known.p["toxic"][:560])}
    diverse = {line["doc_id"] for line in lines[:DIVERSE]}
    assert margins[lines[-2]["doc_id"]] == min(
        margin for doc_id, margin in margins.items() if doc_id not in diverse
    )


def test_a_task_of_the_output_may_be_gone_from_the_spec(known: Known, tmp_path: Path) -> None:
    tasks = [task for task in known.content()["tasks"] if task["name"] == "toxic"]
    [line] = opened(spec_of(known, tasks=tasks), tmp_path, 1)
    assert line["shown"].p is not None


def test_columns_of_the_input_are_beside_the_text(write_spec: WriteSpec, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    spec = load_spec(str(write_spec()))
    rows = [
        {"id": str(n), "text": f"text {n}", "source": f"s{n}", "year": n or None} for n in range(5)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ReviewOptions(str(tmp_path / "gold.jsonl"), "toxic", columns=("source", "year"))
    with open_review(spec, options, cache_dir=tmp_path / "cache") as session:
        shown = {document.text: document.columns for document in session.pool.documents}
    with pytest.raises(SpecError, match=r"^columns: the first 100,000 rows .* \(got 'year'\)$"):
        file.write_text(
            "".join(f'{{"id": "{n}", "text": "text {n}", "source": "a"}}\n' for n in range(5))
        )
        opened(spec, tmp_path / "other", columns=("source", "year"))
    assert shown == {f"text {n}": {"source": f"s{n}", "year": str(n or "")} for n in range(5)}


def test_where_shows_only_documents_that_the_condition_accepts(
    known: Known, tmp_path: Path
) -> None:
    where = "toxic.p.toxic > .9 and language.label = 'French'"
    expected = {
        text
        for text, p, language in zip(
            known.texts, known.p["toxic"], known.p["language"], strict=True
        )
        if p[0] > 0.9 and language.argmax() == 2
    }
    options = ReviewOptions(str(tmp_path / "gold.jsonl"), "toxic", where=where)
    with open_review(spec_of(known), options, cache_dir=tmp_path / "cache") as session:
        assert {document.text for document in session.pool.documents} == expected
        assert {line["shown"].chosen for line in labels(session, len(expected))} == {"where"}
        result = reviewed(session)
    assert (result.labels, result.by_label) == (len(expected), {"toxic": 0, "clean": len(expected)})


@pytest.mark.parametrize(
    "options", [{"task": "toxic", "where": "doc.source <> 'web'"}, {"order": "audit"}]
)
def test_columns_of_the_input_are_in_a_condition_and_beside_labelled_texts(
    options: dict[str, Any], known: Known, tmp_path: Path
) -> None:
    own = ReviewOptions(str(tmp_path / "gold.jsonl"), columns=("source",), **options)
    spec = known.spec(keep="toxic.p.toxic < 0.5")
    with open_review(spec, own, cache_dir=tmp_path / "cache") as session:
        shown = {int(each.doc_id): each.columns["source"] for each in session.pool.documents}
    assert shown and all(source == known.sources[number] for number, source in shown.items())
    assert ("web" in shown.values()) == ("where" not in options)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("toxic.p.toxic > 2", "where: accepts no document of snapshot 1"),
        ("tone.p.toxic > .5", "where: "),
        ("toxic.p.toxic >", "where: "),
    ],
)
def test_a_condition_that_accepts_nothing_or_is_wrong_is_refused(
    where: str, message: str, known: Known, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        opened(spec_of(known), tmp_path, where=where)


def test_the_same_command_goes_on_and_a_file_of_another_corpus_is_refused(
    known: Known, write_spec: WriteSpec, tmp_path: Path
) -> None:
    first = opened(spec_of(known), tmp_path, 3)
    second = opened(spec_of(known), tmp_path, 3, seed=5)
    assert len({line["doc_id"] for line in first + second}) == 6
    other = {"path": str(write_spec().parent / "corpus.jsonl")}
    spec = spec_of(known, input=other, output=str(tmp_path / "other"))
    with pytest.raises(SpecError, match=r"^to: 6 of its 6 documents are not in the input"):
        opened(spec, tmp_path)
