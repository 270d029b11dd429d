"""Certificates of cascades: cheap answers are fitted on a sample, and their promise is proved.

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
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import ceil
from operator import itemgetter
from pathlib import Path

import numpy as np

from pipeline.evaluation.promises import Bools, Groups, Judged, Promise
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.ledger.counts import Counts
from pipeline.ledger.snapshots import last_shards
from pipeline.options import RunOptions
from pipeline.runtime.cascades import cheap_stages, write_certificate
from pipeline.runtime.conditions import DOC, check, drawn_below, drawn_from
from pipeline.runtime.job import Job, Run
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import ignore
from pipeline.runtime.run import planning
from pipeline.sources.rule import named
from pipeline.sources.shards import Shard
from pipeline.spec.portable import shared_by_nodes
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeSpec, CascadeTask
from pipeline.stores.store import check_create_only, open_store
from pipeline.verbs.teach import Texts, teach
from pipeline.verbs.uniform_sample import Announce, Answers, Sample, ShardsFailed, TimeIsOver

logger = logging.getLogger(__name__)

SAMPLE, LARGEST_SHARE = 2_000, 0.1  # documents, and a share of all
MOST_TIMES = 10  # a sample of a corpus that grew has at most 10 times the documents that it needs
LEAST_SAVED = 0.05  # of a whole run; less is not worth the sample


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
    none of them is proved, or saves enough, others are made and tested with the same documents. No
    rule is taken that the documents of new files alone refute. A run with a condition of its own
    proves nothing, and one whose time is over proves nothing more: they use the certificates that
    there are. Shards that cannot be labelled prove nothing, and certificates are not about them.
    """
    counts, failed = Counts(), set[str]()
    if not spec.cascades or options.sample or options.where:
        return counts
    spec = shared_by_nodes(spec, address)
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    run = part_of or Run()
    while True:
        with planning(spec, store, cache_dir, address, options, None, run) as (*_, job, planned):
            shards = tuple(shard for shard in planned.shards if shard.id not in failed)
            due, later = _due(spec, job, planned.rows, shards)
        if not due:
            return counts
        least = max(_share(task.cascade, planned.rows) for task in spec.cascades)
        # — the share of an earlier sample stays, so that new files give it their part
        known = [own for name in due if (own := job.cascades[name]).draw <= MOST_TIMES * least]
        share = max([least, *(own.draw for own in known)])
        earlier = {own.task: own for own in known if own.thresholds is not None}
        drawn = drawn_from(drawn_below(share), planned.shards)
        if not (sampled := tuple(shard for shard in drawn if shard.id not in failed)):
            return counts
        asked = (due[t.name].whole if t.name in due else t for t in spec.tasks)
        sample = Sample(
            spec.model_copy(update={"tasks": tuple(t for t in asked if t.name not in later)}),
            cache_dir,
            address,
            options,
            announce,
            replace(run, unable=job.run.unable),
            share,
            sampled,
            counts,
            failed,
        )
        new_shards = _new_shards(planned, last_shards(store, spec.name), due)
        try:
            certificates = [*_certificates(sample, job, due, earlier, new_shards)]
        except TimeIsOver:
            return counts
        except ShardsFailed:
            continue
        about = hash_of(shard.id for shard in shards)
        for certificate in certificates:
            write_certificate(store, replace(certificate, shards=about))
            logger.info("%s: %s", certificate.task, certificate.words)
        if not later:
            return counts


def _due(
    spec: JobSpec, job: Job, rows: int, shards: Sequence[Shard]
) -> tuple[dict[str, CascadeTask], set[str]]:
    """The cascades that need a certificate of these shards, and the tasks that wait for one.

    These have a condition that names a cascade without a certificate, or a task that waits. They
    have other documents when that decides.
    """
    about = hash_of(shard.id for shard in shards)
    due, later = dict[str, CascadeTask](), set[str]()
    for number, task in enumerate(spec.tasks if rows else ()):
        if not later.union(due).isdisjoint(job.named_by(task.name)):
            later.add(task.name)
        elif isinstance(task, CascadeTask):
            known, column = job.cascades[task.name], task.cascade.by
            if known.shards == about and known.draw >= _share(task.cascade, rows):
                continue
            due[task.name] = task
            if column is not None:
                place, condition = f"tasks.{number}.cascade.by", f"{named(DOC, column)} IS NULL"
                check(condition, shards, spec.input.storage_options, place=place)
    return due, later


def _new_shards(planned: Plan, published: Set[str], tasks: Iterable[str]) -> dict[str, set[str]]:
    """By task, the ids of shards without an answer, which no snapshot has.

    A published shard lacks answers by other thresholds, questions or conditions.
    """
    lacking = [w for w in planned.work_items if not w.retry and w.shard.id not in published]
    return {task: {w.shard.id for w in lacking if task in w.tasks} for task in tasks}


def _share(cascade: CascadeSpec, rows: int) -> float:
    """The share of the documents that a sample has at least."""
    # — two halves, of which the second one may have some errors
    most = cascade.sample or max(SAMPLE, 4 * Promise.of(cascade.promise).trials_needed)
    return round(min(LARGEST_SHARE, most / max(rows, 1)), 9)


def _certificates(
    sample: Sample,
    job: Job,
    due: Mapping[str, CascadeTask],
    known: Mapping[str, Certificate],
    new_shards: Mapping[str, set[str]],  # by cascade: ids of those without an answer
) -> Iterable[Certificate]:
    """For each cascade one: of a known rule that is proved again, or of a new one."""
    whole = sample.answers({name: task.whole for name, task in due.items()})
    cascades = {
        name: _Cascade.of(sample, task, whole[name], job.cascades[name], new_shards[name])
        for name, task in due.items()
    }
    lacks = {name: why for name, own in cascades.items() if (why := own.lack())}
    made = {name: replace(cascades[name].unproved, reason=why) for name, why in lacks.items()}
    proved_before = {name: own for name, own in known.items() if name not in made}
    proved = _tried(sample, cascades, proved_before)
    made |= {name: own for name, own in proved.items() if own.thresholds is not None}
    tokens = np.max([own.tokens for own in whole.values()], axis=0)
    has_teacher = any(task.cascade.teacher is not None for task in due.values())
    texts = Texts(sample, tokens[sample.first_half], job.placement, has_teacher)
    new = {name: own.candidate(texts) for name, own in cascades.items() if name not in made}
    tried = _tried(sample, cascades, {name: own for name, own in new.items() if not own.reason})
    return (made | new | tried).values()


def _tried(
    sample: Sample, cascades: Mapping[str, _Cascade], candidates: Mapping[str, Certificate]
) -> dict[str, Certificate]:
    """By cascade, what its candidate proves. Stages of all answer in the same readings."""
    stages = {
        name: cheap_stages(cascades[name].task, sample.spec, own)
        for name, own in candidates.items()
    }
    answers = {name: list[Answers]() for name in stages}
    for number in range(max(map(len, stages.values()), default=0)):
        asked = {
            name: own[number].model_copy(update={"when": cascades[name].task.when})
            for name, own in stages.items()
            if len(own) > number
        }
        for name, of_stage in sample.answers(asked).items():
            answers[name].append(of_stage)
    return {
        name: cascades[name].certificate(own, answers[name]) for name, own in candidates.items()
    }


@dataclass(frozen=True, slots=True)
class _Cascade:
    """One cascade, whose sample the last stage has answered."""

    task: CascadeTask
    judged: Judged
    whole: Answers  # of the last stage
    first_half: Bools  # [docs]
    new: Bools  # [docs], of shards without an answer beside others
    groups: Groups | None  # [docs], of which each keeps the promise; None: all documents do
    unproved: Certificate  # of this sample: the last stage answers everything

    @classmethod
    def of(
        cls,
        sample: Sample,
        task: CascadeTask,
        whole: Answers,
        last: Certificate,
        new_shards: set[str],
    ) -> _Cascade:
        judged = Judged.of(list(task.labels), task.kind, task.cascade.promise)
        groups = None if task.cascade.by is None else sample.values(task.cascade.by)
        unproved = last.without_proof(sample.share)
        new = np.concatenate([np.full(len(rows), s.id in new_shards) for s, rows, _ in sample.rows])
        new &= not new.all()
        return cls(task, judged, whole, sample.first_half, new, groups, unproved)

    @property
    def answered(self) -> Bools:  # [docs], by the last stage
        return np.asarray(~np.isnan(self.whole.p).any(axis=1), np.bool_)

    @property
    def trials(self) -> Bools:  # [docs]
        """The documents that prove a share: those with an answer, or of these the positive ones."""
        positive = self.judged.positive(self.whole.p)
        return self.answered if positive is None else self.answered & positive

    @property
    def documents(self) -> str:
        """What the trials are, for people."""
        return "documents" if "agree" in self.judged.promise.shares else "positive documents"

    def candidate(self, texts: Texts) -> Certificate:
        """What is tried: the stages of the spec, or a readout that is fitted now.

        It has a reason if no readout saves enough to be tested.
        """
        if not self.task.cascade.is_auto:
            return self.unproved
        needed = self.judged.promise.trials_needed
        if (trials := int((self.trials & self.first_half).sum())) < needed:
            half = f"in the first half of the sample, which has {trials:,}"
            reason = f"a fit of readouts needs {needed:,} {self.documents} {half}"
            reason += "; a larger cascade.sample or corpus has more"
            return replace(self.unproved, reason=reason)
        whole = self.whole.p[self.first_half]
        return teach(texts, self.task, whole, self.judged, self.unproved)

    def lack(self) -> str:
        """Why the second half of the sample is too small for a proof; "" if it is not."""
        promise, documents = self.judged.promise, self.documents
        counted = self.trials & ~self.first_half
        groups = np.full(len(counted), "") if self.groups is None else self.groups
        of_groups = np.unique(groups[self.answered]).tolist() or [""]
        by_group = {group: int(counted[groups == group].sum()) for group in of_groups}
        group, trials = min(by_group.items(), key=itemgetter(1))
        if trials >= (needed := promise.trials_needed):
            return ""
        documents += f" of {self.task.cascade.by} {group}" if group else ""
        # — half as many again, because another sample has more or fewer of them
        drawn = ceil(1.5 * max(len(counted), 1) * needed / max(trials, 1))
        if self.groups is None and self.trials.all():
            drawn = 2 * needed
        remedy = f"cascade.sample: {drawn:,}"
        if drawn > LARGEST_SHARE * len(counted) / self.unproved.draw:
            remedy = f"{drawn / LARGEST_SHARE:,.0f} documents in all"
        name, share = max(promise.shares.items(), key=itemgetter(1))
        return (
            f"{name} {share:g} needs {needed:,} {documents} in the second half of the sample, "
            f"which has {trials:,}; about {remedy} would be enough"
        )

    def certificate(self, candidate: Certificate, stages: Sequence[Answers]) -> Certificate:
        """What these stages prove: the cheapest rule that keeps the promise, or none.

        The rules are those of the candidate up to its own one, or else are made of the first half.
        """
        p = np.stack([own.p for own in stages])  # [stages, docs, labels]
        first, second = self.answered & self.first_half, self.answered & ~self.first_half
        if candidate.curves:
            curves = np.array(candidate.curves)
            rules = self.judged.rules(curves)[: candidate.rule + 1]
        else:
            pooled = p[:, first].reshape(-1, p.shape[-1])
            known = ~np.isnan(pooled).any(axis=1)
            right = np.tile(self.whole.p[first], (len(p), 1))
            curves = self.judged.curves(pooled[known], right[known])
            rules = self.judged.rules(curves)
        # — rules that were made before see all new documents for the first time
        new = self.new & (self.answered if candidate.curves else second)
        rules = rules[: self.judged.not_refuted(rules, p[:, new], self.whole.p[new])]
        if not rules:
            return replace(self.unproved, reason="the documents that are new refute each rule")
        whole, groups = self.whole.p[second], None if self.groups is None else self.groups[second]
        proof = self.judged.proof(rules, p[:, second], whole, groups)
        nothing = replace(self.unproved, documents=len(whole), shares=proof.shares)
        if proof.rule < 0:
            careful = ", ".join(f"{name} {own.proved:.3f}" for name, own in proof.shares.items())
            return replace(nothing, reason=f"the most careful rule proves {careful} alone")
        if proof.decided - candidate.cost < LEAST_SAVED:
            saved = f"it would decide {proof.decided:.0%} and cost {candidate.cost:.0%}"
            return replace(nothing, reason=f"{saved} of a whole reading")
        return replace(
            candidate,
            stages=(*(own.fp for own in stages), self.whole.fp),
            draw=self.unproved.draw,
            thresholds=rules[proof.rule],
            curves=tuple(tuple((float(a), float(b)) for a, b in part) for part in curves),
            rule=proof.rule,
            documents=len(whole),
            decided=proof.decided,
            shares=proof.shares,
            groups=() if groups is None else tuple(groups.tolist()),
        )
