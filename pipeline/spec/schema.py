"""The YAML spec that a user writes, validated and frozen. Entry point: `JobSpec`.

`docs/reference/keys.md` is generated from the descriptions here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, field_validator, model_validator

from pipeline.spec.filters import FilterSpec
from pipeline.spec.gold import GoldSpec, PublishSpec
from pipeline.spec.locations import Location, StorageOptions
from pipeline.spec.model import NO_MODEL, Frozen, Mistake, ModelSpec, mistakes_error
from pipeline.spec.stages import (
    TASK_NAME,
    DocumentsSpec,
    EncoderTask,
    QuestionTask,
    StageSpec,
    unread_by_servers,
)
from pipeline.spec.tasks import CascadeTask, TaskSpec

Place = tuple[int | str, ...]
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
IN_WORDS = {  # the words of an error in place of a pattern
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

    path: Location
    """File, folder or glob, local or at any fsspec URL, such as `s3://` or `hf://`. Formats:
    Parquet, Arrow, WET, text files (`.txt`, one document each), WebDataset (`.tar`), and JSON
    lines, CSV or TSV, each plain or as gzip or zstd. Hidden names and the output are left out below
    a folder or a glob. Or a table: `delta+PATH`, `iceberg://CATALOG/NAMESPACE.TABLE` with a catalog
    of pyiceberg's configuration, `lance+PATH`, or a folder `*.lance`. `@VERSION` after it names a
    version, snapshot, branch or tag; the default is the current one."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `path`. Secrets are refused."""
    image: str | None = Field(default=None, min_length=1)
    """Column with the image of a document, which comes before its text: the image file's bytes, or
    its path, from the folder of the input file or absolute, and below that folder or bucket."""
    text: str | None = Field(
        default_factory=lambda source: None if source["image"] else "text",
        min_length=1,
        json_schema_extra={"default": "text"},
    )
    """Column with the text of a document. With `image`, the default is to read no text."""
    id: str | None = Field(default=None, min_length=1)
    """Column with the id of a document. Default: the hash of the text. Text files have the columns
    `text` and `id`, which is the file's path below the folder. A whole number is its digits (1.0 is
    `1`), a time is `2026-01-31 23:59:59.500`, with the digits of its type, and with `Z` in UTC if
    it has a zone, a duration is the count of its unit, and bytes are UTF-8 or hex digits."""
    quoted: bool | None = None
    """Whether a field of CSV or TSV may be in double quotes, with delimiters and line breaks in it.
    Default: in CSV it may, in TSV a quote is a character."""
    shard_bytes: Literal["auto"] | PositiveInt = "auto"
    """Approximate size of a shard in bytes of input. A shard is the unit of work and of recovery.
    `auto` chooses the size from the size of the input."""

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.id, self.image, self.quoted)

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
    examples: tuple[Example, ...] = Field(default=())
    """Few-shot examples, shown before the document. They are computed once."""
    document: str = "Text:\n{document}"
    """Template of the document. `{document}` occurs exactly once."""

    @field_validator("document")
    @classmethod
    def _has_one_slot(cls, template: str) -> str:
        if template.count("{document}") != 1:
            raise ValueError("write {document} exactly once: the text is inserted there")
        return template


class JobSpec(Frozen):
    """One labelling job: a corpus, a model, and the questions."""

    name: str = Field(pattern=JOB_NAME)
    """Name of the job. Snapshots belong to a name."""
    model: ModelSpec = NO_MODEL
    """The model that answers. Tasks with classifiers need none."""
    input: InputSpec
    """The documents."""
    output: Location
    """Folder or URL where answers and snapshots are kept."""
    storage_options: StorageOptions = Field(default={})
    """Options of the fsspec file system that opens `output`. Secrets are refused."""
    prompt: PromptSpec = PromptSpec()
    """The text around the document and the questions."""
    documents: DocumentsSpec = DocumentsSpec()
    """How much of a document the model reads."""
    max_error_rate: float | None = Field(default=None, ge=0, le=1)
    """Largest share of rows without an answer. A run above it fails. Default: none."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    """The questions. Without `when`, each is asked of every document."""
    gold: GoldSpec = GoldSpec()
    """Gold labels, which `fit`, `eval`, `report` and the gates of a run read."""
    filter: FilterSpec | None = None
    """The rule of `assay filter`. A run ignores it."""
    publish: PublishSpec = PublishSpec()
    """What must hold for a run to publish its answers."""

    @model_validator(mode="before")
    @classmethod
    def _prompts_for_images(cls, content: Any) -> Any:
        """With images, the defaults of the prompt do not mention a text."""
        source = content.get("input") if isinstance(content, Mapping) else None
        if not isinstance(source, Mapping) or not source.get("image"):
            return content
        prompt = content.get("prompt", {})
        if isinstance(prompt, Mapping):
            return {**content, "prompt": {**_IMAGE_PROMPT, **prompt}}
        return content

    @model_validator(mode="before")
    @classmethod
    def _promises_at_the_threshold_of_the_filter(cls, content: Any) -> Any:
        """The default threshold of recall and precision is the one that `filter.keep` has."""
        if not isinstance(content, Mapping) or not isinstance(content.get("tasks"), list | tuple):
            return content
        keep = content["filter"].get("keep") if isinstance(content.get("filter"), Mapping) else None
        if not isinstance(keep, str):
            return content
        return {**content, "tasks": [_at_threshold_of(keep, task) for task in content["tasks"]]}

    @model_validator(mode="after")
    def _can_be_answered(self) -> JobSpec:
        read = [*_read(self.tasks)]
        needs_model = any(task.classifier is None and task.model is None for _, task in read)
        if needs_model and self.model == NO_MODEL:
            raise mistakes_error([(("model",), "missing; add it")])
        asked = [each.model or self.model for _, each in read if isinstance(each, QuestionTask)]
        mistakes: list[Mistake] = []
        for place, task in read:
            mistakes += self._not_read(task, place)
            if isinstance(task, EncoderTask) and (task.model or self.model) in asked:
                mistakes.append(((*place, "question"), "missing; other tasks ask the same model"))
        for number, own in enumerate(self.tasks):
            if not isinstance(own, CascadeTask) or not own.cascade.is_auto:
                continue
            asks = isinstance(own.whole, QuestionTask)
            if self.model == NO_MODEL or self.model.engine != "assay" or not asks:
                fix = "the run fits a readout of model, which is one of engine assay, to the "
                fix += "answers to a question; write both, or the stages of the cascade"
                mistakes.append((("tasks", number, "cascade"), fix))
        servers = {(task.model or self.model).model_dump_json() for task in self.server_tasks}
        if len(servers) > 1:
            fix = "names a second server, and a run has one, with one price; name one"
            mistakes.append((("tasks",), fix))
        if mistakes:
            raise mistakes_error(mistakes)
        return self

    def _not_read(self, task: StageSpec, place: Place) -> Iterator[Mistake]:
        """The keys of a task or a stage, or of its model, that are not read, with the fix."""
        model = task.model or self.model
        model_place: Place = ("model",) if task.model is None else (*place, "model")
        own = [key for key in ("model", "documents") if getattr(task, key) is not None]
        if own and "cascade" not in place:
            fix = "only a stage of a cascade has one of its own; write it for all tasks"
            yield from (((*place, key), fix) for key in own)
        elif task.classifier is None and (
            other := next((e for e in (self.model.engine, model.engine) if e != "assay"), None)
        ):
            unread = ["readout", "beam"]
            if other == "openai":
                unread.append("length_penalty")
            if other == "vllm" or self.model.engine != "assay":
                unread.append("model")
            for key in unread:
                if getattr(task, key):
                    fix = f"not supported with engine: {other}; remove it"
                    if key == "model" and model.engine == "vllm":
                        fix = "vLLM shares no process with another model; start its server, and "
                        fix += "write engine: openai and base_url"
                    yield (*place, key), fix
            if isinstance(task, EncoderTask):
                yield (
                    (*place, "question"),
                    f"missing; with engine: {other} each task has a question",
                )
            elif other == "openai":
                yield from (((*place, key), fix) for key, fix in unread_by_servers(task))
        elif isinstance(task, EncoderTask):
            for key, is_set in {"dtype": model.rounded_to, "kv": model.kv != "none"}.items():
                if is_set:
                    yield (*model_place, key), "not supported for a sequence classifier; remove it"

    @model_validator(mode="after")
    def _gold_is_of_the_tasks(self) -> JobSpec:
        if mistakes := [(("gold", *place), fix) for place, fix in self.gold.mistakes(self.tasks)]:
            raise mistakes_error(mistakes)
        return self

    @model_validator(mode="after")
    def _images_are_read(self) -> JobSpec:
        if self.input.image is None:
            return self
        not_read = {
            "an encoder": self.uses_encoder,
            f"model.engine: {self.model.engine}": self.model.engine != "assay",
            f"model.dtype: {self.model.dtype}": self.model.rounded_to is not None,
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
    def server_tasks(self) -> tuple[StageSpec, ...]:
        """The tasks, and the stages of cascades, that a server answers."""
        asked = (task for _, task in _read(self.tasks) if task.classifier is None)
        return tuple(task for task in asked if (task.model or self.model).engine == "openai")

    @property
    def server(self) -> ModelSpec | None:
        """The model of these tasks."""
        return next((task.model or self.model for task in self.server_tasks), None)

    @property
    def uses_encoder(self) -> bool:
        """Whether the model is a sequence classifier, whose head answers."""
        return any(isinstance(task, EncoderTask) for task in self.tasks)

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """What is asked for the answers to all tasks: see `TaskSpec.parts`."""
        return tuple(part for task in self.tasks for part in task.parts)

    @property
    def own_tasks(self) -> tuple[TaskSpec, ...]:
        """The tasks, each cascade as its last stage; not those of other models or documents."""
        asked = (task.whole if isinstance(task, CascadeTask) else task for task in self.tasks)
        return tuple(task for task in asked if task.model is None and task.documents is None)

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

    @field_validator("tasks")
    @classmethod
    def _names_are_unique(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        names = [task.name for task in tasks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{repeated} named more than once; give each task its own name")
        return tasks


def _at_threshold_of(keep: str, task: Any) -> Any:
    """A task as it is written; its cascade has the number with which the filter compares p."""
    cascade = task.get("cascade") if isinstance(task, Mapping) else None
    if not isinstance(cascade, Mapping) or not {"recall", "precision"} & cascade.keys():
        return task
    of_cascade = cascade.get("label") or next(iter(task.get("labels") or ()), None)
    name, label = (re.escape(str(text)) for text in (task.get("name"), of_cascade))
    written = rf'\b{name}\.p\.(?:{label}\b|"{label}")\s*[<>]=?\s*(0?\.\d+)'
    compared = {*map(float, re.findall(written, keep))}
    if len(compared) != 1 or "threshold" in cascade:
        return task
    return {**task, "cascade": {**cascade, "threshold": compared.pop()}}


def _read(tasks: Sequence[TaskSpec]) -> Iterator[tuple[Place, StageSpec]]:
    """The tasks and the stages of cascades, each with its place in a spec."""
    for number, task in enumerate(tasks):
        if not isinstance(task, CascadeTask):
            yield ("tasks", number), task
        for place, stage in enumerate(task.stages):
            yield ("tasks", number, "cascade", "stages", place), stage
