"""A session shows each person the right documents, and writes every answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reviews import Clock, World, task_of
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from pipeline.evaluation.gates import parse_gate
from pipeline.review.agreement import agreements, kappa
from pipeline.review.choice import DIVERSE, Order
from pipeline.review.refit import labels_pay, refit
from pipeline.review.session import RESERVED_S, RefusedAnswer, Session
from pipeline.review.view import task_json, view_json


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def hash_of(session: Session, person: str) -> str:
    asked = session.open_document(person)
    assert asked is not None
    return session.pool.hashes[asked.row]


def test_an_answer_is_a_line_with_what_the_person_saw(world: World, file: Path) -> None:
    clock = Clock()
    with world.session(file, now=clock) as session:
        text_hash = hash_of(session, "ann")
        clock.pass_(2.5)
        session.answer("ann", text_hash, "label", "toxic")
    [line] = lines(file)
    shown = line.pop("shown")
    row = world.pool.hashes.index(text_hash)
    assert line == {
        "doc_id": f"d{row}",
        "content_hash": text_hash,
        "task": "tone",
        "action": "label",
        "label": "toxic",
        "by": "ann",
        "at": "2026-11-26T00:00:02.500+00:00",
        "seconds": 2.5,
    }
    assert shown["question"] == world.task.question and shown["labels"] == ["toxic", "clean"]
    assert (shown["p"], shown["blind"], shown["chosen"]) == (None, False, "diverse")


def test_a_session_goes_on_where_the_last_one_ended(world: World, file: Path) -> None:
    with world.session(file) as session:
        first = world.answers(session, "ann", 45)
        reasons = [line["shown"]["chosen"] for line in lines(file)]
        assert reasons[:DIVERSE] == ["diverse"] * DIVERSE
        assert set(reasons[DIVERSE:]) == {"uncertain", "random"}
    with world.session(file) as session:
        session.collect_fit(None)
        assert len(session.fits[0].rows) == 45
        second = world.answers(session, "ann", 30)
    assert not {*first} & {*second} and len({*second}) == 30 and len(lines(file)) == 75


def test_two_people_get_different_documents_until_a_reservation_ends(
    world: World, file: Path
) -> None:
    clock = Clock()
    with world.session(file, now=clock, order=Order("random")) as session:
        ann = hash_of(session, "ann")
        assert hash_of(session, "ann") == ann
        assert hash_of(session, "bob") != ann
        clock.pass_(RESERVED_S + 1)
        assert hash_of(session, "cleo") == ann
        session.answer("ann", ann, "label", "clean")  # — late, and still hers
        session.answer("cleo", ann, "skip")
        assert hash_of(session, "dan") != ann


def test_what_one_person_skips_is_shown_to_another_but_not_what_is_flagged(
    world: World, file: Path
) -> None:
    with world.session(file, order=Order("random")) as session:
        skipped = hash_of(session, "ann")
        session.answer("ann", skipped, "skip")
        flagged = hash_of(session, "ann")
        session.answer("ann", flagged, "flag")
        assert hash_of(session, "ann") not in (skipped, flagged)
        assert hash_of(session, "bob") == skipped
        session.answer("bob", skipped, "label", "toxic")
        assert hash_of(session, "bob") != flagged


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("choice", "rude"),
        ("choice", ["toxic"]),
        ("choice", None),
        ("multi", "law"),
        ("multi", ["law", "law"]),
        ("multi", ["law", "sport"]),
        ("score", 1),
    ],
)
def test_a_wrong_label_is_refused_and_not_written(kind: str, label: object, file: Path) -> None:
    world = World(task_of(kind))
    with world.session(file) as session:
        text_hash = hash_of(session, "ann")
        with pytest.raises(RefusedAnswer, match=r" label"):
            session.answer("ann", text_hash, "label", label)
        assert file.read_bytes() == b"" and hash_of(session, "ann") == text_hash


def test_a_document_that_was_not_shown_or_is_answered_is_refused(world: World, file: Path) -> None:
    with world.session(file) as session:
        text_hash = hash_of(session, "ann")
        with pytest.raises(RefusedAnswer, match="was not shown to you"):
            session.answer("bob", text_hash, "label", "toxic")
        session.answer("ann", text_hash, "label", "toxic")
        with pytest.raises(RefusedAnswer, match="answered this document already"):
            session.answer("ann", text_hash, "label", "clean")
        assert len(lines(file)) == 1


def test_undo_opens_the_document_again_and_the_next_undo_the_one_before(
    world: World, file: Path
) -> None:
    with world.session(file) as session:
        with pytest.raises(RefusedAnswer, match="no answer of yours"):
            session.undo("ann")
        first, second = world.answers(session, "ann", 2)
        for row in (second, first):
            session.undo("ann")
            assert hash_of(session, "ann") == world.pool.hashes[row]
        assert session.gold.answers == {}
        session.answer("ann", world.pool.hashes[first], "label", "clean")
        assert [line["action"] for line in lines(file)] == ["label"] * 2 + ["undo"] * 2 + ["label"]
        [answer] = session.gold.answers.values()
        assert answer.label == "clean"


def test_a_hidden_answer_is_not_in_the_page_or_the_file(world: World, file: Path) -> None:
    with world.session(file, blind=True) as session:
        world.answers(session, "ann", 25)
        assert session.fits and len(session.agreed) == 5
        row = view_json(session, "ann")["row"]
    assert row["p"] is None
    assert {line["shown"]["p"] for line in lines(file)} == {None}
    assert {line["shown"]["blind"] for line in lines(file)} == {True}


def test_agreement_with_the_model_is_that_of_the_answers_shown(world: World, file: Path) -> None:
    with world.session(file) as session:
        world.answers(session, "ann", 60)
        before = dict(session.agreed)
        expected = [
            max(line["shown"]["p"], key=line["shown"]["p"].get) == line["label"]
            for line in lines(file)
            if line["shown"]["p"] is not None
        ]
        assert list(before.values()) == expected and len(expected) == 40
    with world.session(file) as session:
        assert session.agreed == before
        session.undo("ann")
        assert len(session.agreed) == 39


@pytest.mark.parametrize("kind", ["choice", "multi", "score"])
def test_the_readout_learns_every_kind_of_task(kind: str, file: Path) -> None:
    world = World(task_of(kind))
    with world.session(file) as session:
        world.answers(session, "ann", 60)
        assert [len(fit.rows) for fit in session.fits] == [20, 40, 60]
        last = session.fits[-1]
        page = view_json(session, "ann")["progress"]
    figure = last.quality
    assert figure.low is not None and figure.value is not None and figure.high is not None
    assert figure.low <= figure.value <= figure.high and figure.value > 0.4
    assert page["points"][-1] == [60, figure.value, figure.low, figure.high]
    rest = np.setdiff1d(np.arange(world.rows), last.rows)
    aurocs = [
        roc_auc_score(world.truth[rest, n], last.p[rest, n]) for n in range(world.truth.shape[1])
    ]
    assert np.mean(aurocs) > 0.8
    if kind != "multi":
        np.testing.assert_allclose(last.p.sum(axis=1), 1)
    else:
        held = [roc_auc_score(last.targets[:, n], last.held_out[:, n]) for n in (0, 1)]
        assert figure.value == pytest.approx(np.mean(held))


def test_the_review_ends_at_the_quality_of_until(world: World, file: Path) -> None:
    until = parse_gate("tone.auroc >= .6", {"tone": world.task})
    with world.session(file, until=until) as session:
        while session.open_document("ann") is not None:
            world.answers(session, "ann", 1)
        view = view_json(session, "ann")
    assert len(lines(file)) == 20 and view["row"] is None
    assert view["note"].startswith("tone.auroc >= .6 is reached: AUROC ")


def test_labels_pay_until_a_doubling_improves_no_more() -> None:
    """Nothing can be learned from noise; from clear states everything after a few labels."""
    noise, clear = World(task_of(), rows=400, noise=30), World(task_of(), rows=400, noise=0.9)
    paid = {}
    for name, world in (("noise", noise), ("clear", clear)):
        fits = [
            refit(
                world.task,
                world.pool.states,
                world.pool.groups,
                np.arange(n),
                world.truth[:n].astype(float),
            )
            for n in (20, 40, 160)
        ]
        assert labels_pay(world.task, fits[:1]) is None
        paid[name] = labels_pay(world.task, fits)
    assert paid == {"noise": False, "clear": True}


def test_contradicting_people_teach_nothing_about_a_document(world: World, file: Path) -> None:
    with world.session(file) as session:
        rows = world.answers(session, "ann", 25)
    with world.session(file, second=True) as session:
        session.collect_fit(None)
        assert len(session.fits[0].rows) == 25
        wrong = {row: ["toxic", "clean"][world.label(row) == "toxic"] for row in rows}
        asked = world.answers(session, "bob", 25, lambda row: wrong[row])
        assert sorted(asked) == sorted(rows) and session.open_document("bob") is None
        [pair] = agreements(session.gold.answers.values(), world.task)
        assert (pair.people, pair.documents, pair.alike) == (("ann", "bob"), 25, 0)
        labels = np.array([[world.label(row), wrong[row]] for row in rows])
        assert pair.kappa == pytest.approx(cohen_kappa_score(*labels.T))
    with world.session(file, second=True) as session:  # — a third person decides
        world.answers(session, "eve", 25)
        session.collect_fit(None)
        assert len(session.fits[-1].rows) == 20 and {*session.fits[-1].rows} <= {*rows}


@pytest.mark.parametrize(("kind", "weights"), [("choice", None), ("score", "quadratic")])
@pytest.mark.parametrize("seed", range(10))
def test_kappa_is_that_of_scikit_learn(
    kind: str, weights: str | None, seed: int, file: Path
) -> None:
    source, labels = np.random.default_rng(seed), ["0", "1", "2", "3"]
    world = World(task_of(kind, labels), rows=30)
    one = source.integers(0, 4, world.rows)
    other = np.where(source.random(world.rows) < 0.5, one, source.integers(0, 4, world.rows))
    with world.session(file) as session:
        world.answers(session, "ann", world.rows, lambda row: labels[one[row]])
    with world.session(file, second=True) as session:
        world.answers(session, "bob", world.rows, lambda row: labels[other[row]])
        [pair] = agreements(session.gold.answers.values(), world.task)
    expected = cohen_kappa_score(one, other, weights=weights, labels=range(4))
    assert (pair.documents, pair.kappa) == (world.rows, pytest.approx(expected))


def test_kappa_is_undefined_where_chance_alone_makes_people_agree() -> None:
    assert np.isnan(kappa(np.zeros(3, int), np.zeros(3, int), 4))


@pytest.mark.parametrize("rules", [{"blind": False}, {"blind": True}, {"second": False}])
@pytest.mark.parametrize("kind", ["choice", "multi", "score"])
def test_the_page_of_an_audit_shows_no_answer_of_the_model(
    kind: str, rules: dict[str, Any], file: Path
) -> None:
    world = World(task_of(kind))
    world.pool = replace(world.pool, sample="x")
    with world.session(file, order=Order("audit"), **rules) as session:
        world.answers(session, "ann", 60)
        session.collect_fit(None)
        view = view_json(session, "ann")
        assert view["row"]["p"] is None and task_json(session, "")["blind"]
        assert not session.fits and view["progress"]["points"] == []
    for line in lines(file):
        shown = line["shown"]
        assert (shown["p"], shown["blind"], shown["chosen"]) == (None, True, "audit:x")


@pytest.mark.parametrize("error", [ValueError("no rows"), MemoryError(), RuntimeError("x")])
def test_a_fit_that_fails_is_named_and_the_next_one_is_tried(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    with world.session(file) as session:
        monkeypatch.setattr("pipeline.review.session.refit", fails)
        world.answers(session, "ann", 20)
        session.collect_fit(None)
        hint = view_json(session, "ann")["progress"]["hint"]
        assert "The last fit of a readout failed" in hint and "labels are kept" in hint
        monkeypatch.setattr("pipeline.review.session.refit", refit)
        world.answers(session, "ann", 20)
        session.collect_fit(None)
        assert len(session.fits) == 1 and session.failed_fit is None
        assert view_json(session, "ann")["progress"]["hint"] == ""
    assert len(lines(file)) == 40
