"""Which stages of a cascade decide, by the certificates of the output.

Entry points: `Cascade` and `decided_by`, and `fitted_stage` for a readout that a run fits. Must
import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.fitted.certificate import Certificate, Thresholds
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.certificates import read_certificates
from pipeline.spec.fingerprint import Fingerprint, cascade_fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import open_store


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
        known = self.certificate
        if known is None or known.thresholds is None:
            return whole
        return cascade_fingerprint(task, known.content)


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
