"""Thresholds by group, beside DuckDB's `quantile_disc` on the same labels."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from finished import (
    Corpus,
    finish,
    snapshot_json,
    toy_fingerprints,
    toy_spec,
    write_snapshot,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.filters.dry_run import preview
from pipeline.filters.policy import threshold
from pipeline.filters.run import FilterResult, filter_corpus
from pipeline.ledger.dataset import open_labels
from pipeline.options import FilterOptions
from pipeline.spec.parse import parse_spec
from pipeline.stores.local import LocalStore

ANSWERED = "toxic.status = 'ok' and topic.status = 'ok'"
SCORE = "toxic.p.toxic"


def labelled(folder: Path) -> Path:
    """Three files of thirty documents with a language each, labelled."""
    corpus = Corpus(folder / "in", folder / "cache")
    corpus.write()
    for file in list(corpus.folder.glob("*.jsonl")):
        chosen = random.Random(file.name)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [
            json.dumps(row | {"lang": chosen.choice(["en", "en", "de", None])}) for row in rows
        ]
        file.write_text("".join(f"{line}\n" for line in lines))
    store = LocalStore(folder / "out")
    finish(store, corpus.shards(store), toy_fingerprints())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return labelled(tmp_path)


def run(folder: Path, to: str = "to", **rule: Any) -> FilterResult:
    spec = parse_spec(json.dumps(toy_spec(folder, filter={"on_error": "drop", **rule})))
    return filter_corpus(spec, FilterOptions(str(folder / to)), cache_dir=folder / "cache")


def rows_of(folder: Path) -> pa.Table:
    """The labels with the language of each document."""
    lines = [
        line for file in (folder / "in").glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    languages = {row["id"]: row["lang"] for row in map(json.loads, lines)}
    labels = open_labels(str(folder / "out")).to_table()
    by_row = [languages[id] for id in labels.column("doc_id").to_pylist()]
    return labels.append_column("lang", pa.array(by_row, pa.string()))


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as database:
        database.register("labels", rows_of(folder))
        return database.sql(sql).fetchall()


def dropped(filtered: FilterResult) -> dict[str, str]:
    files = f"{filtered.dropped_at}/**/*.parquet"
    return dict(duckdb.sql(f"select doc_id, _dropped_by from '{files}'").fetchall())


def kept(filtered: FilterResult) -> set[str]:
    files = Path(filtered.kept_at).rglob("*.jsonl")
    return {json.loads(line)["id"] for file in files for line in file.read_text().splitlines()}


def policy_of(filtered: FilterResult) -> dict[str, Any]:
    assert filtered.policy is not None
    content: dict[str, Any] = json.loads(Path(filtered.policy).read_text())
    return content


@pytest.mark.parametrize("share", [0.05, 0.1, 0.333, 0.5, 0.9])
@pytest.mark.parametrize(
    ("by", "column"),
    [("topic", "topic.label"), ("doc.lang", "coalesce(lang, 'null')"), (None, "'all'")],
)
def test_thresholds_and_documents_are_those_of_duckdb(
    share: float, by: str | None, column: str, folder: Path
) -> None:
    filtered = run(folder, drop_top={"share": share, "of": SCORE, "by": by, "smallest": 1})
    quantile = 1 - Fraction(str(share))
    found = query(
        folder,
        f"""with q as (select {column} as g, quantile_disc({SCORE}, {float(quantile)}) as t
                from labels where {ANSWERED} group by g)
            select g, t, list(doc_id) filter ({SCORE} > t) from labels join q on {column} = g
            where {ANSWERED} group by g, t""",
    )
    [clause] = policy_of(filtered)["clauses"]
    if by is None:
        [(_, limit, _)] = found
        assert clause["otherwise"] == limit and clause["at"] == {}
    else:
        assert clause["at"] == {group: limit for group, limit, _ in found}
    high = {id for _, _, ids in found for id in ids or ()}
    assert len(high) >= 1
    failed = {id for (id,) in query(folder, f"select doc_id from labels where not ({ANSWERED})")}
    reasons = dropped(filtered)
    by_score = {id for id, reason in reasons.items() if reason.startswith(f"drop_top: {SCORE} > ")}
    assert by_score == high - failed
    everything = {id for (id,) in query(folder, "select doc_id from labels")}
    assert kept(filtered) | reasons.keys() == everything
    assert not kept(filtered) & reasons.keys()


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=1),
    st.sampled_from(["0.01", "0.05", "0.1", "0.25", "0.3333", "0.5", "0.99"]),
)
def test_a_threshold_drops_at_most_its_share_and_is_a_quantile(
    scores: list[float], share: str
) -> None:
    limit = threshold(np.array(scores), float(share))
    above = sum(score > limit for score in scores)
    assert above <= Fraction(share) * len(scores)
    # — the next lower threshold would drop more
    lower = [score for score in scores if score < limit]
    if lower:
        assert sum(score > max(lower) for score in scores) > Fraction(share) * len(scores)
    with duckdb.connect() as database:
        database.register("scores", pa.table({"s": scores}))
        sql = f"select quantile_disc(s, {float(1 - Fraction(share))}) from scores"
        assert database.sql(sql).fetchall() == [(limit,)]


def test_a_small_group_has_the_threshold_of_all_and_is_named(folder: Path) -> None:
    filtered = run(folder, drop_top={"share": 0.2, "of": SCORE, "by": "doc.lang", "smallest": 30})
    [clause] = policy_of(filtered)["clauses"]
    sizes = dict(
        query(
            folder,
            f"select coalesce(lang, 'null'), count(*) from labels where {ANSWERED} group by 1",
        )
    )
    assert clause["sizes"] == sizes
    assert clause["small"] == sorted(group for group, size in sizes.items() if size < 30)
    assert clause["small"] and clause["at"].keys() == sizes.keys() - set(clause["small"])
    [(limit,)] = query(folder, f"select quantile_disc({SCORE}, 0.8) from labels where {ANSWERED}")
    assert clause["otherwise"] == limit


def test_thresholds_that_are_given(folder: Path) -> None:
    rule = {"of": SCORE, "by": "doc.lang", "at": {"en": 0.3, "de": 0.6}, "otherwise": 0.9}
    filtered = run(folder, thresholds=rule)
    limit = "case lang when 'en' then 0.3 when 'de' then 0.6 else 0.9 end"
    expected = query(folder, f"select doc_id from labels where {SCORE} > {limit} and {ANSWERED}")
    reasons = dropped(filtered)
    named = {id: why for id, why in reasons.items() if why.startswith("thresholds: ")}
    assert named.keys() == {id for (id,) in expected}
    endings = {why.partition(" > ")[2] for why in named.values()}
    assert {"0.3 in en", "0.6 in de"} <= endings


def test_keep_comes_first_and_the_clause_is_recorded(folder: Path) -> None:
    keep = "topic.label <> 'law' and doc.lang = 'en'"
    top = {"share": 0.3, "of": SCORE, "smallest": 1}
    reasons = dropped(run(folder, keep=keep, drop_top=top))
    rows = query(
        folder,
        f"""select doc_id, topic.label <> 'law' and lang = 'en', {SCORE},
            (select quantile_disc({SCORE}, 0.7) from labels where {ANSWERED})
            from labels where {ANSWERED}""",
    )
    for id, is_kept, score, limit in rows:
        expected = "" if is_kept else f"keep is {'null' if is_kept is None else 'false'}"
        if is_kept and score > limit:
            expected = "drop_top"
        assert reasons.get(id, "").partition(":")[0] == expected


def test_the_same_command_again_writes_nothing_and_reads_no_label(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: dict[str, Any] = {"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}}
    first = run(folder, **rule)
    monkeypatch.setattr("pipeline.filters.run.aligned_batches", None)
    again = run(folder, **rule)
    assert first.created > 0 and again.created == 0
    assert (again.policy, again.counts) == (first.policy, first.counts)


@pytest.mark.parametrize("stop_at", [0, 1, 4, 9, 14])
def test_a_filter_that_was_stopped_goes_on_with_the_same_thresholds(
    stop_at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: dict[str, Any] = {"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}}
    whole = run(folder, to="whole", **rule)
    create, calls = LocalStore.create, 0

    def stopping(store: LocalStore, key: str, data: bytes) -> bool:
        nonlocal calls
        if key.startswith(("filters/", "kept/", "dropped/")):
            calls += 1
            if calls > stop_at:
                raise KeyboardInterrupt
        return create(store, key, data)

    monkeypatch.setattr(LocalStore, "create", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(folder, **rule)
    monkeypatch.undo()
    resumed = run(folder, **rule)
    assert policy_of(resumed) == policy_of(whole)
    assert dropped(resumed) == dropped(whole) and kept(resumed) == kept(whole)


def test_a_policy_gives_the_same_split_elsewhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = {"keep": "topic.p.law < 0.9", "drop_top": {"share": 0.3, "of": SCORE, "smallest": 1}}
    first = run(folder, **rule)
    elsewhere = labelled(tmp_path_factory.mktemp("elsewhere"))
    second = run(elsewhere, policy=first.policy)
    assert kept(second) == kept(first) and dropped(second) == dropped(first)
    assert policy_of(second) == policy_of(first)
    current = json.loads((elsewhere / "to" / "current.json").read_text())
    assert current["policy"] == second.policy


def test_a_policy_of_another_task_version_is_refused(folder: Path) -> None:
    first = run(folder, drop_top={"share": 0.3, "of": SCORE, "smallest": 1})
    content = policy_of(first)
    (folder / "other.json").write_text(json.dumps(content | {"tasks": {"toxic": "0" * 16}}))
    with pytest.raises(SpecError, match=r"filter.policy: its thresholds are of the version 0000"):
        run(folder, policy=str(folder / "other.json"))
    (folder / "none.json").write_text(json.dumps(content | {"tasks": {"rude": "0" * 16}}))
    with pytest.raises(SpecError, match=r"'rude', and the snapshot has no such task"):
        run(folder, policy=str(folder / "none.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keep": null, "clauses": 3}', '{"format": 2}'])
def test_what_is_no_policy_is_named(text: str, folder: Path) -> None:
    (folder / "policy.json").write_text(text)
    with pytest.raises(SpecError, match=r"filter.policy: is no policy: .* that a filter wrote"):
        run(folder, policy=str(folder / "policy.json"))


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ({}, "filter: write keep, drop_top, thresholds or policy"),
        ({"policy": "a", "keep": "true"}, "filter: a policy brings its own rule; remove it, or"),
        ({"drop_top": {"share": 0, "of": SCORE}}, "filter.drop_top.share: "),
        ({"drop_top": {"share": 1, "of": SCORE}}, "filter.drop_top.share: "),
        ({"drop_top": {"share": 0.1, "of": "toxic.p.rude"}}, "filter.drop_top.of: "),
        ({"drop_top": {"share": 0.1, "of": "topic.label"}}, "filter.drop_top.of: is string, not a"),
        (
            {"drop_top": {"share": 0.1, "of": SCORE, "by": "tongue"}},
            "filter.drop_top.by: .*tongue",
        ),
        (
            {"drop_top": {"share": 0.1, "of": SCORE, "by": "doc.tongue"}},
            "filter: .* have no value in this column|filter: the first .* no value in this column",
        ),
        (
            {"drop_top": {"share": 0.1, "of": "nullif(toxic.p.toxic, toxic.p.toxic)"}},
            r"filter.drop_top.of: is no finite number for document .*write coalesce",
        ),
        ({"thresholds": {"of": SCORE, "at": {"en": 0.2}}}, "filter.thresholds.otherwise: "),
        (
            {"thresholds": {"of": SCORE, "at": {"en": "high"}, "otherwise": 1}},
            "filter.thresholds.at.en: ",
        ),
        ({"policy": "/nowhere/policy.json"}, "filter.policy: the file cannot be read: "),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    rule: dict[str, Any], line: str, folder: Path
) -> None:
    with pytest.raises(SpecError, match=line) as raised:
        run(folder, **rule)
    assert len(str(raised.value).splitlines()) == 1
    assert not list((folder / "to").rglob("*.parquet"))


def test_a_dry_run_counts_what_the_filter_drops_and_writes_nothing(folder: Path) -> None:
    rule = {"drop_top": {"share": 0.2, "of": SCORE, "by": "doc.lang", "smallest": 1}}
    spec = parse_spec(json.dumps(toy_spec(folder, filter={"on_error": "drop", **rule})))
    options = FilterOptions(dry_run=True)
    before = sorted(folder.rglob("*"))
    seen = preview(spec, options, cache_dir=folder / "cache")
    assert sorted(folder.rglob("*")) == before
    filtered = run(folder, **rule)
    assert seen.dropped.documents == len(dropped(filtered))
    assert seen.kept.documents == len(kept(filtered))
    assert seen.reasons == filtered.counts.reasons
    [clause] = policy_of(filtered)["clauses"]
    assert json.loads(json.dumps(seen.clauses[0].clause)) == clause
    ids = ", ".join(f"'{id}'" for id in dropped(filtered))
    sizes = query(
        folder,
        f"""select coalesce(lang, 'null'), doc_id in ({ids}), count(*), sum(n_chars),
            sum(coalesce(toxic.n_tokens, 0)) from labels group by 1, 2""",
    )
    expected = {(group, is_dropped): tuple(size) for group, is_dropped, *size in sizes}
    for group, pair in seen.groups.items():
        for is_dropped, size in zip((False, True), pair, strict=True):
            found = (size.documents, size.chars, size.tokens)
            assert found == expected.get((group, is_dropped), (0, 0, 0))


def test_the_grid_of_a_dry_run_is_that_of_duckdb(folder: Path) -> None:
    top = {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}
    spec = parse_spec(json.dumps(toy_spec(folder, filter={"on_error": "drop", "drop_top": top})))
    seen = preview(spec, FilterOptions(dry_run=True), cache_dir=folder / "cache")
    assert {row.group for row in seen.clauses[0].grid} == {"all", "art", "law", "sport"}
    for row in seen.clauses[0].grid:
        where = ANSWERED + ("" if row.group == "all" else f" and topic.label = '{row.group}'")
        [found] = query(
            folder,
            f"""with g as (select * from labels where {where}),
            q as (select quantile_disc({SCORE}, {float(1 - Fraction(str(row.share)))}) as t from g)
            select any_value(t), count(*) filter ({SCORE} > t),
            coalesce(sum(n_chars) filter ({SCORE} > t), 0),
            coalesce(sum(topic.n_tokens) filter ({SCORE} > t), 0) from g, q""",
        )
        size = row.dropped
        assert found == (row.threshold, size.documents, size.chars, size.tokens)


def test_without_a_folder_only_a_dry_run_is_possible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = toy_spec(folder, filter={"drop_top": {"share": 0.1, "of": SCORE}, "on_error": "drop"})
    (folder / "spec.yaml").write_text(json.dumps(content))
    assert main(["filter", str(folder / "spec.yaml")]) == 2
    assert (
        "--to: missing; name a folder for the kept documents, or write --dry-run"
        in capsys.readouterr().err
    )
    assert main(["filter", str(folder / "spec.yaml"), "--dry-run", "--by", "source"]) == 2
    assert "--by: a dry run counts by the groups of the filter" in capsys.readouterr().err
    assert main(["filter", str(folder / "spec.yaml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was written" in shown and "dropped at other shares" in shown
    assert main(["filter", str(folder / "spec.yaml"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clauses"][0]["clause"]["share"] == 0.1


def test_a_dry_run_of_a_filter_that_stops_says_so_and_ends_as_the_filter_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = toy_spec(folder, filter={"keep": "toxic.p.toxic < 0.5 and topic.label <> 'law'"})
    (folder / "spec.yaml").write_text(json.dumps(content))
    command = ["filter", str(folder / "spec.yaml")]
    [(broken,)] = query(
        folder,
        f"""select count(*) from labels where {ANSWERED}
            and not (toxic.p.toxic < 0.5 and topic.label <> 'law')""",
    )
    assert main([*command, "--dry-run", "--json"]) == main([*command, "--to", str(folder / "to")])
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    assert (values["failed"], values["stops"]) == ({"empty": 3}, True)
    assert (values["documents"], values["dropped"], len(values["groups"])) == (90, broken, 1)
    assert sum(values["reasons"].values()) - values["several"] == broken
    assert main([*command, "--dry-run"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    stop = printed.err.removeprefix("assay: ").strip()
    assert stop.startswith("3 of 90 documents have no answer (empty 3); ") and stop in shown
    assert "keep is false: toxic.p.toxic < 0.5" in shown and "more than one of these" in shown
    assert f"removes documents where {values['removes']}" in shown
    # — with another --on-error the filter goes on, and so does its dry run
    assert main([*command, "--dry-run", "--json", "--on-error", "drop"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["failed"], values["stops"]) == ({"empty": 3}, False)
    assert (values["documents"], values["dropped"]) == (90, broken + 3)


def test_a_dry_run_on_a_partial_snapshot_ends_as_the_filter_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(folder / "out")
    content = snapshot_json(store) | {"missing_rows": 5}
    write_snapshot(store, content)
    rule = {"keep": "toxic.p.toxic < 0.5", "on_error": "drop"}
    (folder / "spec.yaml").write_text(json.dumps(toy_spec(folder, filter=rule)))
    command = ["filter", str(folder / "spec.yaml")]
    assert main([*command, "--to", str(folder / "to")]) == 3
    assert main([*command, "--dry-run"]) == 3
    assert "incomplete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "by"),
    [
        ({"keep": "toxic.p.toxic < 0.6"}, None),
        ({"drop_top": {"share": 0.2, "of": SCORE}}, None),
        ({"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}}, "topic"),
    ],
)
def test_the_json_of_a_dry_run_has_numbers_and_thresholds_by_group(
    rule: dict[str, Any], by: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = toy_spec(folder, filter={"on_error": "drop", **rule})
    (folder / "spec.yaml").write_text(json.dumps(content))
    assert main(["filter", str(folder / "spec.yaml"), "--dry-run", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    filtered = run(folder, **rule)
    assert values["dropped"] == len(dropped(filtered))
    assert values["documents"] == len(dropped(filtered)) + len(kept(filtered))
    for name in ("documents", "dropped"):
        assert sum(group[name] for group in values["groups"]) == values[name]
    names = [group["group"].get(by) if by else group["group"] for group in values["groups"]]
    assert names == (["art", "law", "null", "sport"] if by else [{}])
    if by:
        found = {group["group"][by]: group["threshold"] for group in values["groups"]}
        assert policy_of(filtered)["clauses"][0]["at"].items() <= found.items()
