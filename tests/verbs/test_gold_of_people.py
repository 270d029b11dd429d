"""Gold of people: what a review chose because it is hard, and people who disagree."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from judged import Bench

from pipeline.cli import main
from pipeline.gold.labels import read_gold
from pipeline.gold.people import GoldLine, Shown
from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.parse import load_spec


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
    [("uncertain",), ("where",), ("diverse", "uncertain", "random")],
)
def test_gold_that_was_chosen_because_it_is_hard_is_named_and_never_gated_on(
    bench: Bench, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...]
) -> None:
    gold = reviewed(bench, *chosen)
    assert bench.evaluate(gold) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count(f"warning: toxic: a review chose the documents of {gold} not at random (")
        == 1
    )
    assert f"{chosen[0]} " in printed and "labels that people gave to documents of a re" in printed
    assert bench.evaluate(gold, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["toxic"]["gold"] == "chosen"
    for gate in ("toxic.accuracy >= 0", "toxic.brier <= 1", "toxic.recall.toxic >= 0"):
        bench.says(gold={"path": gold}, publish={"gates": [gate]})
        assert bench.evaluate(gold) == 1
        shown = capsys.readouterr().out
        assert f"FAILED: {gate} (not judged: a review chose the documents of {gold} not" in shown
        assert "assay review --by random" in shown
        assert bench.evaluate(gold, "--json") == 1
        [decision] = json.loads(capsys.readouterr().out)["gates"]
        assert decision["value"] is None and not decision["passed"]
    # — a run refuses such gates before any work
    assert main(["run", str(bench.spec)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("publish.gates.0: a review chose the documents of ")


def test_gold_of_random_documents_is_gated_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = reviewed(bench, "random")
    bench.says(publish={"gates": ["toxic.accuracy >= 0"]})
    assert bench.evaluate(gold) == 0
    assert "not at random" not in capsys.readouterr().out


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
    assert gold.counts.outvoted == 1 and not gold.counts.ties and gold.rows == len(others) + 1
    assert task.labels[task.truth[gold.keys.index(first["content_hash"])]] == "toxic"
