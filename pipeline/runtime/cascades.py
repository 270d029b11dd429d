"""Which stages of a cascade decide, by the certificates of the output: what its runs proved.

Entry points: `Cascade` and `decided_by`, `fitted_stage` for a readout that a run fits, and
`write_certificate`. A later certificate of a task is kept beside the earlier ones: a snapshot names
the one that it was made with. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.errors import StorageError
from pipeline.fitted.certificate import Certificate, Thresholds, parse_certificate
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.keys import certificate_key
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.spec.fingerprint import Fingerprint, cascade_fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Cascade:
    """What a certificate of a cascade must be about, and the newest one that is."""

    stages: tuple[str, ...]  # the raw fingerprints of the spec's stages
    scope: str  # as `Certificate.scope`
    certificate: Certificate | None

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        task: CascadeTask,
        stages: Sequence[Fingerprint],  # without conditions
        scope: Mapping[str, object],
    ) -> Cascade:
        """Of a task, in the output of the spec."""
        store = open_store(spec.output, spec.storage_options)
        own = tuple(stage.id for stage in stages)
        scope_hash = short_hash(canonical_json(dict(scope)))
        for known in read_certificates(store, task.name):
            of_spec = known.stages[1:] if known.readout else known.stages
            same = of_spec == own and known.promise == task.cascade.promise
            if same and known.scope == scope_hash:
                return cls(own, scope_hash, known)
        return cls(own, scope_hash, None)

    @property
    def thresholds(self) -> Thresholds | None:
        """With which stages before the last decide; None: they decide nothing."""
        return None if self.certificate is None else self.certificate.thresholds

    def version(self, task: CascadeTask, whole: Fingerprint) -> Fingerprint:
        """Of the task, without its condition; `whole` is that of the last stage."""
        if self.certificate is None or self.thresholds is None:
            return whole
        return cascade_fingerprint(task, self.certificate.content)


def decided_by(spec: JobSpec, cascades: Mapping[str, Cascade]) -> JobSpec:
    """The spec with the stages that decide; without a certificate that is the last one alone."""

    def decided(task: TaskSpec) -> TaskSpec:
        if not isinstance(task, CascadeTask):
            return task
        known = cascades[task.name].certificate
        if known is None or known.thresholds is None:
            return task.whole
        if not known.readout:
            return task
        stage = fitted_stage(task, spec, known.readout, known.max_tokens)
        cascade = task.cascade.model_copy(update={"stages": (stage, *task.stages)})
        return task.model_copy(update={"cascade": cascade})

    return spec.model_copy(update={"tasks": tuple(map(decided, spec.tasks))})


def fitted_stage(
    task: CascadeTask, spec: JobSpec, readout: str, max_tokens: int | None
) -> QuestionTask:
    """A readout of the output as a stage, which reads at most these tokens of a document.

    `readout` is its key.
    """
    return QuestionTask(
        name=task.name,
        kind=task.kind,
        labels=task.labels,
        chunks=task.chunks,
        readout=f"{spec.output.rstrip('/')}/{readout}",
        documents=None if max_tokens is None else spec.documents.part(max_tokens),
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
    """Writes the certificate as the task's newest one, unless that says the same."""
    if next(read_certificates(store, certificate.task), None) == certificate:
        return
    key_of = partial(certificate_key, certificate.task)
    for number in free_numbers(store, key_of):
        if store.create(key_of(number), certificate.json()):
            return
