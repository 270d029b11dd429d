"""The tasks of a spec: what one reader answers, or a cascade of such stages.

Entry point: `TaskSpec`, a union of classes. The keys of a task determine its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.model import Frozen, Mistake, ModelSpec, mistakes_error
from pipeline.spec.stages import (
    HEAD,
    READERS,
    ClassifierTask,
    EncoderTask,
    QuestionTask,
    Share,
    StageSpec,
    Task,
    Text,
    UnaskedTask,
    reader_of,
)

_OF_THE_TASK = ("name", "kind", "labels", "chunks")  # what a stage has of its task
_OF_THE_STAGE = ("question", "readout", "length_penalty", "beam")  # of the only stage, in the task


class CascadeSpec(Frozen):
    """A cheap answer where it is certain enough, else the whole model's, as each run proves."""

    agree: Share | None = None
    """Share of all documents that have the label of the last stage; of a score, one step beside it
    counts, too. Default, without `recall` and `precision`: 0.98."""
    recall: Share | None = None
    """Recall of the cascade, with the answers of the last stage as truth."""
    precision: Share | None = None
    """Precision of the cascade, with the answers of the last stage as truth."""
    label: str | None = None
    """The positive label of `recall` and `precision`. Default: the first one."""
    threshold: Share | None = None
    """The probability of this label from which a document is positive. Default: the number with
    which `filter.keep` compares it, or 0.5."""
    by: Text | None = None
    """Column of the input: the promise holds for each of its values in the sample."""
    confidence: Share = 0.95
    """Confidence level of the proof."""
    sample: PositiveInt | None = None
    """Documents that are drawn, which every stage answers: at most a tenth of the corpus. Default:
    2,000, or more where the promise needs more."""
    teacher: ModelSpec | None = None
    """A model that answers in place of the spec's where the readout is uncertain, and in the
    sample; also a server's. Default: the spec's model."""
    stages: tuple[StageSpec, ...] = Field(default=(), min_length=1)
    """The stages, the cheapest first: each has a question, a readout, a classifier, or a `model` of
    its own, and maybe `labels`, with the texts or classes that mean the task's labels there, and
    `documents`, with how much of a document it reads: `{max_tokens: 256}` is its first part. A
    stage before the last decides where it is certain enough. Default: a readout of an early layer,
    which the run fits to the answers of the task's own question."""

    @model_validator(mode="before")
    @classmethod
    def _promises_something(cls, content: Any) -> Any:
        names = ("agree", "recall", "precision")
        if isinstance(content, Mapping) and all(content.get(name) is None for name in names):
            return {**content, "agree": 0.98}
        return content

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> CascadeSpec:
        if self.agree is not None and (self.recall or self.precision):
            fix = "is of all labels; write it, or recall and precision of one label"
            raise mistakes_error([(("agree",), fix)])
        if self.agree is not None and (self.label or self.threshold):
            key = "threshold" if self.label is None else "label"
            fix = "is of recall and precision; write one of them in place of agree, or remove it"
            raise mistakes_error([((key,), fix)])
        if self.teacher is not None and len(self.stages) > 1:
            fix = "is the last stage where the run fits the one before; write it as the model of "
            raise mistakes_error([(("teacher",), f"{fix}the last stage, or remove stages")])
        return self

    @property
    def is_auto(self) -> bool:
        """Whether the run fits the stage before the last itself."""
        return len(self.stages) == 1

    @property
    def promise(self) -> dict[str, Any]:
        """What is promised of which answers, as JSON values."""
        unpromised = {"stages", "teacher", "sample"}
        own = self.model_dump(mode="json", exclude=unpromised, exclude_none=True)
        return {"threshold": 0.5, **own}


def _or_auto(schema: dict[str, Any]) -> None:
    """A cascade in the JSON schema of a spec."""
    schema["anyOf"] = [{"const": "auto"}, {"$ref": schema.pop("$ref")}]


def _with_its_stage(schema: dict[str, Any]) -> None:
    """A task with a cascade in the JSON schema of a spec."""
    of_question = QuestionTask.model_json_schema()["properties"]
    schema["properties"] |= {key: of_question[key] for key in _OF_THE_STAGE}


class CascadeTask(UnaskedTask):
    """Stages answer one after the other: each only what those before it did not decide."""

    model_config = ConfigDict(json_schema_extra=_with_its_stage)
    cascade: CascadeSpec = Field(json_schema_extra=_or_auto)
    """`auto`, or what the answers promise: see `cascade` below."""
    classifier: ClassVar[None] = None

    @property
    def question(self) -> str | None:
        """The question of the last stage."""
        return self.whole.question

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """The task itself; of kind `multi` what the last stage asks about each label."""
        return self.whole.parts if self.kind == "multi" else (self,)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade, each a task of this name."""
        return self.cascade.stages

    @property
    def whole(self) -> StageSpec:
        """The last stage, as a task of its own under this one's condition."""
        last = self.stages[-1]
        return last.model_copy(update={"when": self.when, "guide": self.guide})

    @model_validator(mode="before")
    @classmethod
    def _has_a_last_stage(cls, content: Any) -> Any:
        """Without stages, the task's own question is the last one, which `teacher` answers."""
        cascade = content.get("cascade") if isinstance(content, Mapping) else None
        if cascade is None or (isinstance(cascade, Mapping) and cascade.get("stages")):
            return content
        of_the_task = {key: value for key, value in content.items() if key not in _OF_THE_STAGE}
        if cascade == "auto":
            cascade = {}
        if not isinstance(cascade, Mapping):
            return of_the_task
        last = {key: content[key] for key in _OF_THE_STAGE if content.get(key) is not None}
        if cascade.get("teacher") is not None:
            last["model"] = cascade["teacher"]
        return {**of_the_task, "cascade": {**cascade, "stages": [last]}}

    @field_validator("cascade", mode="before")
    @classmethod
    def _stages_are_of_the_task(cls, cascade: Any, other: ValidationInfo) -> Any:
        """Each stage has the keys that every task has from the task, and may have other labels."""
        stages = cascade.get("stages") if isinstance(cascade, Mapping) else None
        if not isinstance(stages, list | tuple):
            return cascade
        # — where the task's own keys are wrong, its stages are judged by right ones
        of_task = {"name": "task", "labels": ("a", "b")}
        of_task |= {key: other.data[key] for key in _OF_THE_TASK if key in other.data}
        whole = []
        for number, stage in enumerate(stages):
            if not isinstance(stage, Mapping):
                whole.append(stage)
                continue
            fix = "is set in the task, for all stages; remove it"
            wrong: list[Mistake] = [
                (("stages", number, key), fix)
                for key in Task.model_fields
                if key != "labels" and stage.get(key) not in (None, other.data.get(key))
            ]
            if wrong:
                raise mistakes_error(wrong)
            set_keys = {key: value for key, value in stage.items() if value is not None}
            whole.append({**of_task, **set_keys})
        return {**cascade, "stages": whole}

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        labels, own = list(self.labels), self.cascade
        for key in ("top_k", "separator"):
            if getattr(self, key) is not None:
                yield key, f"its stages answer; remove the task's {key}"
        if own.label is not None and own.label not in labels:
            yield "cascade", f"label {own.label!r} is not one of {labels}; write one of them"
        if self.kind == "multi" and own.agree is None and own.label is None:
            yield "cascade", f"recall and precision are of one label; add label, one of {labels}"
        for number, stage in enumerate(self.stages, 1):
            if list(stage.labels) != labels:
                yield (
                    "cascade",
                    f"stage {number} has the labels {list(stage.labels)}; write those of the task "
                    f"in the same order, {labels}",
                )


TaskSpec = Annotated[
    Annotated[QuestionTask, Tag(READERS["question"])]
    | Annotated[ClassifierTask, Tag(READERS["classifier"])]
    | Annotated[EncoderTask, Tag(HEAD)]
    | Annotated[CascadeTask, Tag(READERS["cascade"])],
    Discriminator(reader_of),
]
