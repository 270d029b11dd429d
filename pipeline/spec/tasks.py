"""The tasks of a spec: what one reader answers, or a cascade of such stages.

Entry point: `TaskSpec`, the union of these. The keys of a task say which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from pipeline.spec.model import Frozen, mistakes_error
from pipeline.spec.steps import (
    SCORING,
    ClassifierTask,
    EncoderTask,
    QuestionTask,
    ReadoutTask,
    StageSpec,
    Task,
    form_of,
    scoring_keys,
)

# What the stages of a cascade have of their task, and what they cannot have.
INHERITED = ("name", "kind", "labels", "chunks", *SCORING)
_OF_THE_TASK = ("when", "top_k", "separator")


class CascadeSpec(Frozen):
    """Stages that answer one after the other: each only what those before it did not decide."""

    stages: tuple[StageSpec, ...] = Field(min_length=2, strict=False)
    """The stages, the cheapest first: each has a question, a readout, a classifier, or a `model` of
    its own, and maybe `labels`, with the texts or classes that mean the task's labels there. A
    stage before the last decides a document if its probability is outside the thresholds. The last
    stage decides the others."""
    file: str = Field(min_length=1)
    """Path or URL of the thresholds that `assay cascade --to` wrote."""


class CascadeTask(Task):
    """Two labels, between which stages decide."""

    cascade: CascadeSpec
    """Answers in stages, which have the questions, the readouts or the classifiers."""
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False, strict=False)
    """As in a task with a question, of all stages with one."""
    beam: PositiveInt | None = None
    """As in a task with a question, of all stages with one."""
    question: ClassVar[None] = None
    readout: ClassVar[None] = None
    classifier: ClassVar[None] = None
    refused: ClassVar = {
        key: f"its stages answer; remove the task's {key}"
        for key in ("question", "readout", "classifier", "model")
    }

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade, each a task of this name."""
        return self.cascade.stages

    @model_validator(mode="before")
    @classmethod
    def _stages_inherit(cls, content: Any) -> Any:
        """Each stage has the task's name, labels, chunks and scoring."""
        cascade = content.get("cascade") if isinstance(content, Mapping) else None
        if not isinstance(cascade, Mapping):
            return content
        stages = cascade.get("stages")
        if not isinstance(stages, list | tuple):
            return content
        own = {key: content[key] for key in INHERITED if content.get(key) is not None}
        filled = []
        for number, stage in enumerate(stages):
            if not isinstance(stage, Mapping):
                filled.append(stage)
                continue
            for key in (*INHERITED, *_OF_THE_TASK):
                if key != "labels" and stage.get(key) not in (None, own.get(key)):
                    fix = "is set in the task, for all stages; remove it"
                    raise mistakes_error([(("cascade", "stages", number, key), fix)])
            scored = form_of(stage) == "QuestionTask"
            of_task = {k: v for k, v in own.items() if scored or k not in SCORING}
            filled.append({**of_task, **{k: v for k, v in stage.items() if v is not None}})
        return {**content, "cascade": {**cascade, "stages": filled}}

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        labels = list(self.labels)
        if len(labels) != 2:
            yield "labels", f"a cascade decides between two labels, and the task has {len(labels)}"
            return
        for key in ("top_k", "separator"):
            if getattr(self, key) is not None:
                yield key, f"its stages answer; remove the task's {key}"
        for number, stage in enumerate(self.stages, 1):
            if list(stage.labels) != labels:
                yield (
                    "cascade",
                    f"stage {number} has the labels {list(stage.labels)}; write those of the task "
                    f"in the same order, {labels}",
                )
            for key in () if isinstance(stage, QuestionTask) else scoring_keys(self):
                yield key, f"stage {number} reads no label's tokens; remove this, or the stage"


TaskSpec = Annotated[
    Annotated[QuestionTask, Tag("QuestionTask")]
    | Annotated[ReadoutTask, Tag("ReadoutTask")]
    | Annotated[ClassifierTask, Tag("ClassifierTask")]
    | Annotated[EncoderTask, Tag("EncoderTask")]
    | Annotated[CascadeTask, Tag("CascadeTask")],
    Discriminator(form_of),
]
