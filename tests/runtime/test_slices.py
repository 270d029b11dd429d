"""A slice is labelled alone, its answers count later, and it hides no more complete snapshot.

`test_histories` has the law of runs after slices.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from changing_corpus import Corpus, numbered
from counted_runs import Output, Row, corpus
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import FailedRowsError, SpecError
from pipeline.filters.run import filter_corpus
from pipeline.hashes import short_hash
from pipeline.integrity.diff import compare
from pipeline.integrity.gc import collect_garbage
from pipeline.integrity.verify import verify_output
from pipeline.ledger.snapshots import contents
from pipeline.options import ExportOptions, FilterOptions, RunOptions, ShowOptions
from pipeline.runtime.dry_run import dry_run
from pipeline.sources.shards import Slice
from pipeline.stores.local import LocalStore
from pipeline.verbs.export import export
from pipeline.verbs.show import show
from pipeline.verbs.status import TaskStatus, status


def in_sample(row: Row, share: float) -> bool:
    """The model of a sample: the hash of the text as a number of 128 bits, below the share."""
    return int(short_hash(row["text"].encode()), 16) < share * 2**128


SHARES = [0.05, 0.125, 0.5, 0.75]


@given(st.text(max_size=8), st.sampled_from(SHARES), st.sampled_from(SHARES))
def test_a_larger_sample_contains_a_smaller_one(text: str, p: float, q: float) -> None:
    hashed = short_hash(text.encode())
    small, large = (Slice(sample=str(share)).hash_limit for share in sorted((p, q)))
    assert not hashed < small or hashed < large
    assert (hashed < Slice(sample=str(p)).hash_limit) == in_sample({"text": text}, p)


@pytest.mark.parametrize(
    "text, share",
    [("1%", "0.01"), ("0.5%", "0.005"), (".01", "0.01"), ("0.010", "0.01"), (" 10 %", "0.1")],
)
def test_equal_shares_are_one_slice(text: str, share: str) -> None:
    assert Slice.parse(text, None) == Slice(sample=share)


@pytest.mark.parametrize("text", ["0", "1", "100%", "50", "-1%", "1e-3", "some", "", "101%", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="sample: write a share above 0 and below 1"):
        Slice.parse(text, None)


def test_a_slice_is_published_until_a_more_complete_snapshot_is_current(output: Output) -> None:
    output.write(corpus(60))
    small = output.run("10%", "year >= 2000")
    assert (small.snapshot, small.kept) == (1, None)
    large = output.run("60%")
    assert (large.snapshot, large.kept) == (2, None)
    again = output.run("10%")
    assert again.complete and (again.snapshot, again.kept) == (None, 2)
    assert output.run("60%").snapshot == 2
    full = output.run()
    assert full.snapshot == 3 and len(output.labels()) == 60
    output.write(corpus(80))  # the whole is no longer complete
    hidden = output.run("60%")
    assert hidden.complete and (hidden.snapshot, hidden.kept) == (None, 3)
    forced = output.run("60%", publish_partial=True)
    assert forced.snapshot == 4 and len(output.labels()) == forced.slice_rows


def test_a_snapshot_of_a_slice_says_so_and_is_never_complete(output: Output) -> None:
    output.write(corpus(40))
    outcome = output.run(None, "year = 2003")
    path = output.folder / "out" / "snapshots" / "00000001.json"
    snapshot = json.loads(path.read_text())
    assert snapshot["slice"] == {"where": "year = 2003"} and snapshot["complete"] is False
    assert (snapshot["rows"], snapshot["missing_rows"]) == (outcome.slice_rows, 36) == (4, 36)
    assert "sample" not in path.read_text()


def test_a_column_that_only_later_rows_have_is_null_before(output: Output) -> None:
    rows = corpus(20)
    for row in rows[5:]:
        row["lang"] = "de" if row["year"] % 2 else 7  # mixed types compare as strings
    output.write(rows)
    outcome = output.run(None, "lang = 'de' or year = 2000")
    expected = [row["id"] for row in rows if row.get("lang") == "de" or row["year"] == 2000]
    assert [row["doc_id"] for row in output.labels()] == expected
    assert outcome.slice_rows == len(expected)


@pytest.mark.parametrize(
    "where, reason",
    [
        ("years > 3", r"the first \d+ rows of .* have no value in years; name a column"),
        ("year >", "is not one SQL expression"),
        ("year", "is int64, not a boolean"),
        ("true", "names no column of the input"),
        ("  ", "write a condition on the input's columns"),
        ("year in (select 3)", "has a subquery"),
        ("year > 4000 * random()", "random reads the clock, a setting or a random number"),
    ],
)
def test_a_wrong_condition_is_refused_before_any_work(
    output: Output, where: str, reason: str
) -> None:
    output.write(corpus(40))
    with pytest.raises(SpecError, match=rf"^where.*{reason}"):
        output.run(None, where)
    assert not list((output.folder / "out").rglob("*.parquet"))
    assert not any("slices" in f.read_text() for f in (output.folder / "out").glob("inputs/*"))


def test_answers_of_a_slice_count_in_an_edited_file(output: Output) -> None:
    rows = corpus(40)
    output.write(rows)
    sampled = output.run("50%").slice_rows
    assert sampled == sum(in_sample(row, 0.5) for row in rows)
    output.asked.clear()
    output.write([*corpus(3, "new"), *rows])
    output.run()
    assert output.asked.total() == 43 - sampled


@pytest.mark.parametrize("share", [None, "70%"])
def test_a_plan_counts_what_a_slice_has_left(
    new_corpus: Callable[[], Corpus], share: str | None
) -> None:
    corpus = new_corpus()
    for name in "ab":
        corpus.write(name, ["", *numbered(name, 60)])
    for sample in ("10%", "40%"):
        assert corpus.run(sample=sample).complete
    planned = dry_run(corpus.spec, RunOptions(sample=share), cache_dir=corpus.cache)
    asked = corpus.run(sample=share).tally.asked_rows
    assert 0 < asked <= planned.rows_for_model <= 120 - 30
    assert share or asked == planned.rows_for_model


def test_a_corpus_that_moved_before_a_slice_is_asked_nothing_again(
    new_corpus: Callable[[], Corpus],
) -> None:
    """The slice's answers are in the shards of the new place, and do not hide the old ones."""
    corpus = new_corpus()
    corpus.shard_bytes = 600
    for name in "abcdefgh":
        corpus.write(name, numbered(name, 5))
    assert corpus.run().shards > 8
    corpus.move("moved")
    assert corpus.run(sample="20%").complete and not corpus.asked
    assert corpus.run().complete and not corpus.asked
    corpus.check()


def test_failed_rows_of_a_slice_are_judged_by_the_slice(output: Output) -> None:
    rows = corpus(40)
    lines = [json.dumps(row) for row in rows]
    lines[3] = lines[3].replace('"text 3"', "7").replace('"text number 3"', "7")
    (output.folder / "in" / "corpus.jsonl").write_text("\n".join(lines))
    spec = json.loads((output.folder / "spec.yaml").read_text())
    (output.folder / "spec.yaml").write_text(json.dumps({**spec, "max_error_rate": 0.1}))
    with pytest.raises(FailedRowsError, match="1 of 4 rows failed"):
        output.run(None, "year = 2003")
    assert output.run(None, "year = 2004").complete


def test_status_counts_the_answers_of_slices(output: Output) -> None:
    rows = corpus(60)
    output.write(rows)
    output.run("50%")
    output.run(None, "year = 2003")
    either = sum(in_sample(row, 0.5) or row["year"] == 2003 for row in rows)
    found = status(output.spec, cache_dir=output.folder / "cache")
    assert str(found.slice) == "sample 50%"
    assert found.documents == 60 and found.tasks["a"] == TaskStatus(either, 60 - either, 0)


def test_other_verbs_read_the_snapshot_of_a_slice(output: Output) -> None:
    rows = corpus(60)
    output.write(rows[:30], "a.jsonl")
    table = pa.Table.from_pylist(rows[30:])
    pq.write_table(table, output.folder / "in" / "b.parquet", row_group_size=7)
    path = output.folder / "spec.yaml"
    keep = {"keep": "a.p.yes > 0.5", "on_error": "keep"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "filter": keep}))
    outcome = output.run("60%", "year <> 2001")
    inside = [row for row in rows if in_sample(row, 0.6) and row["year"] != 2001]
    cache = output.folder / "cache"
    assert outcome.slice_rows == len(inside)
    verified = verify_output(output.spec, cache_dir=cache)
    assert verified.intact and verified.documents_read_again == len(inside)
    to = output.folder / "kept"
    options = FilterOptions(to=str(to))
    filtered = filter_corpus(output.spec, options, cache_dir=cache)
    assert filtered.counts.all.documents == len(inside) and not filtered.complete
    kept = {row["doc_id"] for row in output.labels() if row["a"]["p"]["yes"] > 0.5}
    written = [json.loads(line) for f in to.rglob("*.jsonl") for line in f.read_text().splitlines()]
    written += [row for f in to.glob("kept/**/*.parquet") for row in pq.read_table(f).to_pylist()]
    assert sorted(written, key=lambda r: r["id"]) == sorted(
        (row for row in inside if row["id"] in kept), key=lambda r: r["id"]
    )
    exported = output.folder / "table.parquet"
    export(output.spec, ExportOptions(str(exported), with_text=True), cache_dir=cache)
    texts = {row["id"]: row["text"] for row in inside}
    rows_of_table = pq.read_table(exported).to_pylist()
    assert {row["doc_id"]: row["text"] for row in rows_of_table} == texts
    shown = show(output.spec, ShowOptions(n=100)).rows.to_pylist()
    assert {row["doc_id"]: row["_text"] for row in shown} == texts
    output.run()
    store = LocalStore(output.folder / "out")
    compared = compare(store, contents(store, 1), contents(store, 2))
    assert compared.before == "snapshot 00000001 (sample 60%, where year <> 2001)"
    assert compared.documents == (0, len(inside), 60 - len(inside))
    assert all(change.flip_rate == 0 for change in compared.tasks)
    assert collect_garbage(output.spec, keep=2, delete=True, older_than_days=0).keys == ()
    gone = collect_garbage(output.spec, keep=1, delete=True, older_than_days=0).keys
    assert gone[0] == "snapshots/00000001.json" and any(key.startswith("labels/") for key in gone)
    assert verify_output(output.spec, cache_dir=cache).intact
    output.asked.clear()
    assert output.run().snapshot == 2 and output.asked.total() == 0


def test_garbage_collection_keeps_a_slice_that_the_next_run_reuses(output: Output) -> None:
    output.write(corpus(60))
    sampled = output.run("50%").slice_rows
    assert collect_garbage(output.spec, keep=1, delete=True, older_than_days=0).keys == ()
    (output.folder / "out" / "snapshots" / "00000001.json").unlink()
    assert collect_garbage(output.spec, keep=1, delete=True, older_than_days=7).keys == ()
    output.asked.clear()
    output.run()
    assert output.asked.total() == 60 - (sampled or 0)
