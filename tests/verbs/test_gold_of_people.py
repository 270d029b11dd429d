"""Gold of people: what a review chose because it is hard, and people who disagree."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from judged import Bench

from pipeline.gold.labels import read_gold
from pipeline.gold.people import GoldLine, Shown
from pipeline.gold.values import UNLABELLED
from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.parse import load_spec


def reviewed(bench: Bench, *chosen: str) -> Path:
    """A gold file of people's answers to 60 documents, which a review chose for these reasons."""
    toxic = load_spec(bench.spec).tasks[0]
    rows = [row for row in bench.gold() if row["text"].strip()]
    hashes = documents_from(RawRow(row["text"], row["id"]) for row in rows)["content_hash"]
    path, lines = bench.folder / "toxic.jsonl", []
    for number, (row, text_hash) in enumerate(zip(rows, hashes.to_pylist(), strict=True)):
        shown = Shown.of(toxic, chosen=chosen[number % len(chosen)])
        by = "ann", "2026-11-26T00:00:00Z", 1.0, shown
        line = GoldLine(row["id"], text_hash, "toxic", "label", row["toxic"], *by)
        lines.append(json.dumps(asdict(line)))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("chosen", [("uncertain",), ("where",), ("diverse", "uncertain", "random")])
def test_gold_that_was_chosen_because_it_is_hard_is_named_and_never_gated_on(
    bench: Bench, chosen: tuple[str, ...]
) -> None:
    gold = reviewed(bench, *chosen)
    printed = bench.evaluate(gold).out
    warning = f"warning: toxic: a review chose the documents of {gold} not at random ("
    assert printed.count(warning) == 1
    assert f"{chosen[0]} " in printed and "labels that people gave to documents of a re" in printed
    gates = ["toxic.accuracy >= 0", "toxic.brier <= 1", "toxic.recall.toxic >= 0"]
    bench.says(gold={"path": str(gold)}, publish={"gates": gates})
    shown = bench.evaluate(gold, code=1).out
    for gate in gates:
        assert f"FAILED: {gate} (not judged: a review chose the documents of {gold} not" in shown
    assert "assay review --by random" in shown
    report = bench.evaluate(gold, "--json", code=1).json
    assert report["tasks"]["toxic"]["gold"] == "chosen"
    assert [(each["value"], each["passed"]) for each in report["gates"]] == [(None, False)] * 3
    # — a run refuses such gates before any work
    refused = bench.assay("run", bench.spec, code=2).err.splitlines()
    assert len(refused) == 3
    assert refused[0].startswith("publish.gates.0: a review chose the documents of ")


def test_gold_of_random_documents_is_gated_on(bench: Bench) -> None:
    bench.says(publish={"gates": ["toxic.accuracy >= 0"]})
    assert "not at random" not in bench.evaluate(reviewed(bench, "random")).out


@pytest.mark.parametrize(
    ("votes", "label"),
    [("tt", "toxic"), ("ttc", "toxic"), ("cctct", "clean"), ("tc", None), ("ctct", None)],
)
def test_people_who_disagree_are_kept_by_majority_and_shown(
    bench: Bench, votes: str, label: str | None
) -> None:
    rows, names = bench.gold()[:40], {"t": "toxic", "c": "clean"}
    several = [{**rows[0], "toxic": names[vote]} for vote in votes]
    path = bench.write([*several, *rows[1:]])
    gold = read_gold(path, load_spec(bench.spec))
    task = gold.tasks["toxic"]
    of_first = task.truth[gold.keys.index(rows[0]["id"])]
    assert of_first == (UNLABELLED if label is None else task.labels.index(label))
    shown = bench.evaluate(path).words
    is_outvoted = label is not None and len(set(votes)) > 1
    assert ("1 documents have several labels; the one that most" in shown) == is_outvoted
    assert (f"whose labels are a tie: {rows[0]['id']}" in shown) == (label is None)
    ties = bench.evaluate(path, "--json").json["gold"]["ties"]
    assert ties == ([] if label else [rows[0]["id"]])


def test_three_people_are_three_votes(bench: Bench) -> None:
    """A gold file of a review has a row for each person."""
    path = reviewed(bench, "random")
    [first, *others] = map(json.loads, path.read_text().splitlines())
    labels = ["toxic", "clean", "toxic"]
    of_people = [{**first, "by": str(n), "label": label} for n, label in enumerate(labels)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*of_people, *others]))
    gold = read_gold(str(path), load_spec(bench.spec))
    task = gold.tasks["toxic"]
    assert gold.counts.outvoted == 1 and not gold.counts.ties and gold.rows == len(others) + 1
    assert task.labels[task.truth[gold.keys.index(first["content_hash"])]] == "toxic"
