"""Documents go to other annotation tools, and people's answers come back, each once."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from exchanged import QUESTIONS, TASKS, Exchange, spec_of
from finished import Corpus, finish, toy_fingerprints, toy_spec

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.gold.people import GoldLine, Label, Shown
from pipeline.review.argilla import user_id
from pipeline.review.options import ReviewTool
from pipeline.stores.local import LocalStore

TOOLS: tuple[ReviewTool, ...] = get_args(ReviewTool)
# An answer of each kind, a second one, and an unknown label.
LABELS: dict[str, tuple[Label, Label, Label]] = {
    "topic": ("law", "art", "music"),
    "themes": (("a&b", "e;f"), (), ("music",)),
    "quality": ("-1", "1", "7"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of 90 documents, with answers of a model to the task topic."""
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    rows = [json.loads(line) for line in (corpus.folder / "0.jsonl").read_text().splitlines()]
    rows[0]["text"] = '=1+1, "a"\n<b> ünï &'
    (corpus.folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = LocalStore(tmp_path / "out")
    finish(store, corpus.shards(store), toy_fingerprints())
    return tmp_path


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> ReviewTool:
    tool: ReviewTool = request.param
    return tool


@pytest.fixture(params=LABELS)
def exchange(request: pytest.FixtureRequest, folder: Path, tool: ReviewTool) -> Exchange:
    return Exchange(folder, request.param, tool)


@pytest.fixture
def topic(folder: Path, tool: ReviewTool) -> Exchange:
    return Exchange(folder, "topic", tool)


def documents(exchange: Exchange) -> Iterator[tuple[str, str]]:
    """The ids and the content hashes of some documents of the corpus, the first one included."""
    Exchange(exchange.folder, exchange.task.name, "jsonl").export(documents=88)
    rows = map(json.loads, (exchange.folder / "for-jsonl.jsonl").read_text().splitlines())
    yield from sorted((row["doc_id"], row["content_hash"]) for row in rows)


def answers(exchange: Exchange) -> list[GoldLine]:
    """Two people's answers, skips, flags and an undo."""
    first, second, _ = LABELS[exchange.task.name]
    own = documents(exchange)
    lines = []
    for action, label, by, blind in (
        ("label", first, "ann", False),
        ("label", second, "ann", True),
        ("skip", None, "ann", False),
        ("flag", None, "bob", False),
        ("label", first, "bob", False),
    ):
        p = None if blind else dict.fromkeys(exchange.task.labels, 0.25)
        shown = Shown.of(exchange.task, p=p, fp="f" * 16, blind=blind, chosen="diverse")
        at = f"2026-01-31T09:00:0{len(lines)}.5Z"
        document = *next(own), exchange.task.name
        lines.append(GoldLine(*document, action, label, by, at, 1.25, shown))  # type: ignore[arg-type]
    doc = lines[0]
    other = GoldLine(
        doc.doc_id, doc.content_hash, doc.task, "label", second, "bob", doc.at, 3.0, doc.shown
    )
    return [*lines, other]


def test_people_s_answers_survive_the_way_to_a_file_and_back(exchange: Exchange) -> None:
    gold = answers(exchange)
    exchange.append(*gold)
    exported = exchange.export()
    flags = exchange.tool in ("jsonl", "csv")
    expected = {line for line in map(repr, gold) if flags or "action='flag'" not in line}
    assert (exported.answers, exported.documents) == (len(expected), 4 + flags)
    assert exchange.import_().added == 0
    imported = exchange.import_("other.jsonl")
    assert imported.added == len(expected) and imported.known == 0
    assert set(map(repr, exchange.lines("other.jsonl"))) == expected
    assert exchange.import_("other.jsonl").added == 0
    before = exchange.file.read_bytes()
    exchange.export()
    assert exchange.file.read_bytes() == before


def test_documents_are_answered_in_the_tool_and_imported_once(exchange: Exchange) -> None:
    first, second, _ = LABELS[exchange.task.name]
    exported = exchange.export(documents=10)
    before = exchange.file.read_bytes()
    assert exported.documents == 10 and not (exchange.folder / "gold.jsonl").exists()
    exchange.export(documents=10)
    assert exchange.file.read_bytes() == before
    exchange.answer([first, second, first])
    imported = exchange.import_()
    person = "argilla:ann" if exchange.tool == "argilla" else "ann"
    assert imported.added == 3 and imported.people == {person: 3}
    lines = exchange.lines()
    assert [line.label for line in lines] == [first, second, first]
    assert {line.by for line in lines} == {person}
    assert (exchange.import_().added, exchange.import_().known) == (0, 3)
    # — what is answered is not exported again, and another seed exports others
    drawn = set()
    for seed in (0, 1):
        exchange.export(documents=87, seed=seed)
        text = exchange.file.read_text(encoding="utf-8")
        assert not [line for line in lines if line.content_hash in text]
        exchange.export(documents=5, seed=seed)
        drawn.add(exchange.file.read_bytes())
    assert len(drawn) == 2


def test_the_answers_of_the_model_go_along_and_are_known_to_the_gold_file(
    topic: Exchange,
) -> None:
    exported = topic.export(documents=5)
    assert exported.predictions == 5
    topic.answer(["art"])
    topic.import_()
    (line,) = topic.lines()
    assert line.shown.fp == toy_fingerprints()["topic"].id
    assert line.shown.p is not None and sum(line.shown.p.values()) == pytest.approx(1, abs=2e-6)
    best = max(line.shown.p, key=line.shown.p.__getitem__)
    if topic.tool == "label-studio":
        (prediction,) = json.loads(topic.file.read_text())[0]["predictions"]
        assert prediction["result"][0]["value"] == {"choices": [best]}
    elif topic.tool == "argilla":
        assert json.loads(topic.file.read_text())[0]["suggestions"]["topic"]["value"] == best
    reworded = [{**TASKS[0], "labels": ["law", "art", "sport"]}]
    topic.spec = spec_of(topic.folder, reworded)
    topic.task = topic.spec.tasks[0]
    assert topic.export("new.jsonl", documents=5).predictions == 0


def assert_refused(exchange: Exchange, match: str, gold: str = "gold.jsonl") -> None:
    path = exchange.folder / gold
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(SpecError, match=match) as error:
        exchange.import_(gold)
    place = error.value.problems[0].place
    assert re.search(r"import_file .*, (record|row) \d+", place), place
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_label_that_the_task_does_not_have_is_refused(exchange: Exchange) -> None:
    first, _, unknown = LABELS[exchange.task.name]
    exchange.export(documents=3)
    exchange.answer([first, unknown])
    assert_refused(exchange, "is not a label of task")


def test_an_older_wording_is_refused(topic: Exchange) -> None:
    topic.export(documents=3)
    topic.answer(["art"])
    topic.spec = spec_of(topic.folder, [{**TASKS[0], "question": "What?"}])
    topic.task = topic.spec.tasks[0]
    assert_refused(topic, "has an older wording of task topic")


def test_the_file_of_another_task_is_refused(topic: Exchange, tool: ReviewTool) -> None:
    topic.export(documents=3)
    topic.answer(["art"])
    other = Exchange(topic.folder, "quality", tool)
    assert_refused(other, "is of task topic; name it: --task topic")


def test_documents_of_another_corpus_are_refused(topic: Exchange) -> None:
    topic.export(documents=3)
    topic.answer(["art"])
    Corpus(topic.folder / "in", topic.folder / "cache").write(seed=7)
    assert_refused(topic, "1 of its 1 documents are not in the input")
    with pytest.raises(SpecError, match="1 of its 1 documents are not in the input"):
        topic.append(
            GoldLine(
                "x",
                "y",
                "topic",
                "skip",
                None,
                "ann",
                "2026-01-31T09:00:00Z",
                1,
                Shown.of(topic.task),
            )
        )
        topic.export()


def test_two_answers_of_one_person_are_refused(topic: Exchange) -> None:
    topic.export(documents=3)
    plain = topic.file.read_bytes()
    topic.answer(["art", "law"])
    topic.import_()
    topic.file.write_bytes(plain)
    topic.answer(["law"])
    assert_refused(topic, "has answered this document with art already")
    if topic.tool in ("label-studio", "argilla"):  # — in one file
        topic.answer(["art"])
        assert_refused(topic, "has answered this document with law already", "new.jsonl")


def test_an_answer_that_its_person_took_back_is_not_imported_again(topic: Exchange) -> None:
    topic.export(documents=3)
    topic.answer(["art"])
    topic.import_()
    (line,) = topic.lines()
    own = line.doc_id, line.content_hash, line.task
    topic.append(GoldLine(*own, "undo", None, line.by, line.at, 1, line.shown))
    assert topic.import_().added == 0


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no list": (
        lambda records: {"tasks": records},
        "is not a JSON list; (export the project|write it)",
    ),
    "no origin": (lambda records: [{**records[0], "data": {}, "metadata": {}}], "was changed"),
    "no answers": (
        lambda records: [{"data": {}, "metadata": {}}],
        "record 1: has no (annotations|responses)",
    ),
    "no record": (
        lambda records: [*records, 1],
        "record 2: has no (data, annotations|metadata, responses)",
    ),
}


@pytest.mark.parametrize("tool", ["label-studio", "argilla"], indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_another_file_of_the_tool_is_refused(topic: Exchange, change: str) -> None:
    topic.export(documents=1)
    changed, match = CHANGES[change]
    topic.file.write_text(json.dumps(changed(json.loads(topic.file.read_text()))))
    with pytest.raises(SpecError, match=match):
        topic.import_()
    assert not (topic.folder / "gold.jsonl").exists()


@pytest.mark.parametrize("tool", ["jsonl", "csv"], indirect=True)
def test_a_row_without_a_person_needs_the_option(topic: Exchange) -> None:
    topic.export(documents=2)
    topic.answer(["art"], by="")
    assert_refused(topic, "has no person; fill in its column `by`, or add --person NAME")
    assert topic.import_(person="ann").people == {"ann": 1}


@pytest.mark.parametrize("tool", ["csv"], indirect=True)
def test_a_cell_lists_labels_and_no_cell_is_a_formula(folder: Path, tool: ReviewTool) -> None:
    exchange = Exchange(folder, "themes", tool)
    exchange.export(documents=88)
    with exchange.file.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert any(row["text"].startswith("'=1+1") for row in rows)
    assert not [v for row in rows for v in row.values() if v.startswith(("=", "+", "-", "@"))]
    exchange.answer(["a&b; c<d", "-"])
    exchange.import_()
    assert [line.label for line in exchange.lines()] == [("a&b", "c<d"), ()]


@pytest.mark.parametrize("tool", ["label-studio"], indirect=True)
def test_the_labelling_interface_has_the_question_and_the_labels(
    exchange: Exchange,
) -> None:
    exported = exchange.export(documents=1)
    view = ElementTree.fromstring(Path(exported.settings).read_text())
    choices = view.find("Choices")
    assert choices is not None and choices.get("name") == exchange.task.name
    assert choices.get("choice") == ("multiple" if exchange.task.kind == "multi" else "single")
    assert [choice.get("value") for choice in choices] == list(exchange.task.labels)
    header = view.find("Header")
    assert header is not None and header.get("value") == QUESTIONS[exchange.task.name]


@pytest.mark.parametrize("tool", ["argilla"], indirect=True)
def test_the_settings_of_a_dataset_have_the_question(exchange: Exchange) -> None:
    settings = json.loads(Path(exchange.export(documents=1).settings).read_text())
    assert [QUESTIONS[exchange.task.name]] == [asked["title"] for asked in settings["questions"]]


@pytest.mark.parametrize("tool", ["argilla"], indirect=True)
def test_drafts_are_not_imported_and_discarded_records_are_skipped(topic: Exchange) -> None:
    topic.export(documents=2)
    records = json.loads(topic.file.read_text())
    user = user_id("ann")
    for record, status in zip(records, ("draft", "discarded"), strict=True):
        response = {"value": "art", "user_id": user, "status": status}
        record["responses"] = {"topic": [response]}
    topic.file.write_text(json.dumps(records))
    topic.import_()
    assert [(line.action, line.by) for line in topic.lines()] == [("skip", f"argilla:{user}")]


def test_the_command_exports_and_imports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = folder / "spec.json"
    spec.write_text(json.dumps(toy_spec(folder, tasks=TASKS)))
    review = ["review", str(spec), "--task", "topic", "--to", str(folder / "gold.jsonl")]
    out = str(folder / "a.jsonl")
    export = [*review, "--export", out, "--as", "jsonl", "--documents", "2"]
    assert main(export) == 0
    assert "documents" in capsys.readouterr().out
    assert main(export) == 2
    assert "--export: exists; write another name, or add --overwrite" in capsys.readouterr().err
    assert main([*review, "--export", out, "--as", "csv", "--overwrite"]) == 2
    assert "--to: no document has an answer; add --documents N" in capsys.readouterr().err
    rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    rows[0] |= {"label": "art", "by": "ann"}
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*review, "--import", out, "--from", "jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["people"] == {"ann": 1}
    assert main([*review, "--import", out]) == 2
    assert main([*export, "--overwrite", "--blind"]) == 2
    assert "--blind: is an option of the page" in capsys.readouterr().err
    assert main([*review, "--documents", "3"]) == 2
    assert "--export: is missing; this option needs it" in capsys.readouterr().err
    assert main([*review, "--import", out]) == 2
    assert "--from: is missing" in capsys.readouterr().err
    assert main([*review, "--import", str(folder / "none"), "--from", "argilla"]) == 2
    assert "--import: cannot be read: No such file" in capsys.readouterr().err
