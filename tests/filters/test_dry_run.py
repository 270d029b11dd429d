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
    command_of,
    dropped,
    filtered_with,
    kept,
    previewed,
    query,
    thresholds,
)
from finished import snapshot_json, write_snapshot

from pipeline.cli import main
from pipeline.stores.local import LocalStore


def test_the_grid_of_a_dry_run_is_that_of_duckdb(folder: Path) -> None:
    top = {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}
    shares = previewed(folder, drop_top=top).other_shares
    assert {row.group for row in shares} == {"all", "art", "law", "sport"}
    for row in shares:
        where = ANSWERED + ("" if row.group == "all" else f" and topic.label = '{row.group}'")
        [found] = query(
            folder,
            f"""with g as (select * from labels where {where}),
            q as (select quantile_disc({SCORE}, {float(1 - Fraction(str(row.share)))}) as t from g)
            select any_value(t), count(*) filter ({SCORE} > t),
            coalesce(sum(n_chars) filter ({SCORE} > t), 0),
            coalesce(sum(greatest(toxic.n_tokens, topic.n_tokens)) filter ({SCORE} > t), 0)
            from g, q""",
        )
        size = row.dropped
        assert found == (row.threshold, size.documents, size.chars, size.tokens)


def test_without_a_folder_only_a_dry_run_is_possible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of(folder, drop_top={"share": 0.1, "of": SCORE})
    assert main(command) == 2 and capsys.readouterr().err.startswith("--to: missing; ")
    before = sorted(folder.rglob("*"))
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was written" in shown and "dropped at other shares" in shown
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_of_a_filter_that_stops_says_so_and_ends_as_the_filter_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = f"{SCORE} < 0.5 and topic.label <> 'law'"
    command = command_of(folder, keep=keep, on_error="fail")
    where = f"{ANSWERED} and not ({keep})"
    [(broken,)] = query(folder, f"select count(*) from labels where {where}")
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
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(own_folder / "out")
    write_snapshot(store, snapshot_json(store) | {"missing_rows": 5})
    command = command_of(own_folder, keep=f"{SCORE} < 0.5")
    assert main([*command, "--to", str(own_folder / "to")]) == 3
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
    assert main([*command_of(folder, **rule), "--dry-run", "--json"]) == 0
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
        assert thresholds(filtered) == found
    # — the filter's own result is the same, but for where it is
    other = {"other_shares", "written"}
    assert main([*command_of(folder, **rule), "--to", str(folder / "to"), "--json"]) == 0
    of_filter = json.loads(capsys.readouterr().out)
    assert [of_filter[name] for name in values.keys() - other] == [
        values[name] for name in values.keys() - other
    ]
    assert of_filter.keys() == values.keys() and bool(values["other_shares"]) == (
        "keep" not in rule
    )
