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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import UnavailableError
from pipeline.evaluation.cascade_rules import Judged, wrong_by_rule
from pipeline.evaluation.promises import Groups, Promise, prove
from pipeline.fitted.certificate import Certificate, Thresholds
from pipeline.hashes import short_hash
from pipeline.ledger.certificates import write_certificate
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.options import RunOptions
from pipeline.runtime.cascades import fitted_stage
from pipeline.runtime.conditions import check, drawn_below, draws
from pipeline.runtime.job import Job, job_of_output
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.sources.condition import input_columns
from pipeline.sources.shards import Shard
from pipeline.spec.parse import spec_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import StageSpec
from pipeline.spec.tasks import CascadeSpec, CascadeTask, TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.teach import Taught, Texts, teach, texts_of

logger = logging.getLogger(__name__)

SAMPLE, LARGEST_SHARE = 2_000, 0.1  # documents, and a share of all
LEAST_SAVED = 0.05  # of a whole run; less does not pay for the sample
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Announce = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Documents that were drawn, with answers: the same rows in the same order, whoever answers."""

    rows: pa.Table  # sid, row in the shard, draw, content_hash, and a struct for each task
    share: float  # of all documents; a document with a draw below it is one of them
    fps: Mapping[str, str]  # by task, the raw fingerprint
    job: Job

    @property
    def first_half(self) -> Bools:  # [docs], to which everything is fitted
        drawn: Floats = self.rows["draw"].to_numpy()
        return np.asarray(drawn < self.share / 2, np.bool_)

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
            return _Sample(_drawn(labelled, sorted(tasks), share), share, fps, labelled.job)

    def values(self, sample: _Sample, column: str) -> Groups:  # [docs]
        """The value of a column of the input, of each document of the sample, as a text."""
        options, texts = self.spec.input.storage_options, list[str]()
        pairs = zip(sample.rows["sid"].to_pylist(), sample.rows["row"].to_pylist(), strict=True)
        for sid, of_shard in groupby(pairs, itemgetter(0)):
            values = input_columns(self.shards[sid], [column], options).to_pydict().get(column, [])
            texts += [str(values[row]) if row < len(values) else "" for _, row in of_shard]
        return np.array(texts, np.str_)

    def texts(self, sample: _Sample, rows: Bools) -> Texts:
        """These rows of the sample, as texts to fit readouts to."""
        own = sample.rows.take(pa.array(np.flatnonzero(rows)))
        tokens = np.zeros(own.num_rows, np.int64)
        for name in sample.fps:
            read = pc.struct_field(own[name].combine_chunks(), "n_tokens")
            tokens = np.maximum(tokens, pc.fill_null(read, 0).to_numpy(zero_copy_only=False))
        texts = texts_of(self.shards, self.spec.input.storage_options, own)
        return Texts(self.spec, texts, tokens, sample.job.placement.dtype, self.cache_dir)


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


def with_cascades(spec: JobSpec) -> JobSpec:
    """The spec with `cascade: auto` in each task with a question; SpecError where none can be."""
    content = spec.model_dump(exclude_unset=True)
    for task in content["tasks"]:
        if task.get("question") is not None:
            task["cascade"] = "auto"
    return spec_of(content)


def certify(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Announce = ignore,
) -> None:
    """Writes a certificate for each cascade that has none of the current input.

    Where the rule of an earlier certificate is not proved again, a new rule is tested with the same
    documents: each of the two tests has the risk that the promise states. A run with a condition of
    its own proves nothing: it uses the certificates that there are.
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
    for task in waiting.values():
        if task.cascade.by is not None:
            place, named = f"tasks.{spec.tasks.index(task)}.cascade.by", f'doc."{task.cascade.by}"'
            check(f"{named} IS NULL", planned.shards, spec.input.storage_options, place=place)
    by_id = {shard.id: shard for shard in planned.shards}
    run = _Run(spec, cache_dir, address, options, announce, time.time(), by_id)
    most = max(_to_draw(task.cascade) for task in waiting.values())
    # — the share of an earlier sample stays, so that new files give it their part
    drawn = [known[name].draw for name in waiting if name in known]
    share = max(drawn, default=round(min(LARGEST_SHARE, most / planned.rows), 9))
    whole = run.sample({name: task.whole for name, task in waiting.items()}, share)
    cascades = {name: _Cascade.of(run, task, whole) for name, task in waiting.items()}
    again = {name: own.trial_of(known[name]) for name, own in cascades.items() if name in known}
    found = {name: own for name, own in _tried(run, cascades, again) if own.thresholds is not None}
    texts = cache(partial(run.texts, whole, whole.first_half))
    trials = {name: own.trial(texts) for name, own in cascades.items() if name not in found}
    for name, certificate in (found | dict(_tried(run, cascades, trials))).items():
        write_certificate(store, replace(certificate, shards=shards))
        logger.info("%s: %s", name, certificate.words)


def _to_draw(cascade: CascadeSpec) -> int:
    """The documents of a sample."""
    promise = Promise(cascade.agree, cascade.recall, cascade.precision, cascade.confidence)
    # — two halves, of which the second one may have some errors
    needed = 4 * max(map(promise.trials_needed, promise.shares))
    return cascade.sample or max(SAMPLE, needed)


def hash_of(shards: Sequence[Shard]) -> str:
    """The hash of the input that a certificate is about."""
    return short_hash("\n".join(sorted(shard.id for shard in shards)).encode())


@dataclass(frozen=True, slots=True)
class _Trial:
    """Cheap answers that may decide, and how."""

    stages: tuple[StageSpec, ...]  # before the last; none: nothing is tried
    reason: str = ""  # why nothing is tried
    taught: Taught | None = None
    thresholds: Thresholds | None = None  # None: they are made from the first half of the sample


def _tried(
    run: _Run, cascades: Mapping[str, _Cascade], trials: Mapping[str, _Trial]
) -> Iterator[tuple[str, Certificate]]:
    """By cascade, what a trial proves. Stages of all cascades answer in the same readings."""
    answers = defaultdict[str, list[Floats]](list)
    fps = defaultdict[str, list[str]](list)
    for number in range(max((len(trial.stages) for trial in trials.values()), default=0)):
        stages = {
            name: trial.stages[number].model_copy(update={"when": cascades[name].task.when})
            for name, trial in trials.items()
            if len(trial.stages) > number
        }
        sample = run.sample(stages, next(iter(cascades.values())).whole.share)
        for name in stages:
            answers[name].append(sample.p(cascades[name].task))
            fps[name].append(sample.fps[name])
    for name, trial in trials.items():
        own = cascades[name]
        if trial.reason:
            yield name, own.nothing(trial.reason)
        else:
            yield name, own.certificate(trial, np.stack(answers[name]), fps[name])


@dataclass(frozen=True, slots=True)
class _Cascade:
    """One cascade, whose sample the last stage has answered."""

    spec: JobSpec
    task: CascadeTask
    whole: _Sample
    judged: Judged
    p: Floats  # [docs, labels] of the last stage; NaN without an answer
    groups: Groups | None  # [docs], of which each keeps the promise; None: all documents do

    @classmethod
    def of(cls, run: _Run, task: CascadeTask, whole: _Sample) -> _Cascade:
        judged = Judged.of(list(task.labels), task.kind, task.cascade.promise)
        groups = None if task.cascade.by is None else run.values(whole, task.cascade.by)
        return cls(run.spec, task, whole, judged, whole.p(task), groups)

    def trial(self, texts: Callable[[], Texts]) -> _Trial:
        """What is tried first: the stages of the spec, or a readout that is fitted now."""
        first = self.whole.first_half
        if lack := self._lack(~np.isnan(self.p).any(axis=1) & ~first):
            return _Trial((), lack)
        if not self.task.cascade.is_auto:
            return _Trial(self.task.stages[:-1])
        taught = teach(texts(), self.task, self.p[first], self.judged)
        if taught is None:
            return _Trial((), "no readout of an early layer is sure enough to save anything")
        return _Trial((self._fitted(taught.readout, taught.max_tokens),), taught=taught)

    def trial_of(self, known: Certificate) -> _Trial:
        """The stages and the thresholds of a certificate, for the input as it is now."""
        if known.thresholds is None:
            return _Trial((), known.reason)
        if not known.readout:
            return _Trial(self.task.stages[:-1], thresholds=known.thresholds)
        taught = Taught(known.readout, known.max_tokens, known.layer, known.cost)
        stage = self._fitted(known.readout, known.max_tokens)
        return _Trial((stage,), taught=taught, thresholds=known.thresholds)

    def _fitted(self, readout: str, max_tokens: int | None) -> StageSpec:
        return fitted_stage(self.task, self.spec, readout, max_tokens)

    def _lack(self, second: Bools) -> str:
        """Why the second half of the sample can prove nothing; ""."""
        promise = self.judged.promise
        for group in [""] if self.groups is None else np.unique(self.groups):
            own = second if self.groups is None else second & (self.groups == group)
            trials, positive = {"agree": int(own.sum())}, self.judged.positive(self.p[own])
            if positive is not None:
                trials |= dict.fromkeys(("recall", "precision"), int(positive.sum()))
            for name, share in promise.shares.items():
                if trials[name] < (needed := promise.trials_needed(name)):
                    which = "documents" if name == "agree" else "positive documents"
                    which += f" of {self.task.cascade.by} {group}" if group else ""
                    rows = len(self.p) / self.whole.share
                    enough = np.ceil(rows * needed / max(trials[name], 1))
                    return (
                        f"{name} {share:g} needs {needed:,} {which} in the second half of the "
                        f"sample, which has {trials[name]:,}; about {enough:,.0f} documents in "
                        "all, or a larger cascade.sample, would be enough"
                    )
        return ""

    def certificate(
        self,
        trial: _Trial,
        p: Floats,  # [stages, docs, labels]: the answers of its stages
        fps: Sequence[str],  # and their raw fingerprints
    ) -> Certificate:
        """Of the cheapest rule that keeps the promise, or of none."""
        usable = ~np.isnan(self.p).any(axis=1) & ~np.isnan(p).any(axis=(0, 2))
        first, second = usable & self.whole.first_half, usable & ~self.whole.first_half
        if trial.thresholds is None:
            pooled = p[:, first].reshape(-1, p.shape[-1])
            rules = self.judged.rules(pooled, np.tile(self.p[first], (len(p), 1)))
        else:
            rules = [trial.thresholds]
        p, taught = p[:, second], trial.taught
        whole = self.p[second]
        answers = [*wrong_by_rule(rules, self.judged, p, whole)]
        groups = None if self.groups is None else self.groups[second]
        wrong, positive = [of for _, of in answers], self.judged.positive(whole)
        proof = prove(wrong, self.judged.promise, positive, groups)
        shares = proof.shares
        if proof.rule < 0:
            careful = ", ".join(f"{name} {own.proved:.3f}" for name, own in shares.items())
            nothing = self.nothing(f"the most careful rule proves {careful} alone", fps)
            return replace(nothing, documents=len(whole), shares=shares)
        decided = float(answers[proof.rule][0].mean())
        cost = taught.cost if taught else 0.0
        if decided - cost < LEAST_SAVED:
            saved = f"it would decide {decided:.0%} and cost {cost:.0%} of a whole reading"
            return replace(self.nothing(saved, fps), documents=len(whole), shares=shares)
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
            draw=self.whole.share,
            shards="",
            documents=len(whole),
            decided=decided,
            shares=shares,
            groups=() if groups is None else tuple(groups.tolist()),
        )

    def nothing(self, reason: str, cheap: Sequence[str] = ()) -> Certificate:
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
            draw=self.whole.share,
            shards="",
            documents=0,
            decided=0.0,
            shares={},
        )
