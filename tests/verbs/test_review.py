"""`assay review` refuses wrong options before it reads a model, and draws the audit's sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from known_corpus import Known, known_corpus

from pipeline.cli import main
from pipeline.gold.people import AUDIT, GoldFile, GoldLine, Shown
from pipeline.options import AuditOptions
from pipeline.sources.documents import RawRow, documents_from
from pipeline.verbs.audit import audit
from pipeline.verbs.audit_sample import sample_hashes


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


def _line(text_hash: str, task: Any, label: str, chosen: str) -> GoldLine:
    shown, at = Shown.of(task, chosen=chosen), "2026-11-26T00:00:00+00:00"
    return GoldLine("d", text_hash, task.name, "label", label, "ann", at, 1.0, shown)
