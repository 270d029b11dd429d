"""A run that teaches itself: cheap answers for a cascade, and the proof of what they promise.

Entry point: `certify`, which a run calls before it labels. For each cascade that has no certificate
of the current input:

1. the last stage, the whole model, answers a uniform sample of documents;
2. `auto`: readouts of early layers are fitted to these answers, on the first half of the sample;
3. the stages before the last answer the sample; rules are made of the first half, and the second
   half proves the cheapest one that keeps the promise;
4. the certificate is written; the run that follows has the stages and thresholds that it names.

All answers are cells of the output, so nothing is asked twice, also after a run that was killed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import UnavailableError
from pipeline.evaluation.cascade_rules import Judged, wrong_by_rule
from pipeline.evaluation.promises import prove
from pipeline.fitted.certificate import Certificate, Share, Thresholds
from pipeline.hashes import short_hash
from pipeline.ledger.certificates import write_certificate
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.options import RunOptions
from pipeline.runtime.conditions import drawn_below, draws
from pipeline.runtime.job import Job, fitted_stage, job_of_output
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask, StageSpec, TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.teach import Taught, teach

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.1  # of the documents
LEAST_SAVED = 0.05  # of a whole run; less does not pay for the sample
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Announce = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Documents that were drawn, with answers: the same rows in the same order, whoever answers."""

    rows: pa.Table  # sid, row in the shard, draw, content_hash, and a struct for each task
    fps: Mapping[str, str]  # by task, the raw fingerprint
    job: Job

    def p(self, task: TaskSpec) -> Floats:  # [docs, labels]; NaN without an answer
        return probabilities(self.rows[task.name].combine_chunks(), list(task.labels))


@dataclass(frozen=True, slots=True)
class _Run:
    """How a run reads: what its parts have in common."""

    spec: JobSpec
    cache_dir: Path
    address: str | None
    options: RunOptions
    announce: Announce
    began: float  # seconds since the epoch
    shards: Mapping[str, Shard]  # of the input, by id

    def sample(self, tasks: Mapping[str, TaskSpec], share: float) -> _Sample:
        """The documents of the sample, with the answers of these tasks in the place of the spec's.

        UnavailableError if some are missing.
        """
        own = (tasks.get(task.name, task) for task in self.spec.tasks)
        plain = tuple(task.whole if isinstance(task, CascadeTask) else task for task in own)
        with label(
            self.spec.model_copy(update={"tasks": plain}),
            cache_dir=self.cache_dir,
            address=self.address,
            options=replace(self.options, publish_partial=False),
            limit=drawn_below(share),
            announce=self.announce,
            began=self.began,
        ) as labelled:
            if not labelled.complete:
                raise UnavailableError(f"the sample of a cascade is not complete; {labelled.left}")
            fps = {name: labelled.job.fingerprints[name].raw.id for name in tasks}
            return _Sample(_drawn(labelled, sorted(tasks), share), fps, labelled.job)


def _drawn(labelled: Outcome, tasks: Sequence[str], share: float) -> pa.Table:
    """The rows of the sample; see `_Sample`."""
    wide = wide_schema(labelled.contents, tasks)
    schema = pa.schema([wide.field(name) for name in ("content_hash", *tasks)])
    tables = []
    batches = aligned_batches(labelled.store, labelled.contents, schema)
    for shard, batch in zip(labelled.contents.shards, batches, strict=True):
        of_shard = draws(shard.sid, shard.rows)
        rows = np.flatnonzero(of_shard < share)
        places = {
            "sid": pa.repeat(shard.sid, len(rows)),
            "row": pa.array(rows),
            "draw": pa.array(of_shard[rows]),
        }
        own = pa.Table.from_batches([batch.take(pa.array(rows))])
        for name, values in places.items():
            own = own.append_column(name, values)
        tables.append(own)
    return pa.concat_tables(tables)


def certify(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Announce = ignore,
) -> None:
    """Writes a certificate for each cascade that has none of the current input.

    A run with a condition of its own proves nothing: it uses the certificates that there are.
    UnavailableError if a shard of the sample could not be labelled; run again.
    """
    if not spec.cascades or options.sample or options.where:
        return
    store = open_store(spec.output, spec.storage_options)
    job = job_of_output(spec, store, cache_dir)
    planned = plan(job, store, keep=False)
    shards = hash_of(planned.shards)
    known = job.certificates
    waiting = {
        task.name: task
        for task in spec.cascades
        if task.name not in known or known[task.name].shards != shards
    }
    if not waiting or not planned.rows:
        return
    by_id = {shard.id: shard for shard in planned.shards}
    run = _Run(spec, cache_dir, address, options, announce, time.time(), by_id)
    most = max(task.cascade.sample for task in waiting.values())
    # — the share of an earlier sample stays, so that new files give it their part
    drawn = [known[name].draw for name in waiting if name in known]
    share = max(drawn, default=round(min(LARGEST_SHARE, most / planned.rows), 9))
    whole = run.sample({name: task.whole for name, task in waiting.items()}, share)
    for name, task in waiting.items():
        own = _Cascade.of(run, task, whole, share)
        found = own.proved_again(known[name]) if name in known else None
        found = found or own.proved()
        write_certificate(store, replace(found, shards=shards))
        logger.info("%s: %s", name, found.words)


def hash_of(shards: Sequence[Shard]) -> str:
    """The hash of the input that a certificate is about."""
    return short_hash("\n".join(sorted(shard.id for shard in shards)).encode())


@dataclass(frozen=True, slots=True)
class _Cascade:
    """One cascade, whose sample the last stage has answered."""

    run: _Run
    task: CascadeTask
    whole: _Sample
    share: float
    judged: Judged
    p: Floats  # [docs, labels] of the last stage; NaN without an answer

    @classmethod
    def of(cls, run: _Run, task: CascadeTask, whole: _Sample, share: float) -> _Cascade:
        judged = Judged.of(list(task.labels), task.kind, task.cascade.promise)
        return cls(run, task, whole, share, judged, whole.p(task))

    @property
    def _is_first(self) -> Bools:  # [docs]: of the first half, to which everything is fitted
        drawn: Floats = self.whole.rows["draw"].to_numpy()
        return np.asarray(drawn < self.share / 2, np.bool_)

    def proved(self) -> Certificate:
        """The certificate of the cheapest rule that keeps the promise, or of none."""
        answered = ~np.isnan(self.p).any(axis=1)
        if lack := self._lack(answered & ~self._is_first):
            return self._nothing(lack)
        stages, taught = self.task.stages[:-1], None
        if self.task.cascade.is_auto:
            first = answered & self._is_first
            rows = self.whole.rows.take(np.flatnonzero(first))
            taught = teach(
                self.run.spec,
                self.task,
                self.run.shards,
                rows,
                self.p[first],
                self.judged,
                dtype=self.whole.job.placement.dtype,
                cache_dir=self.run.cache_dir,
            )
            if taught is None:
                return self._nothing("no readout of an early layer is sure enough to save anything")
            stages = (self._fitted(taught.readout, taught.max_tokens),)
        p, fps = self._answers(stages)
        usable = answered & ~np.isnan(p).any(axis=(0, 2))
        first, second = usable & self._is_first, usable & ~self._is_first
        pooled = p[:, first].reshape(-1, p.shape[-1])
        rules = self.judged.rules(pooled, np.tile(self.p[first], (len(stages), 1)))
        return self._certificate(rules, p[:, second], second, fps, taught)

    def proved_again(self, known: Certificate) -> Certificate | None:
        """The same stages and thresholds, of the input as it is now; None if they do not hold."""
        if known.thresholds is None:
            return None
        stages = self.task.stages[:-1]
        if known.readout:
            stages = (self._fitted(known.readout, known.max_tokens),)
        p, fps = self._answers(stages)
        second = ~self._is_first & ~np.isnan(self.p).any(axis=1) & ~np.isnan(p).any(axis=(0, 2))
        taught = Taught(known.readout, known.max_tokens, known.layer, known.cost)
        found = self._certificate([known.thresholds], p[:, second], second, fps, taught)
        return None if found.thresholds is None else found

    def _fitted(self, readout: str, max_tokens: int | None) -> StageSpec:
        return fitted_stage(self.task, self.run.spec, readout, max_tokens)

    def _answers(self, stages: Sequence[StageSpec]) -> tuple[Floats, list[str]]:
        """[stages, docs, labels] of the sample, and the raw fingerprints."""
        name, when = self.task.name, {"when": self.task.when}
        samples = [
            self.run.sample({name: stage.model_copy(update=when)}, self.share) for stage in stages
        ]
        return np.stack([own.p(self.task) for own in samples]), [own.fps[name] for own in samples]

    def _lack(self, second: Bools) -> str:
        """Why the second half of the sample can prove nothing; ""."""
        promise, trials = self.judged.promise, {"agree": int(second.sum())}
        positive = self.judged.positive(self.p[second])
        if positive is not None:
            trials |= dict.fromkeys(("recall", "precision"), int(positive.sum()))
        for name, share in promise.shares.items():
            if trials[name] < (needed := promise.trials_needed(name)):
                which = "documents" if name == "agree" else "positive documents"
                rows = len(self.p) / self.share
                enough = np.ceil(rows * needed / max(trials[name], 1))
                return (
                    f"{name} {share:g} needs {needed:,} {which} in the second half of the sample, "
                    f"which has {trials[name]:,}; about {enough:,.0f} documents in all, or a "
                    "larger cascade.sample, would be enough"
                )
        return ""

    def _certificate(
        self,
        rules: Sequence[Thresholds],
        p: Floats,  # [stages, docs, labels]
        second: Bools,  # these documents
        fps: Sequence[str],
        taught: Taught | None,
    ) -> Certificate:
        whole = self.p[second]
        answers = [*wrong_by_rule(rules, self.judged, p, whole)]
        proof = prove(
            [wrong for _, wrong in answers], self.judged.promise, self.judged.positive(whole)
        )
        shares = {
            name: Share(self.judged.promise.shares[name], test.trials, test.errors, test.proved)
            for name, test in proof.tests.items()
        }
        if proof.rule < 0:
            careful = ", ".join(f"{name} {own.proved:.3f}" for name, own in shares.items())
            nothing = self._nothing(f"the most careful rule proves {careful} alone", fps)
            return replace(nothing, documents=len(whole), shares=shares)
        decided = float(answers[proof.rule][0].mean())
        cost = taught.cost if taught else 0.0
        if decided - cost < LEAST_SAVED:
            saved = f"it would decide {decided:.0%} and cost {cost:.0%} of a whole reading"
            return replace(self._nothing(saved, fps), documents=len(whole), shares=shares)
        return Certificate(
            task=self.task.name,
            promise=self.task.cascade.promise,
            stages=(*fps, self.whole.fps[self.task.name]),
            thresholds=rules[proof.rule],
            reason="",
            readout=taught.readout if taught else "",
            max_tokens=taught.max_tokens if taught else None,
            layer=taught.layer if taught else None,
            cost=cost,
            draw=self.share,
            shards="",
            documents=len(whole),
            decided=decided,
            shares=shares,
        )

    def _nothing(self, reason: str, cheap: Sequence[str] = ()) -> Certificate:
        """The certificate of a cascade whose last stage answers everything.

        `cheap` are the stages that it was tried with: others may save something.
        """
        fps = (*(() if self.task.cascade.is_auto else cheap), self.whole.fps[self.task.name])
        return Certificate(
            task=self.task.name,
            promise=self.task.cascade.promise,
            stages=fps,
            thresholds=None,
            reason=reason,
            readout="",
            max_tokens=None,
            layer=None,
            cost=0.0,
            draw=self.share,
            shards="",
            documents=0,
            decided=0.0,
            shares={},
        )
