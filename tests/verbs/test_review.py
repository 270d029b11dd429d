"""`assay review` refuses wrong options before it reads a model, and draws samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_corpus import Corpus
from known_corpus import Known, known_corpus

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.gold.people import AUDIT, GoldFile, GoldLine, Shown
from pipeline.options import AuditOptions
from pipeline.review.options import ReviewOptions
from pipeline.sources.documents import RawRow, documents_from
from pipeline.verbs.audit import audit
from pipeline.verbs.audit_sample import sample_hashes
from pipeline.verbs.review import open_review


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return known_corpus(tmp_path_factory.mktemp("known"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--task", "tone"], "--task: the spec has no such task; it has toxic, topic (got 'tone')"),
        (["--by", "most"], "--by: write mixed, uncertain, "),
        (["--by", "near:2"], "--by: write a threshold from 0 to 1"),
        (["--until", "best"], "--until: write METRIC >= NUMBER, as in 'auroc >= .95', "),
        (["--until", "recall.toxic > .9"], "--until: write METRIC >= NUMBER, "),
        (["--pool", "0"], "--pool: write a number above 0 (got 0)"),
        (["--to", "gold.csv"], "--to: end the name in .jsonl (got 'gold.csv')"),
        (["--to", "s3://bucket/gold.jsonl"], "--to: people's labels are written to a local file"),
    ],
)
def test_a_wrong_option_is_one_line_and_no_file_is_made(
    words: list[str],
    line: str,
    write_spec: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["review", str(write_spec()), "--task", "toxic", "--to", "gold.jsonl"]
    assert main([*command, *words]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(line)
    assert not list(tmp_path.glob("gold*"))


def test_until_has_the_metrics_of_several_labels_as_a_whole(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    themes = {"name": "themes", "kind": "multi", "question": "About {label}?", "labels": ["a", "b"]}
    command = ["review", str(write_spec(tasks=[themes])), "--task", "themes", "--to", "gold.jsonl"]
    for until in ("auroc >= .9", "auroc.a >= .9"):
        assert main([*command, "--until", until]) == 2
        [error] = capsys.readouterr().err.splitlines()
        assert error.startswith("--until: write METRIC >= NUMBER, as in 'macro_auroc >= .95', with")
        assert error.endswith(f"whole task: macro_f1, macro_auroc (got '{until}')")


def test_a_sample_that_is_labelled_on_the_page_gives_the_audit_of_its_file(
    known: Known, tmp_path: Path
) -> None:
    spec, chosen = known.spec(keep="toxic.p.toxic < 0.5"), {"documents": 120, "seed": 1}
    drawn = known.draw(spec, **chosen)
    known.label(("toxic",))
    expected = known.audit(spec)
    name, hashes = sample_hashes(spec, AuditOptions(**chosen), cache_dir=tmp_path / "cache")
    assert len(hashes) == drawn.drawn == 120
    task, file = spec.tasks[0], tmp_path / "gold.jsonl"
    texts = list(known.by_text)
    own = documents_from(RawRow(text) for text in texts)["content_hash"].to_pylist()
    with GoldFile.open(file, task) as gold:
        for text, text_hash in zip(texts, own, strict=True):
            if text_hash in hashes:
                gold.append(_line(text_hash, task, known.by_text[text]["toxic"], f"{AUDIT}{name}"))
    result = audit(spec, AuditOptions(gold=str(file)), cache_dir=tmp_path / "cache")
    assert (result.precision, result.recall) == (expected.precision, expected.recall)
    assert result.prevalence == expected.prevalence
    # — a label that was given in view of the model's answer is no evidence
    *lines, last = map(json.loads, file.read_text().splitlines())
    last["shown"]["p"] = {"toxic": 0.9, "clean": 0.1}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    with pytest.raises(SpecError, match=r"gold: is no evidence about a filter: .* in view"):
        audit(spec, AuditOptions(gold=str(file)), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["choice", "multi", "score"])
def test_disagreement_shows_what_a_person_taught_the_readout_against_the_ledger(
    kind: str, modelled: Corpus
) -> None:
    labels = ["0", "1"] if kind == "score" else ["law", "art"]
    modelled.task = {"name": "tone", "kind": kind, "question": "{label}?", "labels": labels}
    rest = ["xyz" if n % 2 else "789" for n in range(60)]
    modelled.write("old", [f"{n} {text * 3}" for n, text in enumerate(rest)])
    modelled.run()
    modelled.write("new", [f"{n}. {text * 3}" for n, text in enumerate(rest[:9])])
    gold = str(modelled.folder / "gold.jsonl")
    options = ReviewOptions("tone", gold, order="disagreement")
    with open_review(modelled.spec, options, cache_dir=modelled.cache, announce=_quiet) as session:
        pool = session.pool
        assert pool.ledger is not None and len(pool) == 69
        rows = modelled.rows()
        for doc_id, ledger in zip(pool.doc_ids, pool.ledger, strict=True):
            expected = [rows[doc_id]["p"][label] for label in labels] if doc_id in rows else np.nan
            np.testing.assert_array_equal(ledger, expected)
        for _ in range(20):
            asked = session.open_document("ann")
            assert asked is not None and asked.chosen == "diverse"
            label: Any = labels["789" in pool.texts[asked.row]]
            label = [label] if kind == "multi" else label
            session.answer("ann", pool.hashes[asked.row], "label", label)
        session.collect_fit(None)
        asked = session.open_document("ann")
        assert asked is not None and asked.chosen == "disagreement"
        [fit] = session.fits
        apart = np.abs(fit.p - pool.ledger).max(axis=1)
        unseen = np.setdiff1d(np.flatnonzero(~np.isnan(apart)), fit.rows)
        assert asked.row in unseen and apart[asked.row] == apart[unseen].max()


def _quiet(_: int) -> Callable[[int], None]:
    return lambda _: None


def _line(text_hash: str, task: Any, label: str, chosen: str) -> GoldLine:
    shown, at = Shown.of(task, chosen=chosen), "2026-11-26T00:00:00+00:00"
    return GoldLine("d", text_hash, task.name, "label", label, "ann", at, 1.0, shown)
