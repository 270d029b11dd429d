"""Bring an output up to date: plan, label what is missing, look again, publish.

Knows the order of the work and Ray's beginning and end. Knows nothing of how anything is shown.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import ray

from pipeline.errors import FailedRowsError, RefusedError
from pipeline.ledger.cells import Committed, is_whole, record_specs, unfinished
from pipeline.ledger.contents import Contents, contents_of
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.snapshots import publish
from pipeline.runtime.graph import ShardCounts, check_ahead, label_cpus, label_items
from pipeline.runtime.job import Job, Plan, jobs_for_each_dtype, list_missing, make_job, plan
from pipeline.runtime.outcome import failed_rows, is_failed_status, retry_items
from pipeline.runtime.placement import Placement, cluster, node_resources, place, this_machine
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, check_create_only, open_store

logger = logging.getLogger(__name__)

# After the graph ends the output is listed again; what is still missing gets so many more tries.
EXTRA_ROUNDS = 2

Progress = Callable[[int], None]  # called with the rows of each shard as it is committed


def no_progress(_planned: Plan) -> Progress:
    """Tells nobody how a run goes."""
    return lambda _rows: None


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run labelled: the sums of its shards' counts."""

    rows: int = 0
    asked_rows: int = 0  # of which the model was asked
    created: int = 0  # objects: documents and label files
    status: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    label_seconds: float = 0.0
    prefix_tokens_computed: int = 0
    question_tokens_computed: int = 0
    tokens_saved: int = 0

    @property
    def reuse_ratio(self) -> float:
        """Of the tokens that separate prompts would have read, the share that was not read."""
        computed = self.prefix_tokens_computed + self.question_tokens_computed
        whole = computed + self.tokens_saved
        return self.tokens_saved / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    output: str
    rows: int  # of the whole input
    shards: int
    missing_shards: int
    tally: Tally
    seconds: float
    unreadable: tuple[str, ...]  # files whose rows cannot even be counted, and why
    snapshot: int | None  # None: incomplete, so none was published

    @property
    def complete(self) -> bool:
        return self.missing_shards == 0 and not self.unreadable


@dataclass(frozen=True, slots=True)
class LabelledOutput:
    """A spec's work as it now lies in the output; no snapshot shows it unless it is published."""

    job: Job
    store: Store
    last: Plan
    counted: tuple[ShardCounts, ...]  # in this run
    seconds: float

    @property
    def complete(self) -> bool:
        return not self.last.work_items and not self.last.cuts.unreadable

    @property
    def contents(self) -> Contents:
        """What a snapshot of it would name."""
        return contents_of(
            self.job.spec.name, self.job.snapshot_tasks, self.last.shards, self.last.done
        )

    def publish(self) -> int:
        """The number of the snapshot that shows it, made now unless the last one does."""
        return _publish(self.job, self.store, self.last)

    def publish_part(self) -> int | None:
        """The same of the shards that are whole; None where there is none.

        FailedRowsError if more of their rows failed than may.
        """
        return _publish_part(self.job, self.store, self.last, self.counted)

    def outcome(self, snapshot: int | None) -> Outcome:
        """How the run ended, with the snapshot that was published of it."""
        return Outcome(
            output=self.job.spec.output,
            rows=self.last.rows,
            shards=len(self.last.shards),
            missing_shards=self.last.missing_shards,
            unreadable=self.last.cuts.unreadable,
            tally=tally_of(self.counted),
            seconds=self.seconds,
            snapshot=snapshot,
        )


def run(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    retry_failed: bool = False,
    publish_partial: bool = False,
    announce: Callable[[Plan], Progress] = no_progress,
) -> Outcome:
    """Label every missing cell and publish a snapshot; doing it again changes nothing.

    `retry_failed` also tries the rows again that failed or were quarantined. `publish_partial`
    publishes a snapshot of the shards that are complete, if the run ends before the last of them.
    `announce` is told the plan, and gives what is to be called with each committed shard's rows.
    """
    done = label(
        spec,
        cache_dir=cache_dir,
        address=address,
        retry_failed=retry_failed,
        publish_partial=publish_partial,
        announce=announce,
    )
    number = None
    if done.complete:
        number = done.publish()
    elif publish_partial:
        number = done.publish_part()
    failpoint("published")
    return done.outcome(number)


def label(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    retry_failed: bool = False,
    publish_partial: bool = False,  # if it is broken off
    announce: Callable[[Plan], Progress],
) -> LabelledOutput:
    """Label every missing cell, as `run` does, and publish nothing."""
    started = time.monotonic()
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    failpoint("probed")
    with _ray_if_remote(address) as machine_nodes:
        machine = cluster(machine_nodes) if machine_nodes else this_machine()
        placement = place(spec.model, machine)
        job = make_job(spec, placement, cache_dir)
        first = plan(job, store)
        if retry_failed:
            again = retry_items(store, first.shards, first.done)
            first = replace(first, work_items=(*first.work_items, *again))
        for reason in first.cuts.unreadable:
            logger.warning("left out: %s", reason)
        failpoint("planned")
        progress = announce(first)
        labelling = _Labelling(job, store, first)
        if first.work_items:
            with _local_ray(placement):
                check_ahead(job)
                record_specs(store, job.fp, {n: f.json() for n, f in job.fingerprints.items()})
                failpoint("specs recorded")
                try:
                    labelling.run(progress)
                except FailedRowsError:
                    raise
                except BaseException:
                    if publish_partial:
                        labelling.publish_part()
                    raise
    labelling.check_failed_rows()
    failpoint("labelled")
    seconds = time.monotonic() - started
    return LabelledOutput(job, store, labelling.last, tuple(labelling.counted), seconds)


def dry_run(spec: JobSpec, *, cache_dir: Path) -> Plan:
    """What `run` would find to do, on this machine or another; nothing is written.

    Answers differ with the number format alone. Where the spec leaves it to the machine, the plan
    is that of the machine with the least to do.
    """
    store = open_store(spec.output, spec.storage_options)
    first, *others = jobs_for_each_dtype(spec, cache_dir)
    planned = plan(first, store, keep=False)
    plans = [planned, *(list_missing(job, store, planned.cuts) for job in others)]
    return min(plans, key=lambda each: each.missing_rows)


class _Labelling:
    """The work of one run, and what has become of it."""

    def __init__(self, job: Job, store: Store, first: Plan) -> None:
        self._job = job
        self._store = store
        self._first = first
        self.last = first
        self.counted: list[ShardCounts] = []

    def run(self, progress: Progress) -> None:
        """Runs the graph, lists again, and runs what is still missing, a bounded number of times.

        FailedRowsError as soon as more rows failed than may.
        """
        failed = 0
        worst: Counter[str] = Counter()  # by shard, which may be in several work items
        for _ in range(1 + EXTRA_ROUNDS):
            for counts in label_items(self.last.work_items, self._job):
                self.counted.append(counts)
                progress(counts.rows)
                more = max(0, _failures(counts) - worst[counts.sid])
                worst[counts.sid] += more
                failed += more
                _check(self._job, failed, self._first.rows, self.counted)
            found = list_missing(self._job, self._store, self._first.cuts)
            retries = unfinished(self._first.work_items, found.done)
            self.last = replace(found, work_items=(*found.work_items, *retries))
            if not self.last.work_items:
                return
            logger.warning("%d shards are still missing and run again", len(self.last.work_items))

    def check_failed_rows(self) -> None:
        """FailedRowsError if all is there, and more of its rows failed than may."""
        if not self.last.work_items:
            _check_shards(self._job, self._store, self.last.shards, self.last.done, self.counted)

    def publish_part(self) -> None:
        """A snapshot of what is whole now, unless more of its rows failed than may."""
        found = list_missing(self._job, self._store, self._first.cuts)
        try:
            _publish_part(self._job, self._store, found, self.counted)
        except FailedRowsError as error:  # beside what broke the run off, which is told too
            logger.warning("no snapshot of a part: %s", error)


def _check_shards(
    job: Job,
    store: Store,
    shards: Sequence[Shard],
    done: Committed,
    counted: Sequence[ShardCounts],
) -> None:
    """FailedRowsError if more rows of these shards failed than may, in this run or before."""
    if job.spec.max_error_rate is None:
        return
    whole = [counts for counts in counted if set(counts.labels) == set(job.fp)]
    known = {counts.sid: _failures(counts) for counts in whole}
    failed = failed_rows(store, shards, done, known)
    _check(job, failed, sum(shard.rows for shard in shards), counted)


def _check(job: Job, failed: int, rows: int, counted: Sequence[ShardCounts]) -> None:
    """FailedRowsError if so many of the rows are more than may fail."""
    limit = job.spec.max_error_rate
    if limit is None or failed <= limit * rows:
        return
    reasons = tally_of(counted).status.most_common()
    told = ", ".join(f"{status} {count:,}" for status, count in reasons if is_failed_status(status))
    raise FailedRowsError(
        f"{failed:,} of {rows:,} rows failed, more than max_error_rate {limit:g} allows"
        f"{told and f' (in this run: {told})'}; what is done stands and no snapshot shows it; "
        f"mend the cause and run with --retry-failed, or allow more"
    )


def _failures(counts: ShardCounts) -> int:
    return sum(count for status, count in counts.status.items() if is_failed_status(status))


def tally_of(counted: Iterable[ShardCounts]) -> Tally:
    """The sums of the shards' counts; a shard in several work items has its rows counted once.

    With the statuses of the work in which most of them failed.
    """
    status: Counter[str] = Counter()
    labels: dict[str, Counter[str]] = {}
    whole = list(counted)
    of_shard = {counts.sid: counts for counts in sorted(whole, key=_failures)}
    for counts in of_shard.values():
        status.update(counts.status)
    for counts in whole:
        for task, of_task in counts.labels.items():
            labels.setdefault(task, Counter()).update(of_task)
    return Tally(
        rows=sum(counts.rows for counts in of_shard.values()),
        asked_rows=sum(counts.asked_rows for counts in whole),
        created=sum(counts.created for counts in whole),
        status=status,
        labels=labels,
        label_seconds=sum(counts.seconds for counts in whole),
        prefix_tokens_computed=sum(counts.prefix_tokens_computed for counts in whole),
        question_tokens_computed=sum(counts.question_tokens_computed for counts in whole),
        tokens_saved=sum(counts.tokens_saved for counts in whole),
    )


def _publish_part(job: Job, store: Store, last: Plan, counted: Sequence[ShardCounts]) -> int | None:
    """A snapshot of the shards that are whole; none where there is none.

    FailedRowsError if more of their rows failed than may.
    """
    whole = [shard for shard in last.shards if is_whole(shard.id, list(job.fp), last.done)]
    if not whole:
        return None
    _check_shards(job, store, whole, last.done, counted)
    return _publish(job, store, last, partial=True)


def _publish(job: Job, store: Store, last: Plan, *, partial: bool = False) -> int:
    return publish(
        store,
        job.spec.name,
        job.snapshot_tasks,
        last.shards,
        last.done,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        partial=partial,
        missing_files=len(last.cuts.unreadable),
    )


@contextmanager
def _ray_if_remote(address: str | None) -> Iterator[list[dict[str, float]]]:
    """The resources of the nodes of the cluster at `address`; empty without one."""
    if address is None:
        yield []
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise RefusedError(f"--address: no Ray cluster answers there: {error}") from error
    try:
        yield node_resources()
    finally:
        ray.shutdown()


@contextmanager
def _local_ray(placement: Placement) -> Iterator[None]:
    """The Ray that this process is in, or one of its own that ends with the run."""
    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=int(label_cpus(placement.threads)) + 2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()
