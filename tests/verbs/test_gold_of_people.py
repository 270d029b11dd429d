"""Gold of people: what a review chose because it is hard, and people who disagree."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
from gold_lines import line, written
from judged import Bench

from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.parse import load_spec


def reviewed(bench: Bench, *chosen: str) -> Path:
    """A gold file of people's answers to 60 documents, which a review chose for these reasons."""
    toxic = load_spec(bench.spec).tasks[0]
    rows = [row for row in bench.gold() if row["text"].strip()]
    hashes = documents_from(RawRow(row["text"], row["id"]) for row in rows)["content_hash"]
    lines = [
        line(row["id"], row["toxic"], task=toxic, chosen=reason, content_hash=text_hash)
        for row, text_hash, reason in zip(rows, hashes.to_pylist(), cycle(chosen), strict=False)
    ]
    return written(bench.folder / "toxic.jsonl", *lines, task=toxic)


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
    bench.set_keys(gold={"path": str(gold)}, publish={"gates": gates})
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
    bench.set_keys(publish={"gates": ["toxic.accuracy >= 0"]})
    assert "not at random" not in bench.evaluate(reviewed(bench, "random")).out


def test_people_who_disagree_are_shown(bench: Bench) -> None:
    outvoted, tie, *others = bench.gold()[:40]
    votes = [(outvoted, "toxic"), (outvoted, "clean"), (tie, "toxic"), (tie, "clean")]
    rows = [outvoted, *({**row, "toxic": label} for row, label in votes), *others]
    gold = bench.write(rows)
    shown = bench.evaluate(gold).words
    assert "1 documents have several labels; the one that most" in shown
    assert f"whose labels are a tie: {tie['id']}" in shown
    assert bench.evaluate(gold, "--json").json["gold"]["ties"] == [tie["id"]]
