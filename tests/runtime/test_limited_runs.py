"""A run with a condition labels some documents, keeps its answers, and hides no fuller snapshot.

`test_histories` has the law of the runs after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import Assay
from changing_corpus import TOPIC, Corpus, numbered
from reports import printed

from pipeline.errors import SpecError
from pipeline.filters.run import filter_corpus
from pipeline.hashes import short_hash
from pipeline.integrity.diff import compare
from pipeline.ledger.snapshots import contents
from pipeline.options import ExportOptions, FilterOptions
from pipeline.report.run import show_run
from pipeline.runtime.conditions import limit_of
from pipeline.verbs.export import export, head
from pipeline.verbs.run import RunResult
from pipeline.verbs.status import TaskStatus, status


def in_sample(text: str, share: float) -> bool:
    """The model of a sample: the hash of the text as a number of 128 bits, below the share."""
    return int(short_hash(text.encode()), 16) < share * 2**128


def years(texts: Sequence[str]) -> list[int]:
    return [2000 + row % 10 for row in range(len(texts))]


def write(corpus: Corpus, name: str, count: int) -> list[str]:
    """Writes a file of documents with years; their texts."""
    texts = numbered(name, count)
    corpus.write(name, texts, year=years(texts))
    return texts


@pytest.mark.parametrize(
    "text, share",
    [("1%", "0.01"), ("0.5%", "0.005"), (".01", "0.01"), ("0.010", "0.01"), (" 10 %", "0.1")],
)
def test_equal_shares_are_one_condition(text: str, share: str) -> None:
    assert limit_of(text, None) == f"sample < {share}"
    assert limit_of(text, "a = 1 -- b") == f"sample < {share} AND (a = 1)"


@pytest.mark.parametrize("text", ["0", "1", "100%", "50", "-1%", "1e-3", "some", "", "101%", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="sample: write a share above 0 and below 1"):
        limit_of(text, None)


def test_a_condition_names_no_draw() -> None:
    with pytest.raises(SpecError, match="where: write a condition on the input's columns"):
        limit_of(None, "__draw < 0.1")


def test_a_sample_is_published_until_a_more_complete_snapshot_is_current(plain: Corpus) -> None:
    plain.shard_bytes = 15_000
    write(plain, "a", 60)
    small = plain.run(sample="10%", where="year >= 2000")
    assert (small.snapshot, small.kept) == (1, None)
    large = plain.run(sample="60%")
    assert (large.snapshot, large.kept) == (2, None)
    again = plain.run(sample="10%")
    assert again.complete and (again.snapshot, again.kept) == (None, 2)
    assert plain.run(sample="60%").snapshot == 2
    full = plain.run()
    assert full.snapshot == 3 and len(plain.rows()) == 60
    write(plain, "b", 20)  # the whole is no longer complete
    hidden = plain.run(sample="60%")
    assert hidden.complete and (hidden.snapshot, hidden.kept) == (None, 3)
    forced = plain.run(sample="60%", publish_partial=True)
    assert forced.snapshot == 4 and len(asked(plain)) == forced.asked


def asked(corpus: Corpus) -> list[str]:
    """The documents of the current snapshot that were asked about."""
    return [name for name, row in corpus.rows().items() if row["status"] != "skipped"]


def test_documents_of_tasks_that_all_have_conditions_are_counted_once(plain: Corpus) -> None:
    write(plain, "a", 60)
    plain.task |= {"when": "doc.year < 2003"}
    plain.others = [{**TOPIC, "when": "doc.year >= 2002 and doc.year < 2005"}]
    outcome = plain.run(where="year <> 2001")
    years_asked = 4  # 2000, and 2002 to 2004; 2002 by both tasks
    shown = contents(plain.store)
    assert outcome.asked == shown.asked == 6 * years_asked
    assert (shown.rows, shown.missing_rows) == (60, 60 - 6 * years_asked)
    to = plain.folder / "table.parquet"
    assert export(plain.spec, ExportOptions(str(to)), cache_dir=plain.cache).rows == shown.asked
    assert pq.read_metadata(to).num_rows == shown.asked


def test_a_column_that_only_later_rows_have_is_null_before(plain: Corpus) -> None:
    texts = numbered("a", 20)
    languages = ["de" if row % 2 else 7 for row in range(20)]  # mixed types compare as strings
    plain.write("a", texts, year=years(texts), lang=languages)
    lines = (plain.input / "a.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[:5]:
        del row["lang"]
    (plain.input / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    outcome = plain.run(where="doc.lang = 'de' or year = 2000")
    expected = [row["id"] for row in rows if row.get("lang") == "de" or row["year"] == 2000]
    assert asked(plain) == expected and outcome.asked == len(expected)


def test_a_late_row_on_which_a_condition_fails_ends_no_run_and_is_counted(plain: Corpus) -> None:
    texts = numbered("a", 140)
    plain.write("a", texts, year=[*(str(2000 + row % 10) for row in range(130)), *["n/a"] * 10])
    outcome = plain.run(where="cast(year as int) = 2003")
    assert outcome.complete and outcome.asked == 13
    result = RunResult.of(outcome)
    assert result.documents_undecided == outcome.tally.n["undecided",] == 10
    assert "a condition fails on 10 documents" in printed(show_run, result)


def test_a_wrong_condition_is_refused_before_any_work(plain: Corpus) -> None:
    write(plain, "a", 40)
    with pytest.raises(SpecError, match=r"^where.*is int64, not a boolean"):
        plain.run(where="year")
    assert {item.key.partition("/")[0] for item in plain.store.list("")} <= {"inputs"}


def test_a_plan_counts_what_samples_leave(plain: Corpus) -> None:
    for name in "ab":
        plain.write(name, ["", *numbered(name, 60)])
    for sample in ("10%", "40%"):
        assert plain.run(sample=sample).complete
    planned = plain.plan()
    asked = plain.run().tally.n.asked
    # — an empty document outside the samples may count as one to ask about
    assert 0 < asked <= planned.rows_for_model <= min(120 - 30, asked + 2)


def test_status_counts_the_answers_of_runs_with_conditions(plain: Corpus) -> None:
    texts = write(plain, "a", 60)
    plain.run(sample="50%")
    plain.run(where="year = 2003")
    either = sum(
        in_sample(text, 0.5) or year == 2003 for text, year in zip(texts, years(texts), strict=True)
    )
    counted = status(plain.spec, cache_dir=plain.cache)
    assert counted.limit == "sample < 0.5"
    assert counted.documents == 60
    # — of a shard with answers of several runs, the one with most of them is counted
    most = max(sum(in_sample(text, 0.5) for text in texts), years(texts).count(2003))
    assert counted.tasks["toxic"] == TaskStatus(most, 60 - most, 0, 0)
    assert most <= either


def test_other_verbs_read_the_snapshot_of_a_sample(plain: Corpus) -> None:
    write(plain, "a", 30)
    texts = numbered("b", 30)
    table = pa.table({"id": [f"b-{n}" for n in range(30)], "text": texts, "year": years(texts)})
    pq.write_table(table, plain.input / "b.parquet", row_group_size=7)
    plain.files["b"] = texts
    plain.settings = {"filter": {"keep": "toxic.p.toxic > 0.5", "on_error": "keep"}}
    outcome = plain.run(sample="60%", where="year <> 2001")
    inside = {
        name: text
        for name, text in plain.texts.items()
        if in_sample(text, 0.6) and int(name[2:]) % 10 != 1
    }
    assert outcome.asked == len(inside)
    summary = RunResult.of(outcome)
    assert summary.limit == "sample < 0.6 AND (year <> 2001)"
    assert (summary.documents_asked, summary.snapshot) == (len(inside), 1)
    plain.check(texts=inside)
    to, cache = plain.folder / "kept", plain.cache
    filtered = filter_corpus(plain.spec, FilterOptions(to=str(to)), cache_dir=cache)
    assert filtered.documents == len(inside) and not filtered.complete
    rows = {name: row for name, row in plain.rows().items() if row["status"] != "skipped"}
    kept = {name: inside[name] for name, row in rows.items() if row["p"]["toxic"] > 0.5}
    written = [json.loads(line) for f in to.rglob("*.jsonl") for line in f.read_text().splitlines()]
    written += [row for f in to.glob("kept/**/*.parquet") for row in pq.read_table(f).to_pylist()]
    assert {row["id"]: row["text"] for row in written} == kept and len(written) == len(kept)
    exported = plain.folder / "table.parquet"
    export(plain.spec, ExportOptions(str(exported), with_text=True), cache_dir=cache)
    rows_of_table = pq.read_table(exported).to_pylist()
    assert {row["doc_id"]: row["text"] for row in rows_of_table} == inside
    shown = head(plain.spec, ExportOptions(head=100), cache_dir=cache).rows.to_pylist()
    assert {row["doc_id"]: row["_text"] for row in shown} == inside
    plain.run()
    compared = compare(plain.store, contents(plain.store, 1), contents(plain.store, 2))
    assert compared.before == "snapshot 00000001 (sample < 0.6 AND (year <> 2001))"
    assert [*compared.texts.values()] == [0, 60, 0]
    assert all(change.flip_rate == 0 for change in compared.tasks.values())
    assert plain.collect(keep=2) == ()
    removed = plain.collect(keep=1)
    assert removed[0] == "snapshots/00000001.json" and any(
        key.startswith("labels/") for key in removed
    )
    plain.check()
    assert plain.run().snapshot == 2 and not plain.asked


def test_a_sample_is_judged_against_gold_and_reported(
    plain: Corpus, tmp_path: Path, assay: Assay
) -> None:
    """Gold of documents that were not asked about counts as skipped, not as failed."""
    texts = write(plain, "a", 60)
    inside = [in_sample(text, 0.5) for text in texts]
    plain.run(sample="50%")
    lines = ["id,toxic", *(f"a-{row},{'toxic' if row % 3 else 'clean'}" for row in range(60))]
    (tmp_path / "gold.csv").write_text("\n".join(lines))
    judged = assay("eval", plain.spec_file, "--gold", tmp_path / "gold.csv", "--json").json
    task = judged["tasks"]["toxic"]["rows"]
    assert task["evaluated"] == sum(inside)
    assert task["unanswered"] == {"skipped": 60 - sum(inside)}
    page = assay("report", plain.spec_file, "--to", tmp_path / "page.html", "--json").json
    (reported,) = page["tasks"]
    assert reported["answered"] == sum(inside)
