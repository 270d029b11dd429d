"""A labelled and published corpus whose truth is known, for audits of it: fixture `known`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import finish, toy_spec
from label_tables import label_rows
from numpy.typing import NDArray

from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.label_files import LabelFile
from pipeline.options import EvalOptions, ReviewOptions
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import Columns, JobSpec
from pipeline.stores.local import LocalStore
from pipeline.verbs.audit import FilterQuality
from pipeline.verbs.evaluate import evaluate
from pipeline.verbs.review import open_review

TEXTS, COPIES = 560, 40
LABELS = {
    "toxic": ("toxic", "clean"),
    "spam": ("spam", "other"),
    "language": ("English", "Spanish", "French"),
}


@dataclass(frozen=True)
class Known:
    """A labelled corpus, with the truth and the answers of each document."""

    folder: Path
    truth: Mapping[str, NDArray[np.str_]]  # [documents] of each task
    p: Mapping[str, NDArray[np.float32]]  # [documents, labels] of each task
    sources: NDArray[np.str_]  # [documents]
    texts: NDArray[np.str_]  # [documents]
    by_text: Mapping[str, Mapping[str, str]]

    def spec(self, **rule: Any) -> JobSpec:
        return parse_spec(json.dumps(self.content(**rule)))

    def content(self, **rule: Any) -> dict[str, Any]:
        tasks = [{"name": t, "question": "?", "labels": [*each]} for t, each in LABELS.items()]
        source = {"path": str(self.folder / "in.jsonl"), "id": "id"}
        return toy_spec(self.folder, input=source, tasks=tasks, filter=rule)

    def review(
        self,
        spec: JobSpec,
        file: Path,
        should_drop: Callable[[Mapping[str, str]], bool],
        *,
        most: int | None = None,
        **options: Any,
    ) -> None:
        """A person labels the sample of an audit, or `most` documents of it, by the truth."""
        named = ReviewOptions(str(file), order="audit", **options)
        with open_review(spec, named, cache_dir=self.folder / "cache") as session:
            while (asked := session.open_document("ann")) is not None and most != 0:
                document = session.pool.documents[asked.row]
                label = "yes" if should_drop(self.by_text[document.text]) else "no"
                session.answer("ann", document.hash, "label", label)
                most = None if most is None else most - 1

    def quality(self, spec: JobSpec, file: Path) -> FilterQuality:
        """The estimates of the filter from the labels of an audit."""
        options = EvalOptions(gold=str(file))
        evaluated = evaluate(spec, options, cache_dir=self.folder / "cache")
        assert evaluated.filter is not None
        return evaluated.filter


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """600 documents, of which 40 have the text of another one, mostly in another source."""
    folder, random = tmp_path_factory.mktemp("known"), np.random.default_rng(0)
    same = np.concatenate([np.arange(TEXTS), random.choice(TEXTS, COPIES, replace=False)])
    shares = {"toxic": (0.2, 0.8), "spam": (0.25, 0.75), "language": (0.7, 0.2, 0.1)}
    truth = {t: random.choice(LABELS[t], TEXTS, p=p)[same] for t, p in shares.items()}
    sources = random.choice(["web", "forum"], len(same))
    texts = [f"={number} is a text" for number in same]
    p = {}
    for task, labels in LABELS.items():
        is_true = truth[task][:, None] == np.array(labels)
        raw = random.gamma(0.4 + 1.6 * is_true)
        raw[TEXTS:] = raw[same[TEXTS:]]  # — of equal texts the answers are equal
        p[task] = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
    rows = [
        {"id": str(number), "text": text, "source": str(source)}
        for number, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _publish(folder, p)
    by_text = {
        text: {task: str(truth[task][number]) for task in LABELS}
        for number, text in enumerate(texts)
    }
    return Known(folder, truth, p, sources, np.array(texts), by_text)


def _publish(folder: Path, p: Mapping[str, NDArray[np.float32]]) -> None:
    store = LocalStore(folder / "out")
    objects = find_objects(str(folder / "in.jsonl"), folder / "cache")
    shards = load_or_cut(store, objects, Columns("text", "id"), 40_000).shards
    assert len(shards) > 2

    def answer(shard: Shard, task: str, fingerprint: Fingerprint) -> LabelFile:
        of_shard = p[task][shard.piece.start_row : shard.piece.end_row]
        rows = label_rows(of_shard, LABELS[task], mass=np.ones(len(of_shard), np.float32))
        metadata = {"task": task, "fp": fingerprint.id}
        return LabelFile(task, fingerprint.id, shard.id, rows, metadata)

    fingerprints = {task: Fingerprint({"task": task}) for task in LABELS}
    finish(store, shards, fingerprints, labels=LABELS, answer=answer)
