"""Certificates computed again from the answers that the output has. Entry: `wrong_certificates`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.evaluation.cascade_rules import Judged, wrong_by_rule
from pipeline.evaluation.promises import Proof, prove
from pipeline.fitted.certificate import Certificate
from pipeline.ledger.cells import stored_fps, stored_version
from pipeline.ledger.columns import probabilities, structs
from pipeline.ledger.keys import label_key
from pipeline.ledger.label_files import read_file
from pipeline.ledger.snapshots import Contents
from pipeline.runtime.conditions import drawn_below, draws
from pipeline.stores.store import Store


def wrong_certificates(store: Store, snapshot: Contents) -> Iterator[tuple[str, str]]:
    """By task, what a certificate of the snapshot says and the stored answers do not."""
    for task, certificate in snapshot.certificates.items():
        if certificate.thresholds is None or not certificate.shares:
            continue
        try:
            computed = _computed(store, snapshot, certificate)
        except StorageError as error:
            yield task, f"cannot be computed again: {error}"
            continue
        stated = {name: (own.trials, own.errors) for name, own in certificate.shares.items()}
        trials = {name: (own.trials, own.errors) for name, own in computed.shares.items()}
        if computed.rule != certificate.rule:
            yield task, "has a rule that the stored answers do not prove"
        elif trials != stated:
            yield task, f"says (trials, errors) {stated}, and the stored answers say {trials}"


def _computed(store: Store, snapshot: Contents, certificate: Certificate) -> Proof:
    """What the stored answers prove of the certificate's rule, and of the more careful ones."""
    of_task, kind = snapshot.tasks[certificate.task], _kind(snapshot, certificate.task)
    labels = list(of_task.labels)
    judged = Judged.of(labels, kind, certificate.promise)
    p = np.stack([_answers(store, snapshot, certificate, raw) for raw in certificate.stages])
    p = p[:, ~np.isnan(p).any(axis=(0, 2))]
    cheap, whole = p[:-1], p[-1]
    assert certificate.thresholds is not None, certificate.task
    rules = [
        *judged.rules(np.array(certificate.curves))[: certificate.rule],
        certificate.thresholds,
    ]
    wrong = (of_rule for _, of_rule in wrong_by_rule(rules, judged, cheap, whole))
    groups = np.array(certificate.groups) if certificate.groups else None
    return prove(wrong, judged.promise, judged.positive(whole), groups)


def _kind(snapshot: Contents, task: str) -> str:
    columns = snapshot.tasks[task].columns
    return next(
        (kind for kind, name in (("multi", "labels"), ("score", "score")) if name in columns),
        "choice",
    )


def _answers(
    store: Store, snapshot: Contents, certificate: Certificate, raw: str
) -> NDArray[np.float64]:  # [docs, labels]
    """What a stage answered about the second half of the sample."""
    task, limit = certificate.task, drawn_below(certificate.draw)
    versions = {fp: stored_version(store, task, fp) for fp in stored_fps(store, task)}
    own = [
        fp for fp, of in versions.items() if of.raw.id == raw and of.content.get("limit") == limit
    ]
    labels, parts = list(snapshot.tasks[task].labels), []
    for shard in snapshot.shards:
        of_shard = draws(shard.sid, shard.rows)
        second = (of_shard < certificate.draw) & (of_shard >= certificate.draw / 2)
        if not second.any():
            continue
        table = _first_file(store, [label_key(task, fp, shard.sid) for fp in own])
        rows = structs(table).take(pa.array(np.flatnonzero(second)))
        parts.append(probabilities(rows, labels))
    return np.concatenate(parts)


def _first_file(store: Store, keys: Sequence[str]) -> pa.Table:
    """The first of these label files that exists; StorageError if none does."""
    error: StorageError | None = None
    for key in keys:
        try:
            return read_file(store, key, ["p"])
        except StorageError as missing:
            error = missing
    raise error or StorageError(f"{store.url}: has no answers of a stage about the sample")
