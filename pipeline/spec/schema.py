"""What a user writes: the YAML spec, validated and frozen.

Knows the spec's keys, their defaults and their rules. Knows nothing of models, files or Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.locations import Location, StorageOptions

Quantize = Literal["none", "int8", "fp8"]

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
# More labels than this have no column each; `top_k` of them are kept.
MOST_COLUMNS = 1_000
# What `open_labels` has of every document, in columns beside the tasks'.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")


class Frozen(BaseModel):
    """Immutable, strict about types, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(Frozen):
    """The model that answers."""

    path: Location = Field(min_length=1)
    storage_options: StorageOptions = {}
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: PositiveInt = 1  # of one worker: its layers are spread over so many
    quantize: Quantize = "none"

    @field_validator("gpus")
    @classmethod
    def _are_used(cls, gpus: int, other: ValidationInfo) -> int:
        if gpus > 1 and other.data.get("device") == "cpu":
            raise ValueError("device: cpu uses no GPU; write device: cuda, or gpus: 1")
        return gpus

    @field_validator("quantize")
    @classmethod
    def _runs(cls, quantize: str, other: ValidationInfo) -> str:
        # torchao multiplies by the integers and then scales: products of 460,000 in SmolLM2-135M.
        if quantize == "int8" and other.data.get("dtype") == "float16":
            raise ValueError("sums of int8 weights overflow float16; write another dtype, or fp8")
        if quantize != "none" and other.data.get("gpus", 1) > 1:
            raise ValueError("8-bit weights are not spread over GPUs; write none, or gpus: 1")
        return quantize


class InputSpec(Frozen):
    """The documents: which files, and which columns of them."""

    path: Location = Field(min_length=1)
    storage_options: StorageOptions = {}
    text: str = Field(default="text", min_length=1)
    id: str | None = Field(default=None, min_length=1)
    shard_bytes: Literal["auto"] | PositiveInt = "auto"


class Example(Frozen):
    """A worked example, shown to the model as an earlier turn of the conversation."""

    document: str
    question: str
    answer: str


class PromptSpec(Frozen):
    """What surrounds the document, the same for every document."""

    system: str | None = None
    instruction: str = "Read the text, then answer the question."
    examples: tuple[Example, ...] = Field(default=(), strict=False)
    document: str = "Text:\n{document}"

    @field_validator("document")
    @classmethod
    def _has_one_slot(cls, template: str) -> str:
        if template.count("{document}") != 1:
            raise ValueError("write {document} exactly once: it is where the text goes")
        return template


class DocumentsSpec(Frozen):
    """How much of a document is read, in tokens of the model."""

    max_tokens: PositiveInt = 2048
    too_long: Literal["head", "tail", "middle", "chunk"] = "head"
    overlap_tokens: NonNegativeInt = 128

    @model_validator(mode="after")
    def _chunks_advance(self) -> DocumentsSpec:
        if self.too_long == "chunk" and self.overlap_tokens >= self.max_tokens:
            raise ValueError(
                "overlap_tokens must be smaller than max_tokens, or chunks stand still"
            )
        return self


def _as_verbalizers(labels: object) -> object:
    """A plain list of labels -> each label with itself as its one verbalizer."""
    if not isinstance(labels, list | tuple):
        return labels
    odd = [label for label in labels if isinstance(label, dict | list)]
    if odd:
        raise ValueError(f"a list holds names of labels; verbalizers are {{name: [form]}}: {odd}")
    repeated = sorted({str(label) for label in labels if labels.count(label) > 1})
    if repeated:
        raise ValueError(f"{repeated} listed more than once; list each label once")
    return {label: (label,) for label in labels}


Verbalizers = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Labels = Annotated[dict[str, Verbalizers], BeforeValidator(_as_verbalizers), Field(min_length=2)]


class ContextualSpec(Frozen):
    """Calibration by what the model answers about documents without content."""

    method: Literal["contextual"]
    documents: tuple[str, ...] = Field(default=("N/A", "[MASK]", ""), min_length=1, strict=False)


class FittedSpec(Frozen):
    """Calibration by a file that `assay calibrate` wrote."""

    method: Literal["batch", "temperature", "isotonic"]
    file: str = Field(min_length=1)


class TaskSpec(Frozen):
    """One closed question, asked of every document, or with a readout and none read off it."""

    # — a default is no exception to the rules: without `top_k`, labels can be too many
    model_config = ConfigDict(validate_default=True)

    name: str = Field(pattern=TASK_NAME)
    readout: Annotated[str, Field(min_length=1)] | None = None
    question: Annotated[str, Field(min_length=1)] | None
    labels: Labels
    chunks: Literal["max", "mean"] = "max"
    scoring: Literal["auto", "first_token", "full"] = "auto"
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False, strict=False)
    beam: PositiveInt | None = None  # null: every label exactly
    top_k: PositiveInt | None = None
    separator: str | None = Field(default=None, min_length=1)
    calibration: ContextualSpec | FittedSpec | None = Field(default=None, discriminator="method")

    @field_validator("name")
    @classmethod
    def _has_a_column_of_its_own(cls, name: str) -> str:
        if name in DOCUMENT_COLUMNS:
            raise ValueError(
                "every document has a column of this name, and a task is a column beside it; "
                f"name it otherwise than {', '.join(DOCUMENT_COLUMNS)}"
            )
        return name

    @field_validator("question")
    @classmethod
    def _is_asked_or_read(cls, question: str | None, other: ValidationInfo) -> str | None:
        if question is None and other.data.get("readout", "") is None:
            raise ValueError("a task without a question needs a readout; write either")
        return question

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
        owner: dict[str, str] = {}
        for label, verbalizers in labels.items():
            if not label:
                raise ValueError("a label needs a name")
            if not verbalizers:
                raise ValueError(f"label {label!r} needs at least one verbalizer")
            for verbalizer in verbalizers:
                if verbalizer in owner:
                    raise ValueError(f"{verbalizer!r} stands twice; write each verbalizer once")
                owner[verbalizer] = label
        return labels

    @field_validator("scoring", "length_penalty", "beam")
    @classmethod
    def _is_of_the_models_own_words(
        cls, wanted: str | float | None, other: ValidationInfo
    ) -> str | float | None:
        if wanted and wanted != "auto" and other.data.get("readout") is not None:
            raise ValueError(
                "a trained readout reads no label's tokens; leave this out, or the readout"
            )
        return wanted

    @field_validator("length_penalty", "beam")
    @classmethod
    def _is_of_whole_labels(cls, wanted: float | None, other: ValidationInfo) -> float | None:
        if wanted and other.data.get("scoring") == "first_token":
            raise ValueError("a first token has neither length nor beams; write scoring: full")
        return wanted

    @field_validator("top_k")
    @classmethod
    def _fits_a_struct(cls, top_k: int | None, other: ValidationInfo) -> int | None:
        labels = len(other.data.get("labels", ()))
        if top_k is None and labels > MOST_COLUMNS:
            raise ValueError(
                f"{labels:,} labels are too many for a column each; say how many of the likeliest "
                f"are kept: top_k: 10"
            )
        return top_k

    @field_validator("separator")
    @classmethod
    def _occurs(cls, separator: str | None, other: ValidationInfo) -> str | None:
        labels = other.data.get("labels", ())
        if separator and labels and not any(separator in label for label in labels):
            raise ValueError("no label has it; write what stands between the levels of a label")
        return separator

    @field_validator("calibration")
    @classmethod
    def _knows_every_label(
        cls, calibration: ContextualSpec | FittedSpec | None, other: ValidationInfo
    ) -> ContextualSpec | FittedSpec | None:
        if calibration is not None and other.data.get("top_k") is not None:
            raise ValueError(
                "a calibration changes the probabilities of all labels, and top_k keeps but the "
                "likeliest; leave out either"
            )
        if isinstance(calibration, ContextualSpec) and other.data.get("beam") is not None:
            raise ValueError(
                "what documents without content say of a label is measured, and a beam does not "
                "reach every label; leave out beam, or calibrate by a file"
            )
        return calibration


class ExitSpec(Frozen):
    """How deep documents are read: all to one layer, or each until its answers are sure."""

    layer: PositiveInt | None = None
    layers: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    confidence: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> ExitSpec:
        fixed = self.layer is not None and not self.layers and self.confidence is None
        sure = self.layer is None and bool(self.layers) and self.confidence is not None
        if not (fixed or sure):
            raise ValueError("write {layer: N}, or {layers: [N, ...], confidence: P}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must rise")
        return self


class FilterSpec(Frozen):
    """Which documents `assay filter` keeps."""

    keep: str = Field(min_length=1)
    on_error: Literal["fail", "keep", "drop"] = "fail"  # what becomes of those without an answer
    storage_options: StorageOptions | None = None  # of --to and --dropped; else the output's


class JobSpec(Frozen):
    """One labelling job: a corpus, a model, and the questions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    model: ModelSpec
    input: InputSpec
    output: Location = Field(min_length=1)
    storage_options: StorageOptions = {}  # of the output
    prompt: PromptSpec = PromptSpec()
    documents: DocumentsSpec = DocumentsSpec()
    max_error_rate: float | None = Field(default=None, ge=0, le=1)  # above it, the run fails
    tasks: tuple[TaskSpec, ...] = Field(min_length=1, strict=False)
    exit: ExitSpec | None = None
    filter: FilterSpec | None = None

    @field_validator("exit")
    @classmethod
    def _suits_every_task(cls, way: ExitSpec | None, other: ValidationInfo) -> ExitSpec | None:
        plain = [task.name for task in other.data.get("tasks", ()) if task.readout is None]
        if way is not None and plain:
            raise ValueError(
                f"tasks {plain} have no readout, and only a readout reads a layer before the last; "
                f"give them one, or take exit out"
            )
        measured = [
            task.name
            for task in other.data.get("tasks", ())
            if isinstance(task.calibration, ContextualSpec)
        ]
        if way is not None and way.layers and measured:
            raise ValueError(
                f"tasks {measured} are calibrated by documents without content, and how deep one "
                f"of those is read would hang on the other tasks; calibrate by a file, or write "
                f"{{layer: N}}"
            )
        return way

    @field_validator("tasks")
    @classmethod
    def _names_are_unique(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        names = [task.name for task in tasks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{repeated} named more than once; give each task its own name")
        return tasks
