"""`assay eval`: figures are scikit-learn's of the raw label files, and every row is counted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from finished import FILES, ROWS
from judged import LABELS, Bench, Row, with_gold
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from pipeline.errors import SpecError
from pipeline.gold.labels import Gold, read_gold
from pipeline.gold.values import UNLABELLED
from pipeline.spec.parse import load_spec


@pytest.mark.parametrize(
    ("name", "by"), [("gold.csv", "id"), ("gold.jsonl", "text"), ("gold.parquet", "id")]
)
def test_scores_are_those_of_the_raw_files_and_every_row_is_counted(
    name: str, by: str, bench: Bench
) -> None:
    gold = bench.gold()
    empty = [row for row in gold if not row["text"].strip()]
    if by == "text":  # three documents of one text are one; a row without any names no document
        gold = [{k: v for k, v in row.items() if k != "id"} for row in gold if row not in empty]
        empty = []
    assert by == "text" or empty
    report = bench.evaluate(bench.write(gold, name), "--json").json
    assert report["gold"]["joined_by"] == {"id": "doc_id", "text": "content_hash"}[by]
    assert report["gold"]["documents"] == len(gold) and report["corpus_rows"] == FILES * ROWS
    assert report["in_corpus"] == len(gold) - 4 and report["without_gold"] == []
    ids = {document["text"]: document["id"] for document in bench.documents}
    for task, labels in LABELS.items():
        answers = bench.answers(task)
        labelled = [row for row in gold if row[task]]
        keys = [row.get("id", ids.get(row["text"])) for row in labelled]
        pairs = [
            (row[task], answers[key])
            for row, key in zip(labelled, keys, strict=True)
            if key in answers and answers[key]["label"]
        ]
        scored = report["tasks"][task]
        assert scored["rows"] == {
            "gold": len(gold),
            "unlabelled": len(gold) - len(labelled),
            "not_in_corpus": sum(key not in answers for key in keys),
            "unanswered": {"empty": n} if (n := sum(row in empty for row in labelled)) else {},
            "fitted": 0,
            "evaluated": len(pairs),
        }
        truth = [labels.index(label) for label, _ in pairs]
        p = np.array([[answer["p"][label] for label in labels] for _, answer in pairs])
        raw = {name: f["value"] for name, f in scored["scores"]["headlines"].items()}
        assert raw["accuracy"] == pytest.approx(accuracy_score(truth, p.argmax(axis=1)))
        assert raw["f1"] == pytest.approx(f1_score(truth, p.argmax(axis=1), average="macro"))
        if task == "toxic":
            assert raw["auroc"] == pytest.approx(roc_auc_score(np.equal(truth, 0), p[:, 0]))


def test_gates_decide_the_exit_code_after_the_report(bench: Bench) -> None:
    gold = bench.write(bench.gold())
    bench.set_keys(publish={"gates": ["toxic.f1 >= 0", "topic.brier <= 1"]})
    bench.evaluate(gold)
    bench.set_keys(publish={"gates": ["toxic.f1 >= 0", "toxic.auroc > 0.99"]})
    shown = bench.evaluate(gold, "--precision", 0.5, code=1).out
    assert "macro F1" in shown and "FAILED: toxic.auroc > 0.99 (it is 0." in shown
    # — gates of tasks that are not asked for are not decided; one of a task without gold fails
    of_topic = bench.evaluate(gold, "--task", "topic", "--json").json
    assert (of_topic["gates"], of_topic["without_gold"]) == ([], [])
    assert "no task reads" not in bench.evaluate(gold, "--task", "topic").out
    topics = bench.write([{"id": row["id"], "topic": row["topic"]} for row in bench.gold()])
    shown = bench.evaluate(topics, code=1).out
    assert "FAILED: toxic.f1 >= 0 (not judged: " in shown
    bench.set_keys(publish={"gates": ["toxic.f1 => 0.8"]})
    error = bench.evaluate(gold, code=2).error
    assert error.startswith("publish.gates.0: write TASK.METRIC") and " in " in error


def test_without_gold_the_error_names_the_key(bench: Bench) -> None:
    for verb in ("eval", "fit"):
        error = bench.assay(verb, bench.spec, code=2).error
        assert error.startswith("gold.path: missing; write --gold FILE, or add it in ")


def test_gold_may_have_other_column_names_and_values(bench: Bench) -> None:
    rows = bench.gold()
    plain = bench.evaluate(bench.write(rows), "--task", "toxic", "--json").json["tasks"]
    renames = {"toxic": "a=b", "clean": 0}
    renamed = [{"doc": row["id"], "rude": renames[row["toxic"]]} for row in rows]
    gold = {"id": "doc", "columns": {"toxic": "rude"}, "values": {"a=b": "toxic", "0": "clean"}}
    bench.set_keys(gold={**gold, "path": bench.write(renamed, "other.csv")})
    report = bench.assay("eval", bench.spec, "--json").json
    assert report["tasks"].keys() == {"toxic"} and report["without_gold"] == ["topic"]
    for each in plain["toxic"]["mislabelled"]:
        each["text"] = None  # this gold has none
    assert report["tasks"] == plain


def test_each_problem_with_gold_is_one_line(bench: Bench) -> None:
    rows = bench.gold()

    def line(changed: Sequence[Row], *options: str) -> str:
        return bench.evaluate(bench.write(changed, "bad.csv"), *options, code=2).error

    odd = [{**row, "toxic": "Toxic" if n in (2, 5) else row["toxic"]} for n, row in enumerate(rows)]
    assert line(odd) == (
        f"{bench.folder}/bad.csv, row 3, column toxic: is not a label of task toxic, "
        "which has clean, toxic; write Toxic: LABEL below gold.values, or leave the task out with "
        "--task (rows with it: 2) (got 'Toxic')"
    )
    assert line([{**rows[0], "id": ""}]).startswith(f"{bench.folder}/bad.csv, row 1: has no")
    assert "below gold.columns" in line([{"id": "1", "rude": "toxic"}])
    assert line(rows, "--task", "rude").startswith("--task: the spec has no such task")
    for gold, place in (
        ({"id": "doc"}, f"{bench.folder}/bad.csv: has no column doc to match"),
        ({"columns": {"toxic": "rude"}}, "gold.columns.toxic: "),
        ({"id": "id", "text": "text"}, "gold: rows are matched by id or by text"),
    ):
        bench.set_keys(gold=gold)
        assert line(rows).startswith(place)
    bench.set_keys(gold={})
    assert line(rows, "--precision", "90").startswith("--precision: write a share")
    assert "there is no such file" in bench.evaluate(bench.folder / "nowhere.csv", code=2).error
    assert "nor an output of assay" in bench.evaluate(bench.folder / "no-output", code=2).error


def test_gold_without_a_document_of_the_corpus_judges_nothing_and_shows_ids_of_both(
    bench: Bench,
) -> None:
    others = [row for row in bench.gold() if row["id"].startswith("other-")]
    gold, first = bench.write(others), [row["id"] for row in bench.documents[:2]]
    report = bench.evaluate(gold, "--json", code=1).json
    assert not report["is_judged"] and report["in_corpus"] == 0
    assert report["gold_ids"] == ["other-0", "other-1"] and report["corpus_ids"] == first
    ids = f"it has 'other-0', 'other-1', and the corpus has the ids {first[0]!r}, {first[1]!r}"
    warning = f"warning: no id of the gold is in the corpus: {ids}. Give gold of these"
    assert warning in bench.evaluate(gold, code=1).out
    by_text = bench.write([{name: row[name] for name in ("text", "toxic")} for row in others])
    shown = bench.evaluate(by_text, code=1).out
    assert "no text of the gold is in the corpus, and the corpus has" in shown


def test_a_gold_column_that_no_task_reads_is_named_where_a_task_has_no_gold(bench: Bench) -> None:
    rows = [{**row, "mood": row["topic"]} for row in bench.gold()]
    assert "mood" not in bench.evaluate(bench.write(rows)).out
    rows = [{"id": row["id"], "toxic": row["toxic"], "mood": row["topic"]} for row in rows]
    line = "topic; no task reads the columns mood (write gold: {columns: {topic: COLUMN}})"
    assert line in bench.evaluate(bench.write(rows)).out


def test_answers_to_another_question_are_not_evaluated(bench: Bench) -> None:
    gold, before = bench.write(bench.gold()), bench.spec.read_text()
    bench.spec.write_text(before.replace("Rude?", "Ruder?"))
    changed = "tasks.toxic: question changed since snapshot 1; run: assay run SPEC"
    assert bench.evaluate(gold, code=2).error.startswith(changed)
    # the other task is asked as before, so it can be scored alone
    bench.evaluate(gold, "--task", "topic")
    asked = {"name": "toxic", "question": "Ruder?", "labels": {"toxic": ["Yes"], "clean": ["No"]}}
    topic = {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]}
    assert bench.finish_as(tasks=[asked, topic]) == 2
    bench.spec.write_text(before)
    report = bench.evaluate(gold, "--json").json
    assert (report["snapshot"], report["newest_snapshot"]) == (1, 2)
    assert "not the newest" in bench.evaluate(gold).out


def test_the_answers_of_another_output_are_gold_with_soft_targets(bench: Bench) -> None:
    spec = load_spec(bench.spec)
    for how, key in (({}, "content_hash"), ({"id": "doc_id"}, "doc_id")):
        gold = read_gold(str(bench.output), with_gold(spec, **how))
        answers = bench.answers("topic")
        assert gold.counts.joined_by == key and gold.rows == sum(
            bool(a["label"]) for a in answers.values()
        )
        assert (
            gold.counts.repeated == gold.counts.contradictory == 0
        )  # a document without answer teaches nothing
        task = gold.tasks["topic"]
        assert task.soft is not None
        answered = [a for a in answers.values() if a["label"]]
        expected = sorted([a["p"][label] for label in LABELS["topic"]] for a in answered)
        assert sorted(task.soft.tolist()) == expected
        assert (task.truth == task.soft.argmax(axis=1)).all()
        if key == "doc_id":
            by_id = dict(zip(gold.keys, task.truth, strict=True))
            assert by_id == {
                name: LABELS["topic"].index(a["label"]) for name, a in answers.items() if a["label"]
            }
    renamed, first = {"columns": {"toxic": "topic"}}, f"{bench.output}/snapshots/00000001.json"
    with pytest.raises(SpecError, match=r"is not a label of task toxic, which .* art: LABEL below"):
        read_gold(first, with_gold(spec, **renamed), ["toxic"])
    values = {"art": "toxic", "law": "clean", "sport": "clean"}
    of_topic = with_gold(spec, **renamed, values=values)
    mapped = read_gold(str(bench.output), of_topic, ["toxic"]).tasks["toxic"]
    assert mapped.soft is not None
    np.testing.assert_allclose(mapped.soft[:, 0], task.soft[:, 1] + task.soft[:, 2])


def test_an_output_evaluated_against_itself_is_correct(bench: Bench) -> None:
    bench.set_keys(publish={"gates": ["topic.accuracy >= 1"]})
    toxic = bench.evaluate(bench.output, "--json").json["tasks"]["toxic"]
    assert toxic["rows"]["evaluated"] == FILES * (ROWS - 1) and toxic["mislabelled"] == []


def gold_of(bench: Bench, rows: Sequence[Mapping[str, Any]]) -> Gold:
    """Gold of these rows, read from another place than a disk."""
    with fsspec.open("memory://gold/some.jsonl", "wt") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    return read_gold("memory://gold/some.jsonl", load_spec(bench.spec))


def test_repeated_gold_counts_once_and_of_several_labels_the_most_frequent(bench: Bench) -> None:
    votes = [(1, "toxic"), (2, "clean"), ("1", "toxic"), (3, "clean"), (3, "toxic"), (3, "toxic")]
    votes += [(4, None), (5, "clean"), (5, "toxic")]
    gold = gold_of(bench, [{"id": id, "toxic": label} for id, label in votes])
    assert gold.keys == ("1", "2", "3", "4", "5")
    assert gold.tasks["toxic"].truth.tolist() == [1, 0, 1, UNLABELLED, UNLABELLED]
    assert (gold.counts.repeated, gold.counts.outvoted, gold.texts) == (4, 1, None)
    assert (gold.counts.contradictory, gold.counts.ties) == (2, ("5",))


def test_rows_of_one_document_complete_each_other_and_a_tie_is_of_its_task_alone(
    bench: Bench,
) -> None:
    rows = [
        {"id": 1, "toxic": "toxic"},
        {"id": 1, "topic": "art"},
        {"id": 2, "toxic": None, "topic": "law"},
        {"id": 2, "toxic": "clean", "topic": "law"},
        {"id": 3, "toxic": None, "topic": "law"},
        {"id": 3, "toxic": "clean", "topic": "art"},
    ]
    gold = gold_of(bench, rows)
    assert gold.keys == ("1", "2", "3")
    for task, labels in (("toxic", ["toxic", "clean", "clean"]), ("topic", ["art", "law", None])):
        of = gold.tasks[task]
        assert [None if at == UNLABELLED else of.labels[at] for at in of.truth] == labels
    assert (gold.counts.repeated, gold.counts.contradictory, gold.counts.outvoted) == (3, 2, 0)


def test_gold_of_a_repeated_text_is_evaluated_once(bench: Bench) -> None:
    """The documents of white space alone, one a file, are of one text and have no answer."""
    bench.set_keys(gold={"text": "text"})
    gold = bench.write([{"text": "  ", "toxic": "clean"}, {**bench.gold()[0]}])
    report = bench.evaluate(gold, "--task", "toxic", "--json").json
    assert report["repeated_in_corpus"] == FILES - 1 and report["in_corpus"] == 2
    rows = report["tasks"]["toxic"]["rows"]
    assert (rows["unanswered"], rows["evaluated"]) == ({"empty": 1}, 1)


def test_csv_keeps_quotes_line_breaks_long_texts_and_leading_zeros(bench: Bench) -> None:
    texts = ['a "quoted"\nline, and more', "x" * 3_000_000, "\ufeffmark", "001"]
    rows = [{"text": text, "toxic": "toxic", "id": f"00{n}"} for n, text in enumerate(texts)]
    path = bench.write(rows, "gold.csv")
    Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes())
    gold = read_gold(path, load_spec(bench.spec))
    assert gold.keys == ("000", "001", "002", "003") and gold.texts == tuple(texts)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("g.csv", b"id,toxic\n1,\xff\n"),
        ("g.csv", b"id,toxic\n1,toxic,more\n"),
        ("g.csv", b"id,id\n1,2\n"),
        ("g.jsonl", b'{"id": 1}\n[1]\n'),
        ("g.jsonl", b'{"id": 1'),
        ("g.jsonl.gz", b"not gzip"),
        ("g.parquet", b"PAR1"),
    ],
)
def test_a_broken_file_of_gold_is_one_line(name: str, data: bytes, bench: Bench) -> None:
    path = bench.folder / name
    path.write_bytes(data)
    assert bench.evaluate(path, code=1).error.startswith(f"assay: {path}")
