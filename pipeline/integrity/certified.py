"""Certificates computed again from the answers that the output has. Entry: `wrong_certificates`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.evaluation.promises import Judged, Proof, prove, wrong_by_rule
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.ledger.cells import committed, stored_fps, stored_version
from pipeline.ledger.columns import probabilities, structs
from pipeline.ledger.label_files import read_file
from pipeline.ledger.snapshots import Contents
from pipeline.runtime.conditions import drawn_below, draws
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)


def wrong_certificates(store: Store, snapshot: Contents) -> Iterator[tuple[str, str]]:
    """By task, what a certificate of the snapshot says and the stored answers do not.

    It is not computed again where the snapshot has not all shards that it is about.
    """
    shards = hash_of(shard.sid for shard in snapshot.shards)
    for task, certificate in snapshot.certificates.items():
        if certificate.thresholds is None or not certificate.shares:
            continue
        if certificate.shards != shards:
            logger.info("%s: the certificate is of other shards: not computed again", task)
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
    p = p[:, ~np.isnan(p[-1]).any(axis=1)]
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
    task = certificate.task
    when, *_ = _conditions(stored_version(store, task, snapshot.tasks[task].fp))
    asked = when, None, drawn_below(certificate.draw)
    second = dict[
        str, NDArray[np.int64]
    ]()  # the rows of each shard that has documents of the sample
    for shard in snapshot.shards:
        drawn = draws(shard.sid, shard.rows)
        if (drawn < certificate.draw).any():
            is_second = (drawn < certificate.draw) & (drawn >= certificate.draw / 2)
            second[shard.sid] = np.flatnonzero(is_second)
    labels, missing = list(snapshot.tasks[task].labels), dict(second)
    parts = dict[str, NDArray[np.float64]]()
    for fp in stored_fps(store, task):
        version = stored_version(store, task, fp)
        if version.raw.id != raw or _conditions(version) != asked:
            continue
        done = committed(store, {task: fp}, missing, documents={})
        for sid in done.labels[task]:
            rows = structs(read_file(store, done.label_key(task, sid), ["p"]))
            parts[sid] = probabilities(rows.take(pa.array(missing.pop(sid))), labels)
    if missing:
        raise StorageError(
            f"{store.url}: has no answers of a stage about shard {next(iter(missing))}"
        )
    return np.concatenate([parts[sid] for sid in second])


def _conditions(version: Fingerprint) -> tuple[Any, Any, Any]:
    """The condition of the task, what a stage comes after, and the condition of the run."""
    when, after, limit = map(version.content.get, ("when", "after", "limit"))
    return when, after, limit
