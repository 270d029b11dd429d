"""Which stages of a cascade decide, by the certificates of the output.

Entry points: `certified`, and `fitted_stage` for a readout that a run fits. Must import neither
torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.fitted.certificate import Certificate
from pipeline.ledger.certificates import read_certificates
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import open_store


def certified(
    spec: JobSpec,
    raw: Mapping[str, tuple[str, ...]],  # by task, the raw fingerprints of its stages
) -> tuple[JobSpec, dict[str, Certificate]]:
    """The spec with the stages that decide, and by task the newest certificate.

    A certificate is of one promise and of one version of all stages, except a fitted one. Without
    one, or where it says that nothing is saved, the last stage is in the task's place.
    """
    store = open_store(spec.output, spec.storage_options)
    tasks: list[TaskSpec] = []
    certificates: dict[str, Certificate] = {}
    for task in spec.tasks:
        if isinstance(task, CascadeTask):
            stages = raw[task.name]
            for certificate in read_certificates(store, task.name):
                known = certificate.stages[-len(stages) :]
                if certificate.promise == task.cascade.promise and known in (stages, stages[-1:]):
                    certificates[task.name] = certificate
                    break
            task = _decided_by(task, spec, certificates.get(task.name))
        tasks.append(task)
    return spec.model_copy(update={"tasks": tuple(tasks)}), certificates


def _decided_by(task: CascadeTask, spec: JobSpec, certificate: Certificate | None) -> TaskSpec:
    """The task with a certificate's fitted stage before its own, or its last stage alone."""
    if certificate is None or certificate.thresholds is None:
        return task.whole
    if not certificate.readout:
        return task
    stage = fitted_stage(task, spec, certificate.readout, certificate.max_tokens)
    cascade = task.cascade.model_copy(update={"stages": (stage, *task.stages)})
    return task.model_copy(update={"cascade": cascade})


def fitted_stage(
    task: CascadeTask, spec: JobSpec, readout: str, max_tokens: int | None
) -> QuestionTask:
    """A readout of the output as a stage, which reads at most these tokens of a document.

    `readout` is its key.
    """
    documents = spec.documents.model_copy(update={"max_tokens": max_tokens})
    return QuestionTask(
        name=task.name,
        kind=task.kind,
        labels=task.labels,
        chunks=task.chunks,
        readout=f"{spec.output.rstrip('/')}/{readout}",
        documents=None if max_tokens is None else documents,
    )
