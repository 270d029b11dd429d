"""A dry run of a filter counts what the filter does, and both stop at the same places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls import Assay
from filtered import ANSWERED, SCORE, command_of, dropped, filtered_with, ids, kept
from finished import snapshot_json, write_snapshot
from reports import REPORT, printed

from pipeline.errors import SpecError
from pipeline.report.filters import show_filter
from pipeline.stores.local import LocalStore


def test_without_a_folder_only_a_dry_run_is_possible(folder: Path, assay: Assay) -> None:
    command = command_of(folder, drop_top={"share": 0.1, "of": SCORE})
    assert assay(*command, code=2).error.startswith("--to: missing; ")
    before = sorted(folder.rglob("*"))
    shown = assay(*command, "--dry-run").out
    assert "nothing was written" in shown
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_of_a_filter_that_stops_reports_it_and_ends_as_the_filter_does(
    folder: Path, assay: Assay
) -> None:
    keep = f"{SCORE} < 0.5 and topic.label <> 'law'"
    command = command_of(folder, keep=keep, on_error="fail")
    broken = len(ids(folder, f"{ANSWERED} and not ({keep})"))
    values = assay(*command, "--dry-run", "--json", code=1).json
    assert (values["failed"], values["stops"]) == ({"empty": 3}, True)
    assert (values["documents"], values["dropped"], len(values["groups"])) == (90, broken, 1)
    assert sum(values["reasons"].values()) >= broken
    shown = assay(*command, "--dry-run", code=1).words
    stop = assay(*command, "--to", folder / "to", code=1).err.removeprefix("assay: ").strip()
    assert stop.startswith("3 of 90 documents have no answer (empty 3); ") and stop in shown
    assert not list((folder / "to").rglob("*.json*"))
    assert "keep is false: toxic.p.toxic < 0.5" in shown
    assert f"removes documents where {values['removes']}" in shown
    # — with another --on-error the filter goes on, and so does its dry run
    values = assay(*command, "--dry-run", "--json", "--on-error", "drop").json
    assert (values["failed"], values["stops"]) == ({"empty": 3}, False)
    assert (values["documents"], values["dropped"]) == (90, broken + 3)


def test_a_dry_run_on_a_partial_snapshot_ends_as_the_filter_does(
    own_folder: Path, assay: Assay
) -> None:
    store = LocalStore(own_folder / "out")
    write_snapshot(store, snapshot_json(store) | {"missing_rows": 5})
    command = command_of(own_folder, keep=f"{SCORE} < 0.5")
    assay(*command, "--to", own_folder / "to", code=3)
    assert "incomplete" in assay(*command, "--dry-run", code=3).out


@pytest.mark.parametrize("stop_at", [0, 9])
def test_a_filter_that_was_stopped_goes_on_with_the_same_thresholds(
    stop_at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: dict[str, Any] = {"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}}
    whole = filtered_with(folder, to="whole", **rule)
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
        filtered_with(folder, **rule)
    monkeypatch.undo()
    resumed = filtered_with(folder, **rule)
    assert (resumed.removes, resumed.groups) == (whole.removes, whole.groups)
    assert dropped(resumed) == dropped(whole) and kept(resumed) == kept(whole)


def test_of_many_groups_a_few_thresholds_are_printed_and_the_others_counted() -> None:
    cases = [f" WHEN 'it''s {n}' THEN {n}e0" for n in range(100)]
    assert REPORT.filter is not None
    filtered = replace(REPORT.filter, removes=f"p > CASE g{''.join(cases)} ELSE 1e0 END")
    shown = " ".join(printed(show_filter, filtered).split())
    assert f"{cases[23]} … 76 more groups; --json has them … ELSE 1e0 END" in shown
    assert cases[24] not in shown


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ({}, "filter"),
        ({"keep": "toxic.p.rude < 1"}, "filter.keep"),
        ({"keep": "true; copy x to 'y'"}, "filter.keep"),
        ({"keep": "doc.no = 'x'"}, "filter"),
        ({"drop_top": {"share": 0, "of": SCORE}}, "filter.drop_top.share"),
        ({"drop_top": {"share": 1, "of": SCORE}}, "filter.drop_top.share"),
        ({"drop_top": {"share": 0.1, "of": "toxic.p.rude"}}, "filter.drop_top.of"),
        ({"drop_top": {"share": 0.1, "of": "topic.label"}}, "filter.drop_top.of"),
        ({"drop_top": {"share": 0.1, "of": SCORE, "by": "tongue"}}, "filter.drop_top.by"),
        ({"drop_top": {"share": 0.1, "of": SCORE, "by": "doc.tongue"}}, "filter"),
        # — a score that is no number for a document with an answer
        ({"drop_top": {"share": 0.1, "of": f"nullif({SCORE}, {SCORE})"}}, "filter.drop_top.of"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    rule: dict[str, Any], place: str, folder: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        filtered_with(folder, **rule)
    assert [problem.place for problem in refused.value.problems] == [place]
    assert len(str(refused.value).splitlines()) == 1
    assert not list((folder / "to").rglob("*.parquet"))
