"""A dry run of a filter counts what the filter does, and stops where it stops."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from filtered import (
    ANSWERED,
    SCORE,
    dropped,
    filtered_with,
    kept,
    policy_of,
    query,
)
from finished import (
    snapshot_json,
    toy_spec,
    write_snapshot,
)

from pipeline.cli import main
from pipeline.filters.dry_run import preview
from pipeline.options import FilterOptions
from pipeline.spec.parse import parse_spec
from pipeline.stores.local import LocalStore


def test_a_dry_run_counts_what_the_filter_drops_and_writes_nothing(folder: Path) -> None:
    rule = {"drop_top": {"share": 0.2, "of": SCORE, "by": "doc.lang", "smallest": 1}}
    spec = parse_spec(json.dumps(toy_spec(folder, filter={"on_error": "drop", **rule})))
    options = FilterOptions(dry_run=True)
    before = sorted(folder.rglob("*"))
    seen = preview(spec, options, cache_dir=folder / "cache")
    assert sorted(folder.rglob("*")) == before
    filtered = filtered_with(folder, **rule)
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
    assert "--by: no such option; assay report --by counts" in capsys.readouterr().err
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
    filtered = filtered_with(folder, **rule)
    assert values["dropped"] == len(dropped(filtered))
    assert values["documents"] == len(dropped(filtered)) + len(kept(filtered))
    for name in ("documents", "dropped"):
        assert sum(group[name] for group in values["groups"]) == values[name]
    names = [group["group"].get(by) if by else group["group"] for group in values["groups"]]
    assert names == (["art", "law", "null", "sport"] if by else [{}])
    if by:
        found = {group["group"][by]: group["threshold"] for group in values["groups"]}
        assert policy_of(filtered)["clauses"][0]["at"].items() <= found.items()
