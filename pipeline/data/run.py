"""Bring an output up to date: plan, label what is missing, look again, publish.

Knows the order of the work and Ray's beginning and end. Knows nothing of how anything is shown.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import ray

from pipeline.data.devices import Placement, cluster, place, this_machine
from pipeline.data.graph import ShardCounts, check_ahead, label_cpus, label_works
from pipeline.data.job import Job, Plan, describe, plan, survey
from pipeline.data.ledger import record_specs
from pipeline.data.snapshots import publish
from pipeline.data.storage import Store, check_create_only, open_store
from pipeline.errors import RefusedError
from pipeline.spec import JobSpec

logger = logging.getLogger(__name__)

# After the graph ends the output is listed again; what is still missing gets so many more tries.
EXTRA_ROUNDS = 2

Progress = Callable[[int], None]  # called with the rows of each shard as it is committed


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run labelled: the sums of its shards' counts."""

    rows: int = 0
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
    snapshot: int | None  # None: incomplete, so none was published

    @property
    def complete(self) -> bool:
        return self.missing_shards == 0


def run(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    announce: Callable[[Plan], Progress],
) -> Outcome:
    """Label every missing cell and publish a snapshot; doing it again changes nothing.

    `announce` is told the plan, and gives what is to be called with each committed shard's rows.
    """
    started = time.monotonic()
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    with _ray_if_remote(address) as machine_nodes:
        machine = cluster(machine_nodes) if machine_nodes else this_machine()
        placement = place(spec.model, machine)
        job = describe(spec, placement, cache_dir)
        first = plan(job, store)
        progress = announce(first)
        if first.works:
            with _local_ray(placement):
                check_ahead(job)
                record_specs(store, job.fp, {n: f.json() for n, f in job.fingerprints.items()})
                tally, last = _label(job, store, first, progress)
        else:
            tally, last = Tally(), first
    number = None if last.works else _publish(job, store, last)
    return Outcome(
        output=spec.output,
        rows=last.rows,
        shards=len(last.shards),
        missing_shards=len(last.works),
        tally=tally,
        seconds=time.monotonic() - started,
        snapshot=number,
    )


def dry_run(spec: JobSpec, *, cache_dir: Path) -> Plan:
    """What `run` would find to do on this machine; only the cut of a new input is written."""
    job = describe(spec, place(spec.model, this_machine()), cache_dir)
    return plan(job, open_store(spec.output, spec.storage_options))


def _label(job: Job, store: Store, first: Plan, progress: Progress) -> tuple[Tally, Plan]:
    """Runs the graph, lists again, and runs what is still missing, a bounded number of times."""
    counted: list[ShardCounts] = []
    current = first
    for _ in range(1 + EXTRA_ROUNDS):
        for counts in label_works(current.works, job):
            counted.append(counts)
            progress(counts.rows)
        current = survey(job, store, first.cuts)
        if not current.works:
            break
        logger.warning("%d shards are still missing and run again", len(current.works))
    return tally_of(counted), current


def tally_of(counted: Iterable[ShardCounts]) -> Tally:
    """The sums of the shards' counts."""
    status: Counter[str] = Counter()
    labels: dict[str, Counter[str]] = {}
    whole = list(counted)
    for counts in whole:
        status.update(counts.status)
        for task, of_task in counts.labels.items():
            labels.setdefault(task, Counter()).update(of_task)
    return Tally(
        rows=sum(counts.rows for counts in whole),
        status=status,
        labels=labels,
        label_seconds=sum(counts.seconds for counts in whole),
        prefix_tokens_computed=sum(counts.prefix_tokens_computed for counts in whole),
        question_tokens_computed=sum(counts.question_tokens_computed for counts in whole),
        tokens_saved=sum(counts.tokens_saved for counts in whole),
    )


def _publish(job: Job, store: Store, last: Plan) -> int:
    return publish(
        store,
        job.spec.name,
        job.snapshot_tasks,
        last.shards,
        last.done,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
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
        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
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
