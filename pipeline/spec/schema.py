"""The YAML spec that a user writes, validated and frozen. Entry point: `JobSpec`.

The manual's page about the spec is generated from the descriptions here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from pipeline.spec.filters import FilterSpec
from pipeline.spec.locations import Location, StorageOptions
from pipeline.spec.model import (
    NO_MODEL,
    Frozen,
    Mistake,
    ModelSpec,
    mistakes_error,
)
from pipeline.spec.steps import TASK_NAME, AskedTask, EncoderTask, StageSpec
from pipeline.spec.tasks import CascadeTask, TaskSpec

Place = tuple[int | str, ...]
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
IN_WORDS = {  # what an error says instead of a pattern
    TASK_NAME: "write 1 to 63 lower case letters, digits and _, and begin with a letter",
    JOB_NAME: "write 1 to 63 letters, digits and . _ - without spaces, and begin with a letter or "
    "a digit",
}


# The prompt's defaults for images, in place of those for texts.
_IMAGE_PROMPT = {
    "instruction": "Look at the image, then answer the question.",
    "document": "{document}",
}


class Columns(NamedTuple):
    """The columns of the input that are read."""

    text: str | None
    id: str | None
    image: str | None = None
    quoted: bool | None = None  # of CSV and TSV; None: as is usual for the format


class InputSpec(Frozen):
    """The documents: which files, and which columns of them."""

    path: Location = Field(min_length=1)
    """File, folder or glob, local or at any fsspec URL, such as `s3://` or `hf://`. Formats:
    Parquet, Arrow, WET, text files (`.txt`, one document each), WebDataset (`.tar`), and JSON
    lines, CSV or TSV, each plain or as gzip or zstd. Hidden names and the output are left out below
    a folder or a glob."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `path`. Secrets are refused."""
    text: str | None = Field(default="text", min_length=1)
    """Column with the text of a document. With `image`, the default is to read no text."""
    image: str | None = Field(default=None, min_length=1)
    """Column with the image of a document, which comes before its text: the image file's bytes, or
    its path, from the folder of the input file or absolute, and below that folder or bucket."""
    id: str | None = Field(default=None, min_length=1)
    """Column with the id of a document. Default: the hash of the text. Text files have the columns
    `text` and `id`, which is the file's path below the folder. A whole number is its digits (1.0 is
    `1`), a time is `2026-01-31 23:59:59.5`, with `Z` in UTC if it has a zone, a duration is in
    seconds, and bytes are UTF-8 or hex digits."""
    quoted: bool | None = None
    """Whether a field of CSV or TSV may be in double quotes, with delimiters and line breaks in it.
    Default: in CSV it may, in TSV a quote is a character."""
    shard_bytes: Literal["auto"] | PositiveInt = "auto"
    """Approximate size of a shard in bytes of input. A shard is the unit of work and of recovery.
    `auto` chooses the size from the size of the input."""

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.id, self.image, self.quoted)

    @model_validator(mode="before")
    @classmethod
    def _image_needs_no_text(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and content.get("image") and "text" not in content:
            return {**content, "text": None}
        return content

    @model_validator(mode="after")
    def _has_content(self) -> InputSpec:
        if self.text is None and self.image is None:
            raise ValueError("names neither a text nor an image column; write one")
        return self


class Example(Frozen):
    """A worked example, shown to the model as an earlier turn of the conversation."""

    document: str
    """Text of the example."""
    question: str
    """Question about the example, written as in a task."""
    answer: str
    """Correct answer: one of the labels, written as in a task."""


class PromptSpec(Frozen):
    """The text around the document, the same for every document."""

    system: str | None = None
    """System prompt. Default: no system message."""
    instruction: str = "Read the text, then answer the question."
    """Text before the document."""
    examples: tuple[Example, ...] = Field(default=(), strict=False)
    """Few-shot examples, shown before the document. They are computed once."""
    document: str = "Text:\n{document}"
    """Template of the document. `{document}` occurs exactly once."""

    @field_validator("document")
    @classmethod
    def _has_one_slot(cls, template: str) -> str:
        if template.count("{document}") != 1:
            raise ValueError("write {document} exactly once: the text is inserted there")
        return template


class DocumentsSpec(Frozen):
    """How much of a document the model reads."""

    max_tokens: PositiveInt = 2048
    """Most tokens of a document, or of a chunk, that the model reads at once."""
    too_long: Literal["head", "tail", "middle", "chunk"] = "head"
    """What is read of a longer document. `head`: its start; `tail`: its end; `middle`: its
    middle, without both ends; `chunk`: all of it, in chunks."""
    overlap_tokens: NonNegativeInt = 128
    """Number of tokens that two neighbouring chunks share (`too_long: chunk`)."""

    @model_validator(mode="after")
    def _chunks_advance(self) -> DocumentsSpec:
        if self.too_long == "chunk" and self.overlap_tokens >= self.max_tokens:
            raise ValueError("overlap_tokens must be below max_tokens, or chunks do not advance")
        return self


class JobSpec(Frozen):
    """One labelling job: a corpus, a model, and the questions."""

    name: str = Field(pattern=JOB_NAME)
    """Name of the job. Snapshots belong to a name."""
    model: ModelSpec
    """The model that answers."""
    input: InputSpec
    """The documents."""
    output: Location = Field(min_length=1)
    """Folder or URL where answers and snapshots are kept."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `output`. Secrets are refused."""
    prompt: PromptSpec = PromptSpec()
    """The text around the document and the questions."""
    documents: DocumentsSpec = DocumentsSpec()
    """How much of a document the model reads."""
    max_error_rate: float | None = Field(default=None, ge=0, le=1)
    """Largest share of rows without an answer. A run above it fails. Default: none."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1, strict=False)
    """The questions. All are asked of every document."""
    filter: FilterSpec | None = None
    """The rule of `assay filter`. A run ignores it."""

    @model_validator(mode="before")
    @classmethod
    def _prompts_for_images(cls, content: Any) -> Any:
        """With images, the defaults of the prompt do not speak of a text."""
        source = content.get("input") if isinstance(content, Mapping) else None
        if not isinstance(source, Mapping) or not source.get("image"):
            return content
        prompt = content.get("prompt", {})
        if isinstance(prompt, Mapping):
            return {**content, "prompt": {**_IMAGE_PROMPT, **prompt}}
        return content

    @model_validator(mode="before")
    @classmethod
    def _may_need_no_model(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or "model" in content:
            return content
        tasks = content.get("tasks")
        if not isinstance(tasks, list | tuple) or not tasks:
            return content
        return {**content, "model": NO_MODEL} if all(map(_needs_no_model, tasks)) else content

    @model_validator(mode="after")
    def _can_be_answered(self) -> JobSpec:
        mistakes: list[Mistake] = []
        read = [*_read(self.tasks)]
        asked = [each.model or self.model for _, each in read if isinstance(each, AskedTask)]
        for place, task in read:
            model = task.model or self.model
            if task.model is not None and "cascade" not in place:
                fix = "only a stage of a cascade has a model of its own; write it for all tasks"
                mistakes.append(((*place, "model"), fix))
            if task.classifier is None and "vllm" in (self.model.engine, model.engine):
                mistakes += _not_by_vllm(self.model, task, place)
            elif isinstance(task, EncoderTask):
                mistakes += _not_by_encoders(model, task, place)
                if model in asked:
                    mistakes.append(((*place, "question"), task.refused["question"]))
        if mistakes:
            raise mistakes_error(mistakes)
        return self

    @model_validator(mode="after")
    def _images_are_read(self) -> JobSpec:
        if self.input.image is None:
            return self
        not_read = {
            "an encoder": self.uses_encoder,
            "model.engine: vllm": self.model.engine == "vllm",
            "model.dtype: int8": self.model.is_int8,
            "documents.too_long: chunk": self.documents.too_long == "chunk",
            "prompt.examples": bool(self.prompt.examples),
        }
        for number, task in enumerate(self.tasks):
            not_read[f"tasks.{number}.classifier"] = task.classifier is not None
            not_read[f"tasks.{number}.cascade"] = isinstance(task, CascadeTask)
        if present := [key for key, is_set in not_read.items() if is_set]:
            fix = f"images are not read with {present[0]}; remove one of the two"
            raise mistakes_error([(("input", "image"), fix)])
        return self

    @property
    def model_tasks(self) -> tuple[TaskSpec, ...]:
        """The tasks that the model answers; the others have a classifier or a cascade."""
        return tuple(
            task
            for task in self.tasks
            if task.classifier is None and not isinstance(task, CascadeTask)
        )

    @property
    def uses_encoder(self) -> bool:
        """Whether the model is a sequence classifier, whose head answers."""
        return any(isinstance(task, EncoderTask) for task in self.tasks)

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """What is asked for the answers to all tasks: see `TaskSpec.parts`."""
        return tuple(part for task in self.tasks for part in task.parts)

    @property
    def model_parts(self) -> tuple[TaskSpec, ...]:
        """What the model is asked for the answers to its tasks."""
        return tuple(part for task in self.model_tasks for part in task.parts)

    def task(self, name: str) -> TaskSpec:
        """The task with this name."""
        return next(task for task in self.tasks if task.name == name)

    @property
    def cascades(self) -> tuple[CascadeTask, ...]:
        """The tasks with a cascade."""
        return tuple(task for task in self.tasks if isinstance(task, CascadeTask))

    def stage_specs(self) -> tuple[tuple[JobSpec, ...], ...]:
        """The specs that answer the tasks, without conditions, by stage of a cascade.

        Stages of one model are answered together. The first stages come with the other tasks.
        """
        rounds = max((len(task.stages) for task in self.cascades), default=1)
        return tuple(self._round_specs(number) for number in range(rounds))

    def _round_specs(self, number: int) -> tuple[JobSpec, ...]:
        """The specs that answer the stages with this number, one for each model."""
        # — the conditions are those of the whole spec
        tasks = (task.model_copy(update={"when": None}) for task in self.tasks)
        plain = [task for task in tasks if not isinstance(task, CascadeTask)]
        groups: list[tuple[ModelSpec, list[StageSpec]]] = [
            (self.model, plain if number == 0 else [])
        ]
        for task in self.tasks:
            if number < len(task.stages):
                model = task.stages[number].model or self.model
                tasks_of = next((tasks for other, tasks in groups if other == model), None)
                if tasks_of is None:
                    groups.append((model, tasks_of := []))
                tasks_of.append(task.stages[number])
        return tuple(
            self.model_copy(update={"model": model, "tasks": tuple(of_model)})
            for model, of_model in groups
            if of_model
        )

    @field_validator("tasks")
    @classmethod
    def _names_are_unique(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        names = [task.name for task in tasks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{repeated} named more than once; give each task its own name")
        return tasks


def _needs_no_model(task: object) -> bool:
    """Whether a task as it was written needs no model of the spec."""
    if not isinstance(task, Mapping):
        return False
    if "cascade" not in task:
        return "classifier" in task or "model" in task
    stages = task["cascade"].get("stages") if isinstance(task["cascade"], Mapping) else None
    return isinstance(stages, list | tuple) and all(map(_needs_no_model, stages))


def _read(tasks: Sequence[TaskSpec]) -> Iterator[tuple[Place, StageSpec]]:
    """The tasks and the stages of cascades, each with its place in a spec."""
    for number, task in enumerate(tasks):
        if not isinstance(task, CascadeTask):
            yield ("tasks", number), task
        for place, stage in enumerate(task.stages):
            yield ("tasks", number, "cascade", "stages", place), stage


def _not_by_vllm(spec_model: ModelSpec, asked: StageSpec, place: Place) -> Iterator[Mistake]:
    """The keys of a task or a stage that vLLM does not read."""
    if asked.model is not None:
        yield (*place, "model"), "with engine: vllm all stages have one model; remove this"
    if (asked.model or spec_model).engine != "vllm":
        return
    for key in ("readout", "beam"):
        if getattr(asked, key, None) is not None:
            fix = "not supported with engine: vllm; remove this, or write engine: assay"
            yield (*place, key), fix
    if isinstance(asked, EncoderTask):
        yield (*place, "question"), "vLLM answers questions; write one"


def _not_by_encoders(model: ModelSpec, asked: EncoderTask, place: Place) -> Iterator[Mistake]:
    """The keys of its model that an encoder does not read."""
    above: Place = ("model",) if asked.model is None else (*place, "model")
    for key, is_set in {"dtype": model.is_int8, "kv": model.kv != "none"}.items():
        if is_set:
            yield (*above, key), "not supported for an encoder; remove it"
