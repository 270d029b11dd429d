"""`assay eval`: figures are scikit-learn's of the raw label files, and every row is counted."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished import FILES, ROWS, Corpus, finish
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.gold.labels import read_gold
from pipeline.gold.people import GoldLine, Shown
from pipeline.gold.values import UNLABELLED
from pipeline.options import GoldOptions
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

Row = dict[str, Any]
# As the spec has them, whose YAML is written in order; the label files have them otherwise, and
# columns are found by name.
LABELS = {"toxic": ("clean", "toxic"), "topic": ("art", "law", "sport")}


@dataclass(frozen=True)
class Bench:
    """A spec with a finished output, and gold for some of its documents."""

    spec: Path
    output: Path
    folder: Path
    documents: Sequence[Mapping[str, str]]
    finish_as: Callable[..., int]

    def gold(self, seed: int = 0) -> list[Row]:
        """60 documents of the corpus and 4 others; every fifth has no label for `topic`."""
        source = random.Random(seed)
        rows: list[Row] = []
        others = [{"id": f"other-{n}", "text": f"another text {n}"} for n in range(4)]
        for number, document in enumerate([*source.sample(self.documents, 60), *others]):
            topic = None if number % 5 == 0 else source.choice(LABELS["topic"])
            rows.append({**document, "toxic": source.choice(LABELS["toxic"]), "topic": topic})
        return rows

    def write(self, rows: Sequence[Row], name: str = "gold.jsonl") -> str:
        path = self.folder / name
        if name.endswith(".csv"):
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    def evaluate(self, gold: str, *options: str) -> int:
        return main(["eval", str(self.spec), "--gold", gold, "--resamples", "20", *options])

    def answers(self, task: str) -> dict[str, Row]:
        """The raw label files' rows by document, read with DuckDB."""
        rows = duckdb.sql(f"from '{self.output}/labels/{task}/*/*/*.parquet'").to_arrow_table()
        return {row["doc_id"]: row for row in rows.to_pylist()}


@pytest.fixture
def bench(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    cache = tmp_path / "cache"
    monkeypatch.setenv("ASSAY_CACHE", str(cache))
    corpus = Corpus(tmp_path / "corpus", cache)
    corpus.write()

    def spec(**changes: Any) -> Path:
        return write_spec(input={"path": str(corpus.folder), "id": "id"}, **changes)

    def finish_as(**changes: Any) -> int:
        written = load_spec(spec(**changes))
        job = make_job(written, Placement("cpu", "float32", 1, 1), cache)
        store = LocalStore(Path(written.output))
        return finish(store, corpus.shards(store), job.fingerprints, written.name)

    assert finish_as() == 1
    files = [(corpus.folder / f"{n}.jsonl").read_text() for n in range(FILES)]
    lines = [line for file in files for line in file.splitlines()]
    return Bench(spec(), tmp_path / "out", tmp_path, list(map(json.loads, lines)), finish_as)


@pytest.mark.parametrize("name", ["gold.csv", "gold.jsonl", "gold.parquet"])
@pytest.mark.parametrize("by", ["id", "text"])
def test_scores_are_those_of_the_raw_files_and_every_row_is_counted(
    name: str, by: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = bench.gold()
    empty = [row for row in gold if not row["text"].strip()]
    if by == "text":  # three documents of one text are one; a row without any names no document
        gold = [{k: v for k, v in row.items() if k != "id"} for row in gold if row not in empty]
        empty = []
    assert by == "text" or empty
    assert bench.evaluate(bench.write(gold, name), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gold"]["joined_by"] == {"id": "doc_id", "text": "content_hash"}[by]
    assert report["gold"]["documents"] == len(gold) and report["corpus_rows"] == FILES * ROWS
    assert report["gold"]["in_corpus"] == len(gold) - 4 and report["without_gold"] == []
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
        raw = {name: f["value"] for name, f in scored["versions"]["raw"]["headlines"].items()}
        assert raw["accuracy"] == pytest.approx(accuracy_score(truth, p.argmax(axis=1)))
        assert raw["f1"] == pytest.approx(f1_score(truth, p.argmax(axis=1), average="macro"))
        if task == "toxic":
            assert raw["auroc"] == pytest.approx(roc_auc_score(np.equal(truth, 0), p[:, 0]))


def test_gates_decide_the_exit_code_after_the_report(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = bench.write(bench.gold())
    assert bench.evaluate(gold, "--gate", "toxic.f1 >= 0", "--gate", "topic.ece <= 1") == 0
    gates = ["--gate", "toxic.f1 >= 0", "--gate", "toxic.auroc > 0.99"]
    assert bench.evaluate(gold, *gates, "--precision", "0.5") == 1
    shown = capsys.readouterr().out
    assert "macro F1" in shown and "FAILED: toxic.auroc > 0.99 (it is 0." in shown
    assert bench.evaluate(gold, "--gate", "toxic.f1 => 0.8") == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and err.startswith("--gate: write TASK.METRIC")
    assert bench.evaluate(gold, "--gate", "toxic.calibrated.f1 >= 0.8") == 2
    assert "toxic has no calibrated answers; it has raw" in capsys.readouterr().err
    assert bench.evaluate(gold, "--task", "topic", "--gate", "toxic.f1 >= 0.8") == 2


def test_gold_may_have_other_column_names_and_values(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench.gold()
    assert bench.evaluate(bench.write(rows), "--task", "toxic", "--json") == 0
    plain = json.loads(capsys.readouterr().out)["tasks"]
    renames = {"toxic": "a=b", "clean": 0}
    renamed = [{"doc": row["id"], "rude": renames[row["toxic"]]} for row in rows]
    options = [
        "--id",
        "doc",
        "--column",
        "toxic=rude",
        "--value",
        "a=b=toxic",
        "--value",
        "0=clean",
    ]
    assert bench.evaluate(bench.write(renamed, "other.csv"), *options, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tasks"].keys() == {"toxic"} and report["without_gold"] == ["topic"]
    for each in plain["toxic"]["mislabelled"]:
        each["text"] = None  # this gold has none
    assert report["tasks"] == plain


def test_each_problem_with_gold_is_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench.gold()

    def lines(changed: Sequence[Row], *options: str) -> list[str]:
        assert bench.evaluate(bench.write(changed, "bad.csv"), *options) == 2
        out, err = capsys.readouterr()
        assert not out
        return err.splitlines()

    odd = [{**row, "toxic": "Toxic" if n in (2, 5) else row["toxic"]} for n, row in enumerate(rows)]
    (line,) = lines(odd)
    assert line == (
        f"--gold {bench.folder}/bad.csv, row 3, column toxic: is not a label of task toxic, "
        "which has clean, toxic; write the label that it means, --value Toxic=LABEL, or leave the "
        "task out with --task (rows with it: 2) (got 'Toxic')"
    )
    assert "has no doc, so" not in lines(rows, "--id", "doc")[0]
    assert lines([{**rows[0], "id": ""}])[0].startswith(
        f"--gold {bench.folder}/bad.csv, row 1: has no"
    )
    assert "write --column TASK=COLUMN" in lines([{"id": "1", "rude": "toxic"}])[0]
    assert lines(rows, "--column", "rude=toxic")[0].startswith("--column: the spec has no such")
    twice = ["--column", "toxic=toxic", "--column", "toxic=topic"]
    assert lines(rows, *twice)[0].startswith("--column: one name occurs twice")
    assert lines(rows, "--column", "toxic")[0].startswith("--column: write LEFT=RIGHT")
    assert lines(rows, "--value", "x=rude")[0].startswith("--value: no task has such a label")
    assert lines(rows, "--precision", "90")[0].startswith("--precision: write a share")
    assert bench.evaluate(str(bench.folder / "nowhere.csv")) == 2
    assert bench.evaluate(str(bench.folder / "no-output")) == 2
    err = capsys.readouterr().err
    assert "--gold: there is no such file (got" in err and "nor an output of assay" in err


def test_answers_to_another_question_are_not_evaluated(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = bench.write(bench.gold())
    before = bench.spec.read_text()
    asked = [
        {"name": "toxic", "question": "Ruder?", "labels": {"toxic": ["Yes"], "clean": ["No"]}},
        {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]},
    ]
    assert bench.finish_as(output=str(bench.folder / "elsewhere"), tasks=asked) == 1
    bench.spec.write_text(bench.spec.read_text().replace("elsewhere", "out"))
    assert bench.evaluate(gold) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tasks.toxic: no snapshot of") and "run `assay run`" in line
    # the other task is asked as before, so it can be scored alone
    assert bench.evaluate(gold, "--task", "topic") == 0
    assert bench.finish_as(tasks=asked) == 2
    bench.spec.write_text(before)
    capsys.readouterr()
    assert bench.evaluate(gold, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["snapshot"], report["newest_snapshot"]) == (1, 2)
    assert bench.evaluate(gold) == 0
    assert "not the newest" in capsys.readouterr().out


def test_the_answers_of_another_output_are_gold_with_soft_targets(bench: Bench) -> None:
    spec = load_spec(bench.spec)
    for how, key in ((GoldOptions(), "content_hash"), (GoldOptions(id="doc_id"), "doc_id")):
        gold = read_gold(str(bench.output), spec, how)
        answers = bench.answers("topic")
        assert gold.by == key and gold.rows == sum(bool(a["label"]) for a in answers.values())
        assert gold.repeated == gold.contradictory == 0  # a document without answer teaches nothing
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
    renamed = {"toxic": GoldOptions(columns=(("toxic", "topic"),), tasks=["toxic"])}["toxic"]
    with pytest.raises(
        SpecError,
        match=r"gold: is not a label of task toxic, which .* --value art=LABEL, or leave",
    ):
        read_gold(f"{bench.output}/snapshots/00000001.json", spec, renamed)
    mapping = (("art", "toxic"), ("law", "clean"), ("sport", "clean"))
    mapped = read_gold(
        str(bench.output),
        spec,
        GoldOptions(columns=(("toxic", "topic"),), tasks=["toxic"], values=mapping),
    ).tasks["toxic"]
    assert mapped.soft is not None
    np.testing.assert_allclose(mapped.soft[:, 0], task.soft[:, 1] + task.soft[:, 2])


def test_an_output_evaluated_against_itself_is_correct(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.evaluate(str(bench.output), "--gate", "topic.accuracy >= 1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tasks"]["toxic"]["rows"]["evaluated"] == FILES * (ROWS - 1)
    assert report["tasks"]["toxic"]["mislabelled"] == []


def test_repeated_gold_counts_once_and_of_several_labels_the_most_frequent(bench: Bench) -> None:
    rows = [
        {"id": 1, "toxic": "toxic"},
        {"id": 2, "toxic": "clean"},
        {"id": "1", "toxic": "toxic"},
        {"id": 3, "toxic": "clean"},
        {"id": 3, "toxic": "toxic"},
        {"id": 3, "toxic": "toxic"},
        {"id": 4, "toxic": None},
        {"id": 5, "toxic": "clean"},
        {"id": 5, "toxic": "toxic"},
    ]
    with fsspec.open("memory://gold/some.jsonl", "wt") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    gold = read_gold("memory://gold/some.jsonl", load_spec(bench.spec))
    assert gold.keys == ("1", "2", "3", "4")
    assert gold.tasks["toxic"].truth.tolist() == [1, 0, 1, UNLABELLED]
    assert (gold.repeated, gold.outvoted, gold.texts) == (3, 1, None)
    assert (gold.contradictory, gold.ties) == (2, ("5",))


def test_rows_of_one_document_complete_each_other(bench: Bench) -> None:
    rows = [
        {"id": 1, "toxic": "toxic"},
        {"id": 1, "topic": "art"},
        {"id": 2, "toxic": None, "topic": "law"},
        {"id": 2, "toxic": "clean", "topic": "law"},
        {"id": 3, "toxic": None, "topic": "law"},
        {"id": 3, "toxic": "clean", "topic": "art"},
    ]
    with fsspec.open("memory://gold/parts.jsonl", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    spec = load_spec(bench.spec)
    topic = spec.tasks[0].model_copy(
        update={"name": "topic", "labels": {"art": ("art",), "law": ("law",)}}
    )
    gold = read_gold(
        "memory://gold/parts.jsonl", spec.model_copy(update={"tasks": (spec.tasks[0], topic)})
    )
    assert gold.keys == ("1", "2")
    named = [gold.tasks["toxic"].labels[place] for place in gold.tasks["toxic"].truth]
    assert named == ["toxic", "clean"]
    assert gold.tasks["topic"].truth.tolist() == [0, 1]
    assert (gold.repeated, gold.contradictory) == (2, 2)


def test_gold_of_a_repeated_text_is_evaluated_once(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documents of white space alone, one a file, are of one text and have no answer."""
    rows = [{"text": "  ", "toxic": "clean"}, {**bench.gold()[0]}]
    assert bench.evaluate(bench.write(rows), "--text", "text", "--task", "toxic", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gold"]["repeated_in_corpus"] == FILES - 1 and report["gold"]["in_corpus"] == 2
    assert report["tasks"]["toxic"]["rows"]["unanswered"] == {"empty": 1}
    assert report["tasks"]["toxic"]["rows"]["evaluated"] == 1


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
def test_a_broken_file_of_gold_is_one_line(
    name: str, data: bytes, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bench.folder / name
    path.write_bytes(data)
    assert bench.evaluate(str(path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"assay: --gold: {path}")


def test_a_page_is_that_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "spec.yaml", "--gold", "g.csv", "--html", "page.html"]) == 2
    line = "--html: no such option; assay report --gold writes this page"
    assert capsys.readouterr().err.startswith(line)


def reviewed(bench: Bench, *chosen: str, task: str = "toxic") -> str:
    """A gold file of people's answers to 60 documents, which a review chose for these reasons."""
    spec = load_spec(bench.spec)
    own = next(each for each in spec.tasks if each.name == task)
    rows = [row for row in bench.gold() if row["text"].strip() and row[task]]
    read = documents_from(RawRow(row["text"], row["id"]) for row in rows)
    path = bench.folder / f"{task}.jsonl"
    lines = []
    for number, (row, text_hash) in enumerate(
        zip(rows, read["content_hash"].to_pylist(), strict=True)
    ):
        shown = Shown.of(own, chosen=chosen[number % len(chosen)])
        at = "2026-11-26T00:00:00Z"
        fields = row["id"], text_hash, task, "label", row[task], "ann", at, 1.0, shown
        lines.append(json.dumps(asdict(GoldLine(*fields))))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    "chosen",
    [("uncertain",), ("near:0.8",), ("disagreement",), ("diverse", "uncertain", "random")],
)
def test_gold_that_was_chosen_because_it_is_hard_is_named_and_never_gated_on(
    bench: Bench, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...]
) -> None:
    gold = reviewed(bench, *chosen)
    assert bench.evaluate(gold) == 0
    printed = capsys.readouterr().out
    assert printed.count("warning: toxic: a review chose these documents not at random (") == 1
    assert f"{chosen[0]} " in printed and "labels that people gave to documents of a re" in printed
    assert bench.evaluate(gold, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["toxic"]["gold"] == "chosen"
    for gate in ("toxic.accuracy >= 0", "toxic.ece <= 1", "toxic.recall.toxic >= 0"):
        assert bench.evaluate(gold, "--gate", gate) == 2
        captured = capsys.readouterr()
        [line] = captured.err.splitlines()
        assert line.startswith(f"--gate: a review chose the documents of {gold} not at random (")
        assert "assay review --by random, or --by audit" in line and not captured.out
    # — a run with gates refuses them before any work
    words = ["run", str(bench.spec), "--gold", gold, "--gate", "toxic.accuracy >= 0"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("--gate: a review chose the documents of ")


def test_gold_of_random_documents_is_gated_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = reviewed(bench, "random")
    assert bench.evaluate(gold, "--gate", "toxic.accuracy >= 0") == 0
    assert "not at random" not in capsys.readouterr().out


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_a_calibration_to_chosen_gold_says_so(
    bench: Bench, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    words = ["calibrate", str(bench.spec), "--task", "toxic", "--method", method]
    for chosen, number in (("uncertain", 1), ("random", 0)):
        caplog.clear()
        to = str(bench.folder / f"{chosen}.json")
        assert main([*words, "--gold", reviewed(bench, chosen), "--to", to]) == 0
        lines = [line for line in caplog.messages if "so the calibration suits them" in line]
        assert len(lines) == number


@pytest.mark.parametrize(
    ("votes", "label"),
    [
        ("tt", "toxic"),
        ("ttc", "toxic"),
        ("ctc", "clean"),
        ("cctct", "clean"),
        ("tc", None),
        ("ctct", None),
    ],
)
def test_people_who_disagree_are_kept_by_majority_and_shown(
    bench: Bench, capsys: pytest.CaptureFixture[str], votes: str, label: str | None
) -> None:
    rows = bench.gold()[:40]
    names = {"t": "toxic", "c": "clean"}
    several = [{**rows[0], "toxic": names[vote]} for vote in votes]
    path = bench.write([*several, *rows[1:]])
    gold = read_gold(path, load_spec(bench.spec))
    assert (rows[0]["id"] in gold.keys) == (label is not None)
    assert gold.rows == 39 + (label is not None)
    if label is not None:
        task = gold.tasks["toxic"]
        assert task.labels[task.truth[gold.keys.index(rows[0]["id"])]] == label
    assert bench.evaluate(path) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("1 documents have several labels; the one that most" in shown) == (
        label is not None and len(set(votes)) > 1
    )
    assert (f"whose labels are a tie: {rows[0]['id']}" in shown) == (label is None)
    assert bench.evaluate(path, "--json") == 0
    written = json.loads(capsys.readouterr().out)["gold"]
    assert written["ties"] == ([] if label else [rows[0]["id"]])


def test_three_people_are_three_votes(bench: Bench) -> None:
    """A gold file of a review has a row for each person."""
    path = Path(reviewed(bench, "random"))
    [first, *others] = map(json.loads, path.read_text().splitlines())
    labels = ["toxic", "clean", "toxic"]
    of_people = [{**first, "by": str(n), "label": label} for n, label in enumerate(labels)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*of_people, *others]))
    gold = read_gold(str(path), load_spec(bench.spec))
    task = gold.tasks["toxic"]
    assert gold.outvoted == 1 and not gold.ties and gold.rows == len(others) + 1
    assert task.labels[task.truth[gold.keys.index(first["content_hash"])]] == "toxic"
