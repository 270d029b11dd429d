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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.evaluation.cascade_rules import Judged, wrong_by_rule
from pipeline.evaluation.promises import Bools, Groups, Promise, prove
from pipeline.fitted.certificate import Certificate
from pipeline.hashes import short_hash
from pipeline.ledger.certificates import write_certificate
from pipeline.ledger.counts import Counts
from pipeline.options import RunOptions
from pipeline.runtime.cascades import fitted_stage
from pipeline.runtime.conditions import check
from pipeline.runtime.job import Run, job_of_output
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import ignore
from pipeline.sources.shards import Shard
from pipeline.spec.portable import shared_by_nodes
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import StageSpec
from pipeline.spec.tasks import CascadeSpec, CascadeTask
from pipeline.stores.store import open_store
from pipeline.verbs.teach import Taught, Texts, teach
from pipeline.verbs.uniform_sample import Announce, Floats, Sample, Sampling

logger = logging.getLogger(__name__)

SAMPLE, LARGEST_SHARE = 2_000, 0.1  # documents, and a share of all
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
    each of the two tests has the risk that the promise states. A run with a condition of its own
    proves nothing: it uses the certificates that there are.
    UnavailableError if a shard of the sample could not be labelled; run again.
    """
    if not spec.cascades or options.sample or options.where:
        return Counts()
    spec = shared_by_nodes(spec, address)
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
        return Counts()
    for task in waiting.values():
        if task.cascade.by is not None:
            place, named = f"tasks.{spec.tasks.index(task)}.cascade.by", f'doc."{task.cascade.by}"'
            check(f"{named} IS NULL", planned.shards, spec.input.storage_options, place=place)
    most = max(_to_draw(task.cascade) for task in waiting.values())
    # — the share of an earlier sample stays, so that new files give it their part
    drawn = [known[name].draw for name in waiting if name in known]
    share = max(drawn, default=round(min(LARGEST_SHARE, most / planned.rows), 9))
    by_id = {shard.id: shard for shard in planned.shards}
    run = part_of or Run()
    sampling = Sampling(spec, cache_dir, address, options, announce, run, by_id, share)
    whole = sampling.answered({name: task.whole for name, task in waiting.items()})
    cascades = {name: _Cascade.of(sampling, task, whole) for name, task in waiting.items()}
    again = {name: own.trial_of(known[name]) for name, own in cascades.items() if name in known}
    proved = dict(_tried(sampling, cascades, again))
    kept = {name: own for name, own in proved.items() if own.thresholds is not None}

    @cache
    def texts() -> Texts:
        rows = whole.rows.take(pa.array(np.flatnonzero(whole.first_half)))
        placement, tokens = whole.job.placement, whole.tokens[whole.first_half]
        on_engine = partial(sampling.where_engines_run, placement=placement)
        return Texts(spec, sampling.texts(rows), tokens, placement.dtype, cache_dir, on_engine)

    trials = {name: own.trial(texts) for name, own in cascades.items() if name not in kept}
    for name, certificate in (kept | dict(_tried(sampling, cascades, trials))).items():
        write_certificate(store, replace(certificate, shards=shards))
        logger.info("%s: %s", name, certificate.words)
    return sampling.n


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
    whole: Sample
    judged: Judged
    p: Floats  # [docs, labels] of the last stage; NaN without an answer
    groups: Groups | None  # [docs], of which each keeps the promise; None: all documents do

    @classmethod
    def of(cls, sampling: Sampling, task: CascadeTask, whole: Sample) -> _Cascade:
        judged = Judged.of(list(task.labels), task.kind, task.cascade.promise)
        groups = None if task.cascade.by is None else sampling.values(whole, task.cascade.by)
        return cls(sampling.spec, task, whole, judged, whole.p(task), groups)

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
        """The stages and the rules of a certificate, for the input as it is now."""
        if known.thresholds is None:
            return _Trial((), known.reason)
        if not known.readout:
            return _Trial(self.task.stages[:-1], known=known)
        taught = Taught(known.readout, known.max_tokens, known.layer, known.cost)
        stage = self._fitted(known.readout, known.max_tokens)
        return _Trial((stage,), taught=taught, known=known)

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
        """Of the cheapest rule that keeps the promise, or of none.

        A known rule stays as long as it is among the proved ones.
        """
        usable = ~np.isnan(self.p).any(axis=1) & ~np.isnan(p).any(axis=(0, 2))
        first, second = usable & self.whole.first_half, usable & ~self.whole.first_half
        if (known := trial.known) is None:
            pooled = p[:, first].reshape(-1, p.shape[-1])
            curves = self.judged.curves(pooled, np.tile(self.p[first], (len(p), 1)))
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
            draw=self.whole.share,
            thresholds=rules[proof.rule],
            curves=tuple(tuple((float(a), float(b)) for a, b in part) for part in curves),
            rule=proof.rule,
            readout=taught.readout if taught else "",
            max_tokens=taught.max_tokens if taught else None,
            layer=taught.layer if taught else None,
            cost=cost,
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
            draw=self.whole.share,
            reason=reason,
        )
