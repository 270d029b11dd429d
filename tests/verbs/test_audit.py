"""Samples for people to label, and the estimates from their labels, on a finished output."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from finished import ROWS, Corpus, finish, toy_fingerprints, toy_spec
from fitted import card_of, write_readout
from judged import with_gold
from sklearn.metrics import precision_score, recall_score

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.ledger.dataset import open_labels
from pipeline.options import AuditOptions
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.verbs.audit import AuditResult, audit
from pipeline.verbs.audit_sample import DrawnSample, draw_sample

RULE = {"keep": "toxic.p.toxic < 0.6"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ninety documents, of which three have a text that another one has."""
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    file = corpus.folder / "0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for copy, of in ((1, 0), (2, 0), (4, 3)):
        rows[copy]["text"] = rows[of]["text"]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    store = LocalStore(tmp_path / "out")
    finish(store, corpus.shards(store), toy_fingerprints())
    return tmp_path


def spec_of(folder: Path, **changes: Any) -> JobSpec:
    return parse_spec(json.dumps(toy_spec(folder, **{"filter": RULE, **changes})))


def draw(folder: Path, name: str = "sample.csv", **options: Any) -> DrawnSample:
    named = AuditOptions(to=str(folder / name), **options)
    return draw_sample(spec_of(folder), named, cache_dir=folder / "cache")


def judge(
    folder: Path,
    spec: JobSpec | None = None,
    gold: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AuditResult:
    named = AuditOptions(gold=str(folder / "sample.csv"), **options)
    judged = with_gold(spec or spec_of(folder), **gold)
    return audit(judged, named, cache_dir=folder / "cache")


def design_of(folder: Path, name: str) -> dict[str, Any]:
    """The sample's design in the output."""
    design: dict[str, Any] = json.loads((folder / "out" / "audits" / f"{name}.json").read_text())
    return design


def write(folder: Path, rows: Sequence[Mapping[str, str]], name: str = "sample.csv") -> None:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def is_toxic(text: str) -> bool:
    """What people would say: a rule that no score follows; of equal texts the same."""
    return sum(text.encode()) % 3 == 0


def fill(folder: Path, name: str = "sample.csv") -> list[dict[str, str]]:
    """Labels every row of the sample, as people would."""
    path = folder / name
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["toxic"] = "toxic" if is_toxic(row["_text"]) else "clean"
    write(folder, rows, name)
    return rows


def documents(folder: Path) -> pa.Table:
    """All answered documents with what people would say and what the filter does."""
    texts = {
        row["id"]: row["text"]
        for file in (folder / "in").glob("*.jsonl")
        for row in map(json.loads, file.read_text().splitlines())
    }
    labels = open_labels(str(folder / "out")).to_table()
    ids = labels.column("doc_id").to_pylist()
    positive = pa.array([is_toxic(texts[id]) for id in ids])
    told = labels.append_column("positive", positive)  # noqa: F841 — DuckDB reads it by name
    return duckdb.sql(
        """select positive, toxic.p.toxic >= 0.6 as dropped, topic.label as topic, content_hash
        from told where toxic.status = 'ok' and status = 'ok'"""
    ).to_arrow_table()


def test_a_sample_of_all_texts_gives_what_scikit_learn_counts(folder: Path) -> None:
    drawn = draw(folder, documents=1_000)
    told = documents(folder)
    assert drawn.drawn == drawn.texts == len(set(told["content_hash"].to_pylist()))
    fill(folder)
    result = judge(folder, by=("topic",))
    y, d = (told[name].to_numpy(zero_copy_only=False) for name in ("positive", "dropped"))
    topics = np.array([t or "null" for t in told["topic"].to_pylist()])
    for estimates, rows in (
        ({n: getattr(result, n) for n in ("precision", "recall", "prevalence")}, y == y),
        *((result.groups[topic], topics == topic) for topic in set(topics)),
    ):
        assert estimates["prevalence"].estimate == pytest.approx(y[rows].mean())
        if d[rows].any():
            assert estimates["precision"].estimate == pytest.approx(
                precision_score(y[rows], d[rows])
            )
        if y[rows].any():
            assert estimates["recall"].estimate == pytest.approx(recall_score(y[rows], d[rows]))
    assert result.precision.low == result.precision.high == result.precision.estimate


def test_the_same_options_draw_the_same_sample_which_shows_no_decision(folder: Path) -> None:
    drawn = draw(folder, documents=40)
    first = (folder / "sample.csv").read_text()
    draw(folder, "again.csv", documents=40)
    assert (folder / "again.csv").read_text() == first
    draw(folder, "other.csv", documents=40, seed=1)
    assert (folder / "other.csv").read_text() != first
    rows = fill(folder)
    assert list(rows[0]) == ["doc_id", "_text", "toxic", "content_hash", "_sample"]
    assert len(rows) == drawn.drawn == 40 and drawn.strata > 2
    [name] = {row["_sample"] for row in rows}
    design = design_of(folder, name)
    assert set(design["strata"]) == {row["content_hash"] for row in rows}
    assert sum(design["sizes"].values()) == drawn.texts
    # — three texts of 90 are copies, and three documents are empty
    assert drawn.texts == 3 * ROWS - 3 - sum(drawn.left_out.values())


@pytest.mark.parametrize("name", ["s.jsonl", "s.parquet"])
def test_other_formats_hold_the_same_rows(name: str, folder: Path) -> None:
    draw(folder, documents=30)
    draw(folder, name, documents=30)
    columns = "doc_id, _text, content_hash, _sample"
    csv_rows, others = (
        duckdb.sql(f"select {columns} from '{folder / each}'").fetchall()
        for each in ("sample.csv", name)
    )
    assert csv_rows == others


def test_one_sample_judges_another_threshold(folder: Path) -> None:
    draw(folder, documents=1_000)
    fill(folder)
    looser = spec_of(folder, filter={"keep": "toxic.p.toxic < 0.9"})
    first, second = judge(folder), judge(folder, looser)
    assert first.prevalence == second.prevalence
    assert (first.recall.estimate or 0) > (second.recall.estimate or 0)


def test_rows_without_a_label_and_texts_that_are_gone_are_counted(folder: Path) -> None:
    draw(folder, documents=60)
    rows = fill(folder)
    rows[0]["toxic"] = ""
    gone, rows[1]["content_hash"] = rows[1]["content_hash"], "0" * 32
    write(folder, rows)
    design = folder / "out" / "audits" / f"{rows[0]['_sample']}.json"
    changed = design.read_text().replace(gone, rows[1]["content_hash"])
    design.write_text(changed)
    result = judge(folder)
    assert (result.labels, result.unlabelled, result.not_in_corpus) == (58, 1, 1)


def with_readout(folder: Path, texts: list[str]) -> JobSpec:
    """The spec with a readout that was fitted to these content hashes."""
    path = folder / "toxic.safetensors"
    tasks = toy_spec(folder)["tasks"]
    tasks[0] |= {"readout": str(path)}
    spec = spec_of(folder, tasks=tasks)
    card = card_of(spec, spec.tasks[0], weights={}, dtype="float32", texts=texts)
    write_readout(path, card, hidden=4, layers=[2])
    return spec


def test_texts_that_a_readout_was_fitted_to_are_not_drawn_and_no_evidence(folder: Path) -> None:
    draw(folder, documents=40)
    hashes = [row["content_hash"] for row in fill(folder)]
    spec = with_readout(folder, hashes[:5])
    with pytest.raises(SpecError, match=r"fitted to 5 of its 40 texts"):
        judge(folder, spec)
    options = AuditOptions(to=str(folder / "new.csv"), documents=1_000)
    drawn = draw_sample(spec, options, cache_dir=folder / "cache")
    assert drawn.left_out["answers were fitted to"] == 5
    rows = fill(folder, "new.csv")
    assert not {row["content_hash"] for row in rows} & set(hashes[:5])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"filter": None}, "filter: missing"),
        ({"filter": {"keep": "n_chars > 3"}}, "filter: reads no answer, so people have nothing to"),
    ],
)
def test_a_rule_without_an_answer_to_judge_is_refused(
    change: dict[str, Any], line: str, folder: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        options = AuditOptions(to=str(folder / "s.csv"))
        draw_sample(spec_of(folder, **change), options, cache_dir=folder / "cache")
    assert str(refused.value).startswith(line) and len(str(refused.value).splitlines()) == 1
    assert not (folder / "s.csv").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"documents": 3}, "documents: has no room for two documents of each of"),
        (
            {"positive": "toxic.rude"},
            "positive: the spec has no such task and label; write one of toxic.toxic",
        ),
        ({"by": ("doc.nothing",)}, "by: the first 100 rows of "),
        ({"by": ("topic", "nothing +")}, "by: is not one SQL expression"),
        ({"to": "x.txt"}, "to: end the name of a file"),
        ({"to": "folder/"}, "to: is a folder; name a file"),
        ({"to": "in/0.jsonl"}, "to: is in the input of the spec; name another folder"),
        ({"to": "exists.csv"}, "to: exists; write another name, or add --overwrite"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_is_written(
    options: dict[str, Any], line: str, folder: Path
) -> None:
    (folder / "exists.csv").touch()
    before = sorted(folder.rglob("*"))
    named = {"to": "s.csv", **options}
    with pytest.raises(SpecError) as refused:
        to = AuditOptions(**{**named, "to": str(folder / named["to"])})
        draw_sample(spec_of(folder), to, cache_dir=folder / "cache")
    assert str(refused.value).startswith(line)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda row: row.pop("_sample"), "was not drawn by `assay audit --to`: it has no column"),
        (lambda row: row.pop("content_hash"), "row 1: its content_hash is not one of the sample"),
        (lambda row: row.update(content_hash="0"), "row 1: its content_hash is not one of the sam"),
        (lambda row: row.update(_sample="../x"), "has no design of this sample (_sample ../x)"),
        (lambda row: row.update(_sample="0" * 16), "name the spec whose output the sample was"),
        (lambda row: row.update(_sample=row["doc_id"]), "row 2: the column _sample has another"),
        (lambda row: row.update(toxic="rude"), "is not a label of task toxic"),
        (lambda row: row.update(toxic=""), "no row with the labels that the rule needs; label one"),
    ],
)
def test_a_changed_sample_is_refused(change: Any, line: str, folder: Path) -> None:
    draw(folder, documents=60)
    rows = fill(folder)
    for row in rows:
        change(row)
    write(folder, rows)
    with pytest.raises(SpecError) as refused:
        judge(folder)
    assert line in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_part_of_the_sample_without_labels_is_named_by_its_rows(folder: Path) -> None:
    draw(folder, documents=60)
    rows = fill(folder)
    strata = design_of(folder, rows[0]["_sample"])["strata"]
    empty = [n for n, row in enumerate(rows, 1) if strata[row["content_hash"]] == 1]
    for number in empty:
        rows[number - 1]["toxic"] = ""
    write(folder, rows)
    with pytest.raises(SpecError, match=f"its rows: {', '.join(map(str, empty[:5]))}"):
        judge(folder)


def test_a_file_without_rows_is_refused(folder: Path) -> None:
    (folder / "sample.csv").write_text("content_hash,_sample,toxic\n")
    with pytest.raises(SpecError, match="has no rows"):
        judge(folder)


def test_labels_have_other_columns_and_names_or_are_scores(folder: Path) -> None:
    draw(folder, documents=60)
    rows = fill(folder)
    expected = judge(folder)
    other = {"toxic": "yes", "clean": "no"}
    named = [
        {**row, "toxic": "", "rude": other[row["toxic"]], "s": str(0.9 * (row["toxic"] == "toxic"))}
        for row in rows
    ]
    write(folder, named)
    columns = {"columns": {"toxic": "rude"}, "values": {"yes": "toxic", "no": "clean"}}
    assert judge(folder, gold=columns) == expected
    # — rows of a sample have their own key
    assert judge(folder, gold={"scores": {"toxic": "s"}, "id": "nothing"}) == expected
    with pytest.raises(SpecError, match="columns"):
        judge(folder, gold={"columns": {"toxic": "nothing"}})


def test_the_command_draws_estimates_and_prints_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, sample = str(folder / "spec.yaml"), str(folder / "sample.csv")
    Path(spec).write_text(json.dumps(toy_spec(folder, filter=RULE)))
    assert main(["audit", spec]) == 2
    assert capsys.readouterr().err.startswith(
        "--to, --gold: write --to to draw a sample, or --gold"
    )
    assert main(["audit", spec, "--to", sample, "--documents", "50"]) == 0
    shown = capsys.readouterr().out
    assert "50 of 84 different texts" in shown and "write toxic or clean" in shown
    assert "column toxic" in shown and f"assay audit SPEC --gold {sample}" in " ".join(
        shown.split()
    )
    fill(folder)
    assert main(["audit", spec, "--gold", sample, "--by", "topic"]) == 0
    shown = capsys.readouterr().out
    assert "95 % interval" in shown and "sport" in shown
    assert main(["audit", spec, "--gold", sample, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["labels"] == 50
    assert values["reasons"] == {
        "toxic.p.toxic < 0.6": {
            name: values[name] for name in ("precision", "recall", "prevalence")
        }
    }
    for name in ("precision", "recall", "prevalence"):
        assert values[name]["low"] <= values[name]["estimate"] <= values[name]["high"]
