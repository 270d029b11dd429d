"""Which stages of a cascade decide, by the certificates of the output: what its runs proved.

Entry points: `certificate_of` reads the one of a cascade, and `write_certificate` writes it;
`decided_by` is a spec with the stages that decide. A later certificate of a task is kept beside the
earlier ones: a snapshot names the one that it was made with. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pipeline.errors import StorageError
from pipeline.fitted.certificate import Certificate, parse_certificate
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.keys import certificate_key
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask, StageSpec
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import Store, open_store


def certificate_of(
    spec: JobSpec,
    task: CascadeTask,
    stages: Sequence[Fingerprint],  # of the spec, without conditions
    scope: Mapping[str, object],  # as `Certificate.scope`, not hashed
) -> Certificate:
    """The newest certificate of the output about this cascade; without one, one of no shards."""
    hashed = short_hash(canonical_json(dict(scope)))
    of_stages = tuple(stage.id for stage in stages)
    own = Certificate(task.name, task.cascade.promise, of_stages, draw=0.0, scope=hashed)
    store = open_store(spec.output, spec.storage_options)
    known = read_certificates(store, task.name)
    return next((each for each in known if each.without_proof(0.0) == own), own)


def decided_by(spec: JobSpec, certificates: Mapping[str, Certificate]) -> JobSpec:
    """The spec with the stages that decide; where nothing is proved that is the last one alone."""

    def decided(task: TaskSpec) -> TaskSpec:
        if not isinstance(task, CascadeTask):
            return task
        proved = certificates[task.name]
        if proved.thresholds is None:
            return task.whole
        stages = (*cheap_stages(task, spec, proved), task.stages[-1])
        cascade = task.cascade.model_copy(update={"stages": stages})
        return task.model_copy(update={"cascade": cascade})

    return spec.model_copy(update={"tasks": tuple(map(decided, spec.tasks))})


def cheap_stages(
    task: CascadeTask, spec: JobSpec, certificate: Certificate
) -> tuple[StageSpec, ...]:
    """The stages before the last: the fitted readout of the certificate, or those of the spec."""
    if not certificate.readout:
        return task.stages[:-1]
    most = certificate.max_tokens
    return (
        QuestionTask(
            name=task.name,
            kind=task.kind,
            labels=task.labels,
            chunks=task.chunks,
            readout=f"{spec.output.rstrip('/')}/{certificate.readout}",
            documents=None if most is None else spec.documents.part(most),
        ),
    )


def read_certificates(store: Store, task: str) -> Iterator[Certificate]:
    """The certificates of a task, the newest one first; StorageError if one is damaged."""
    key_of = partial(certificate_key, task)
    for number in reversed(numbers(store, key_of)):
        try:
            yield parse_certificate(store.read(key_of(number)))
        except ValueError as error:
            fix = "remove the object, and run again"
            raise StorageError(f"{store.url}/{key_of(number)}: {error}; {fix}") from error


def write_certificate(store: Store, certificate: Certificate) -> None:
    """Writes the certificate as the task's newest one, unless that has the same content."""
    if next(read_certificates(store, certificate.task), None) == certificate:
        return
    key_of = partial(certificate_key, certificate.task)
    for number in free_numbers(store, key_of):
        if store.create(key_of(number), certificate.json()):
            return
