"""A candidate is published only if its gates and limits hold; else the last one stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from calls import Assay, WriteSpec
from finished import LABELS, Corpus, commit_all, toy_fingerprints
from outcomes import toy_job
from stages import run_without_ray

import pipeline
from pipeline.evaluation.gates import Decision
from pipeline.integrity.diff import USUAL_LIMITS
from pipeline.ledger.cuts import Cuts
from pipeline.ledger.dataset import LabelDataset, open_labels
from pipeline.ledger.snapshots import Contents
from pipeline.options import EvalOptions
from pipeline.report.console import json_value
from pipeline.runtime.outcome import Outcome, Tally
from pipeline.runtime.plan import list_missing
from pipeline.sources.shards import Shard
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.gold import GoldSpec, PublishSpec
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.evaluate import evaluate
from pipeline.verbs.run import RunResult, judge

ANY_SHARES = USUAL_LIMITS.model_copy(update={"max_psi": 1e9})
ANYTHING = USUAL_LIMITS.model_copy(update={"max_psi": 1e9, "max_flip_rate": 1})


def labelled(
    store: LocalStore, shards: tuple[Shard, ...], fingerprints: Mapping[str, Fingerprint]
) -> Outcome:
    """What `run.label` gives of these shards."""
    job = toy_job(store.root, LABELS, fingerprints)
    return Outcome(job, store, list_missing(job, store, Cuts(shards, ())), Tally(), 0.0)


def done(
    store: LocalStore, corpus: Corpus, fingerprints: Mapping[str, Fingerprint] | None = None
) -> Outcome:
    versions = fingerprints or toy_fingerprints()
    shards = corpus.shards(store)
    commit_all(store, shards, versions)
    return labelled(store, shards, versions)


def current(store: LocalStore) -> int:
    return open_labels(str(store.root)).snapshot


def refuse(candidate: Contents) -> tuple[Decision, ...]:
    assert candidate.rows == 90 and candidate.number == 0
    return (Decision("toxic.f1 >= 0.8", 0.5, False), Decision("topic.f1 >= 0.1", 0.5, True))


def test_without_new_documents_no_snapshot_is_published(
    store: LocalStore, toy_corpus: Corpus
) -> None:
    first = judge(done(store, toy_corpus), None, USUAL_LIMITS)
    again = judge(done(store, toy_corpus), None, PublishSpec(max_psi=0, max_flip_rate=0))
    assert again.snapshot == first.snapshot == current(store) == 1
    assert not again.reasons


def test_a_failing_gate_rejects_the_first_snapshot(store: LocalStore, toy_corpus: Corpus) -> None:
    ended = judge(done(store, toy_corpus), refuse, ANYTHING)
    assert ended.reasons == ("FAILED: toxic.f1 >= 0.8 (it is 0.5000)",)
    assert not list(store.list("snapshots/"))


@pytest.mark.parametrize("bound, published", [(0.99, True), (1.01, False)])
def test_gold_scores_the_candidate_before_it_is_published(
    store: LocalStore, toy_corpus: Corpus, tmp_path: Path, bound: float, published: bool
) -> None:
    """The gold is what the candidate answers, so its accuracy is 1."""
    judge(done(store, toy_corpus), None, USUAL_LIMITS)
    changed = {**toy_fingerprints(), "topic": toy_fingerprints("2")["topic"]}
    candidate = done(store, toy_corpus, changed)
    answers = LabelDataset(store, candidate.contents, ("topic",)).to_table().to_pylist()
    lines = [f"{row['doc_id']},{row['topic']['label'] or ''}\n" for row in answers]
    gold = tmp_path / "gold.csv"
    gold.write_text("id,topic\n" + "".join(lines))
    publish = PublishSpec(gates=[f"topic.accuracy >= {bound}"])
    keys = {"gold": GoldSpec(path=str(gold)), "publish": publish}
    spec, options = candidate.job.spec.model_copy(update=keys), EvalOptions()

    def gate(contents: Contents) -> tuple[Decision, ...]:
        return evaluate(spec, options, cache_dir=tmp_path, candidate=contents).gates

    ended = judge(candidate, gate, ANYTHING)
    assert [each.value for each in ended.gates] == [1.0]
    assert ended.published == published
    assert current(store) == (2 if published else 1)


def test_flipped_answers_are_rejected_and_the_old_snapshot_stays(
    store: LocalStore, toy_corpus: Corpus
) -> None:
    judge(done(store, toy_corpus), None, USUAL_LIMITS)
    changed = {**toy_fingerprints(), "topic": toy_fingerprints("2")["topic"]}
    candidate = done(store, toy_corpus, changed)
    ended = judge(candidate, None, ANY_SHARES)
    (reason,) = ended.reasons
    assert reason.startswith("the answers of topic flipped: ")
    assert current(store) == 1 and not ended.published
    assert judge(candidate, None, ANY_SHARES).reasons == ended.reasons
    written = json_value(ended)
    assert written["published"] is False and written["diff"]["tasks"]["topic"]["flip_rate"] > 0.05
    assert judge(candidate, None, ANYTHING).snapshot == current(store) == 2


def test_an_incomplete_run_is_not_compared(store: LocalStore, toy_corpus: Corpus) -> None:
    versions, shards = toy_fingerprints(), toy_corpus.shards(store)
    commit_all(store, shards[:-1], versions)
    ended: RunResult = judge(labelled(store, shards, versions), refuse, ANYTHING)
    assert not ended.complete and not ended.published and not ended.reasons


def test_scheduled_runs_label_and_publish_once(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    run_without_ray(monkeypatch)
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": f"d{i}", "text": f"number {i} says hello"} for i in range(6)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gold = tmp_path / "gold.csv"
    gold.write_text("id,toxic\nd0,toxic\nd1,clean\n")
    limits = {"max_psi": 0.1, "max_flip_rate": 0.05, "max_failing": 0.05}

    def run(code: int, **publish: Any) -> Any:
        spec = write_spec(gold={"path": str(gold)}, publish={**limits, **publish})
        return assay("run", spec, "--json", code=code).json

    first, second = run(0), run(0)
    assert (first["snapshot"], first["documents_labelled"]) == (1, 6)
    assert (second["snapshot"], second["documents_labelled"]) == (1, 0)
    assert second["diff"]["tasks"]["toxic"]["flip_rate"] == 0
    rejected = run(1, gates=["toxic.accuracy > 1"])
    assert [each["passed"] for each in rejected["gates"]] == [False]
    assert len(rejected["reasons"]) == 1 and not rejected["published"]
    assert pipeline.run(load_spec(tmp_path / "spec.yaml")).snapshot is None
    names = {f.name for f in (tmp_path / "out" / "snapshots").iterdir()}
    assert names == {"00000001.json", "00000001.parquet"}


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"publish": {"gates": ["toxic.f1 > 0.5"]}}, "gold.path: missing"),
        ({"publish": {"gates": ["toxic.much > 0.5"]}}, "publish.gates.0: no such metric"),
        ({"publish": {"gates": ["topic.f1 > .5"]}, "gold": {"path": "gold.csv"}}, "no labels for"),
        ({"publish": {"max_psi": "nan"}}, "publish.max_psi: write a number"),
        ({"publish": {"max_psi": -1}}, "publish.max_psi: write a number of at least 0"),
        ({"publish": {"max_flip_rate": 1.01}}, "publish.max_flip_rate: write a number of at most"),
        ({"publish": {"max_failing": "nan"}}, "publish.max_failing: write a number"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_any_work(
    keys: dict[str, Any],
    reason: str,
    write_spec: WriteSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.csv").write_text("id,toxic\nd0,toxic\n")
    assert reason in assay("run", write_spec(**keys), code=2).error
    assert not (tmp_path / "out").exists()
