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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.evaluation.promises import Groups, Judged, Promise, prove, wrong_by_rule
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.ledger.counts import Counts
from pipeline.options import RunOptions
from pipeline.runtime.cascades import Cascade, fitted_stage, write_certificate
from pipeline.runtime.conditions import check
from pipeline.runtime.job import Job, Run
from pipeline.runtime.placement import this_machine
from pipeline.runtime.plan import Plan, plan
from pipeline.runtime.progress import ignore
from pipeline.runtime.run import cut_by_nodes, job_of_run
from pipeline.runtime.session import cluster_machine, remote_ray
from pipeline.sources.shards import Shard
from pipeline.spec.portable import shared_by_nodes
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import StageSpec
from pipeline.spec.tasks import CascadeSpec, CascadeTask
from pipeline.stores.store import Store, check_create_only, open_store
from pipeline.verbs.teach import Taught, Texts, teach
from pipeline.verbs.uniform_sample import Announce, Floats, Sample, Sampling

logger = logging.getLogger(__name__)

SAMPLE, LARGEST_SHARE = 2_000, 0.1  # documents, and a share of all
MOST_TIMES = 10  # a sample of a corpus that grew has at most 10 times the documents that it needs
LEAST_SAVED = 0.05  # of a whole run; less does not pay for the sample


def certify(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Announce = ignore,
    part_of: Run | None = None,
) -> Counts:
    """Writes a certificate for each cascade that has none of the current input.

    Returns the counts of the sample's labelling, which may be `part_of` a run.

    The rules of an earlier certificate are tested again, also with documents of new files. Where
    none of them is proved, or saves enough, others are made and tested with the same documents:
    both tests have half of the risk that the promise states. A run with a condition of its own
    proves nothing: it uses the certificates that there are.
    UnavailableError if a shard of the sample could not be labelled; run again.
    """
    counts = Counts()
    if not spec.cascades or options.sample or options.where:
        return counts
    spec = shared_by_nodes(spec, address)
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    run, more = part_of or Run(), True
    while more and (due := _due(spec, *_planned(spec, store, cache_dir, address, options))):
        asked = (due.tasks[t.name].whole if t.name in due.tasks else t for t in spec.tasks)
        first = spec.model_copy(
            update={"tasks": tuple(t for t in asked if t.name not in due.dependent)}
        )
        by_id = {shard.id: shard for shard in due.shards}
        sampling = Sampling(first, cache_dir, address, options, announce, run, by_id, due.share)
        shards = hash_of(by_id)
        for name, certificate in _certificates(spec, sampling, due).items():
            write_certificate(store, replace(certificate, shards=shards))
            logger.info("%s: %s", name, certificate.words)
        counts.update(sampling.n)
        more = bool(due.dependent)
    return counts


@dataclass(frozen=True, slots=True)
class _Due:
    """The cascades that need a certificate and do not depend on another one that does."""

    tasks: dict[str, CascadeTask]
    dependent: set[str]  # tasks whose documents are known when these have their certificates
    known: dict[str, Certificate]  # earlier ones, whose rules are tested first
    share: float  # of the documents, in the sample
    shards: Sequence[Shard]
    cascades: Mapping[str, Cascade]


def _due(spec: JobSpec, job: Job, planned: Plan) -> _Due | None:
    """None if each cascade has a certificate of these shards, or if there are no documents."""
    shards, rows = hash_of(shard.id for shard in planned.shards), planned.rows
    drawn = {n: of.draw for n, of in job.certificates.items() if of.shards == shards}
    waiting = {t.name: t for t in spec.cascades if drawn.get(t.name, -1) < _share(t.cascade, rows)}
    if not waiting or not rows:
        return None
    dependent = _naming(waiting, job, spec)
    tasks = {name: task for name, task in waiting.items() if name not in dependent}
    for task in tasks.values():
        if task.cascade.by is not None:
            place, named = f"tasks.{spec.tasks.index(task)}.cascade.by", f'doc."{task.cascade.by}"'
            check(f"{named} IS NULL", planned.shards, spec.input.storage_options, place=place)
    share = max(_share(task.cascade, rows) for task in tasks.values())
    # — the share of an earlier sample stays, so that new files give it their part
    known = {name: of for name, of in job.certificates.items() if name in tasks}
    known = {name: of for name, of in known.items() if of.draw <= MOST_TIMES * share}
    share = max([share, *(of.draw for of in known.values())])
    return _Due(tasks, dependent, known, share, planned.shards, job.cascades)


def _certificates(spec: JobSpec, sampling: Sampling, due: _Due) -> dict[str, Certificate]:
    """By cascade, its certificate: of a known rule that is proved again, or of a new one."""
    whole = sampling.answered({name: task.whole for name, task in due.tasks.items()})
    cascades = {
        name: _Cascade.of(sampling, task, whole, due.cascades[name], due.known.get(name))
        for name, task in due.tasks.items()
    }
    again = {name: cascades[name].trial_of(of) for name, of in due.known.items()}
    proved = dict(_tried(sampling, cascades, again))
    kept = {name: own for name, own in proved.items() if own.thresholds is not None}

    @cache
    def texts() -> Texts:
        rows = whole.rows.take(pa.array(np.flatnonzero(whole.first_half)))
        placement, tokens = whole.job.placement, whole.tokens[whole.first_half]
        on_engine = partial(sampling.where_engines_run, placement=placement)
        cache_dir = sampling.cache_dir
        return Texts(spec, sampling.texts(rows), tokens, placement.dtype, cache_dir, on_engine)

    trials = {name: own.trial(texts) for name, own in cascades.items() if name not in kept}
    return kept | dict(_tried(sampling, cascades, trials))


def _planned(
    spec: JobSpec, store: Store, cache_dir: Path, address: str | None, options: RunOptions
) -> tuple[Job, Plan]:
    """What the run that follows plans: it has the same shards."""
    with remote_ray(address, insecure=options.insecure_cluster) as connected:
        machine = cluster_machine(spec.model.device) if connected else this_machine()
        job = job_of_run(spec, store, machine, cache_dir, None, Run())
        by_nodes = partial(cut_by_nodes, machine.unable) if connected else None
        return job, plan(job, store, by_nodes=by_nodes)


def _naming(waiting: Collection[str], job: Job, spec: JobSpec) -> set[str]:
    """The tasks whose condition names a cascade that waits, or a task whose condition does.

    They have other documents when that decides.
    """
    later = set[str]()
    for task in spec.tasks:
        if not later.union(waiting).isdisjoint(job.named_by(task.name)):
            later.add(task.name)
    return later


def _share(cascade: CascadeSpec, rows: int) -> float:
    """The share of the documents that a sample has at least."""
    promise = Promise(cascade.agree, cascade.recall, cascade.precision, cascade.confidence)
    # — two halves, of which the second one may have some errors
    needed = 4 * max(map(promise.trials_needed, promise.shares))
    most = cascade.sample or max(SAMPLE, needed)
    return round(min(LARGEST_SHARE, most / max(rows, 1)), 9)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Cheap answers that may decide, and how."""

    stages: tuple[StageSpec, ...]  # before the last; none: nothing is tried
    reason: str = ""  # why nothing is tried
    taught: Taught = field(default_factory=Taught)
    known: Certificate | None = None  # whose rules are tested; None: the first half makes rules


def _tried(
    sampling: Sampling, cascades: Mapping[str, _Cascade], trials: Mapping[str, _Trial]
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
        sample = sampling.answered(stages)
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
    of_output: Cascade
    whole: Sample
    judged: Judged
    p: Floats  # [docs, labels] of the last stage; NaN without an answer
    groups: Groups | None  # [docs], of which each keeps the promise; None: all documents do

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        task: CascadeTask,
        whole: Sample,
        of_output: Cascade,
        known: Certificate | None,  # whose rules are tested before others
    ) -> _Cascade:
        judged = Judged.of(list(task.labels), task.kind, task.cascade.promise)
        if known is not None and known.thresholds is not None:
            # — two tests, of which each has half of the risk
            confidence = (1 + judged.promise.confidence) / 2
            judged = replace(judged, promise=replace(judged.promise, confidence=confidence))
        groups = None if task.cascade.by is None else sampling.values(whole, task.cascade.by)
        return cls(sampling.spec, task, of_output, whole, judged, whole.p(task), groups)

    def trial(self, texts: Callable[[], Texts]) -> _Trial:
        """What is tried first: the stages of the spec, or a readout that is fitted now."""
        if lack := self._lack():
            return _Trial((), lack)
        if not self.task.cascade.is_auto:
            return _Trial(self.task.stages[:-1])
        taught = teach(texts(), self.task, self.p[self.whole.first_half], self.judged)
        if taught is None:
            return _Trial((), "no readout of an early layer is sure enough to save anything")
        return _Trial((self._fitted(taught),), taught=taught)

    def trial_of(self, known: Certificate) -> _Trial:
        """The stages and the rules of a certificate, for the input as it is now."""
        if nothing := known.reason or self._lack():
            return _Trial((), nothing)
        taught = Taught(known.readout, known.max_tokens, known.layer, known.cost)
        stages = (self._fitted(taught),) if known.readout else self.task.stages[:-1]
        return _Trial(stages, taught=taught, known=known)

    def _fitted(self, taught: Taught) -> StageSpec:
        return fitted_stage(self.task, self.spec, taught.readout, taught.max_tokens)

    def _lack(self) -> str:
        """Why the second half of the sample can prove nothing; ""."""
        promise = self.judged.promise
        second = ~np.isnan(self.p).any(axis=1) & ~self.whole.first_half
        for group in [""] if self.groups is None else np.unique(self.groups):
            own = second if self.groups is None else second & (self.groups == group)
            trials, positive = {"agree": int(own.sum())}, self.judged.positive(self.p[own])
            if positive is not None:
                trials |= dict.fromkeys(("recall", "precision"), int(positive.sum()))
            for name, share in promise.shares.items():
                if trials[name] < (needed := promise.trials_needed(name)):
                    which = "documents" if name == "agree" else "positive documents"
                    which += f" of {self.task.cascade.by} {group}" if group else ""
                    of_all = name == "agree" and self.groups is None
                    times = needed / max(trials[name], 1)  # as many documents
                    drawn = np.ceil(2 * needed if of_all else max(len(self.p), 1) * times)
                    enough = f"cascade.sample: {drawn:,.0f}"
                    if drawn > LARGEST_SHARE * len(self.p) / self.whole.share:
                        enough = f"{drawn / LARGEST_SHARE:,.0f} documents in all"
                    return (
                        f"{name} {share:g} needs {needed:,} {which} in the second half of the "
                        f"sample, which has {trials[name]:,}; about {enough} would be enough"
                    )
        return ""

    def certificate(
        self,
        trial: _Trial,
        p: Floats,  # [stages, docs, labels]: the answers of its stages
        fps: Sequence[str],  # and their raw fingerprints
    ) -> Certificate:
        """Of the cheapest rule that keeps the promise, or of none.

        A known rule stays as long as it is among the proved ones.
        """
        usable = ~np.isnan(self.p).any(axis=1)
        first, second = usable & self.whole.first_half, usable & ~self.whole.first_half
        if (known := trial.known) is None:
            pooled = p[:, first].reshape(-1, p.shape[-1])
            answered = ~np.isnan(pooled).any(axis=1)
            right = np.tile(self.p[first], (len(p), 1))
            curves = self.judged.curves(pooled[answered], right[answered])
        else:
            curves = np.array(known.curves)
        rules = self.judged.rules(curves)
        p, taught = p[:, second], trial.taught
        whole = self.p[second]
        answers = [*wrong_by_rule(rules, self.judged, p, whole)]
        groups = None if self.groups is None else self.groups[second]
        wrong, positive = [of for _, of in answers], self.judged.positive(whole)
        proof = prove(wrong, self.judged.promise, positive, groups)
        if known is not None and known.rule < proof.rule:
            proof = prove(wrong[: known.rule + 1], self.judged.promise, positive, groups)
        shares = proof.shares
        if proof.rule < 0:
            careful = ", ".join(f"{name} {own.proved:.3f}" for name, own in shares.items())
            nothing = self.nothing(f"the most careful rule proves {careful} alone")
            return replace(nothing, documents=len(whole), shares=shares)
        decided = float(answers[proof.rule][0].mean())
        if decided - taught.cost < LEAST_SAVED:
            saved = f"it would decide {decided:.0%} and cost {taught.cost:.0%} of a whole reading"
            return replace(self.nothing(saved), documents=len(whole), shares=shares)
        return replace(
            self.nothing(""),
            stages=(*fps, self.whole.fps[self.task.name]),
            thresholds=rules[proof.rule],
            curves=tuple(tuple((float(a), float(b)) for a, b in part) for part in curves),
            rule=proof.rule,
            **asdict(taught),
            documents=len(whole),
            decided=decided,
            shares=shares,
            groups=() if groups is None else tuple(groups.tolist()),
        )

    def nothing(self, reason: str) -> Certificate:
        """The certificate of a cascade whose last stage answers everything."""
        return Certificate(
            task=self.task.name,
            promise=self.task.cascade.promise,
            stages=self.of_output.stages,
            scope=self.of_output.scope,
            draw=self.whole.share,
            reason=reason,
        )
