"""The YAML spec that a user writes, validated and frozen. Entry point: `JobSpec`.

The manual's page about the spec is generated from the descriptions here.
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

Quantize = Literal["none", "int8", "int8_dynamic", "fp8"]

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
IN_WORDS = {  # what an error says instead of a pattern
    TASK_NAME: "write 1 to 63 lower case letters, digits and _, and begin with a letter",
    JOB_NAME: "write 1 to 63 letters, digits and . _ - without spaces, and begin with a letter or "
    "a digit",
}
# A task with more labels has no column for each of them; `top_k` says how many are kept.
MOST_COLUMNS = 1_000
# Columns of `open_labels` that every document has, beside one column a task.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")


class Frozen(BaseModel):
    """Immutable, strict about types, and a misspelt key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class ModelSpec(Frozen):
    """The model that answers."""

    path: Location = Field(min_length=1)
    """Model folder, GGUF file or URL, or the name of a model on the Hugging Face Hub."""
    storage_options: StorageOptions = {}
    """Options of the fsspec file system that opens `path`, such as `endpoint_url` or `profile`.
    Secrets are refused: name a profile or set the environment."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub. Default: the branch `main`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the model. `auto` takes bfloat16 where it is faster, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto` takes a GPU if there is one."""
    gpus: PositiveInt = 1
    """Number of GPUs of one worker. The model's layers are distributed over them."""
    threads: Literal["auto"] | PositiveInt = "auto"
    """Threads of one engine on a CPU; a machine has as many engines as its usable cores divided by
    this. `auto` takes one thread where there is enough work, else more."""
    quantize: Quantize = "none"
    """8-bit weights: half the memory of 16-bit weights, and slightly different answers. `int8` runs
    on CPUs and GPUs, `fp8` on recent GPUs. `int8_dynamic` also rounds activations and multiplies
    8-bit integers, which is faster; it needs a processor with VNNI or AMX, or a GPU."""

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
            raise ValueError("8-bit weights run on one GPU only; write none, or gpus: 1")
        return quantize


class InputSpec(Frozen):
    """The documents: which files, and which columns of them."""

    path: Location = Field(min_length=1)
    """File, folder or glob, local or at any fsspec URL, such as `s3://` or `hf://`. Formats:
    Parquet, Arrow, WET, text files (`.txt`, one document each), and JSON lines, CSV, TSV or JSON
    arrays, each plain or as gzip or zstd."""
    storage_options: StorageOptions = {}
    """Options of the fsspec file system that opens `path`. Secrets are refused."""
    text: str = Field(default="text", min_length=1)
    """Column with the text of a document."""
    id: str | None = Field(default=None, min_length=1)
    """Column with the id of a document. Default: the hash of the text. Text files have the columns
    `text` and `id`, which is the file's path below the folder."""
    shard_bytes: Literal["auto"] | PositiveInt = "auto"
    """Approximate size of a shard in bytes of input. A shard is the unit of work and of recovery.
    `auto` chooses the size from the size of the input."""


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
    """What is read of a longer document. `head`: its start; `tail`: its end; `middle`: both ends,
    without the middle; `chunk`: all of it, in chunks."""
    overlap_tokens: NonNegativeInt = 128
    """Number of tokens that two neighbouring chunks share (`too_long: chunk`)."""

    @model_validator(mode="after")
    def _chunks_advance(self) -> DocumentsSpec:
        if self.too_long == "chunk" and self.overlap_tokens >= self.max_tokens:
            raise ValueError("overlap_tokens must be below max_tokens, or chunks do not advance")
        return self


def _as_verbalizers(labels: object) -> object:
    """A plain list of labels -> each label with its name as its only verbalizer."""
    if isinstance(labels, Mapping):
        return labels
    if not isinstance(labels, list | tuple):
        raise ValueError("write a list of labels, or each label with its texts: {name: [text]}")
    odd = [label for label in labels if isinstance(label, dict | list)]
    if odd:
        raise ValueError(f"a list holds names of labels; write {{name: [text]}} for texts: {odd}")
    if any(not isinstance(label, str) for label in labels):
        raise ValueError(f"write each label as a text: {[str(label) for label in labels]}")
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ValueError(f"{repeated} listed more than once; list each label once")
    return {label: (label,) for label in labels}


Verbalizers = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Labels = Annotated[dict[str, Verbalizers], BeforeValidator(_as_verbalizers), Field(min_length=2)]


class ContextualSpec(Frozen):
    """Calibration by what the model answers about documents without content."""

    method: Literal["contextual"]
    """Divide by the answers to empty documents."""
    documents: tuple[str, ...] = Field(default=("N/A", "[MASK]", ""), min_length=1, strict=False)
    """Documents without content whose mean answer is divided out."""


class FittedSpec(Frozen):
    """Calibration by a file that `assay calibrate` wrote."""

    method: Literal["batch", "temperature", "isotonic"]
    """Method that the file was made with."""
    file: str = Field(min_length=1)
    """Path or URL of the file that `assay calibrate --to` wrote."""


class TaskSpec(Frozen):
    """One closed question about every document; without a question, a readout of the document."""

    # Defaults are validated too: `top_k: null` is wrong where there are too many labels.
    model_config = ConfigDict(validate_default=True)

    name: str = Field(pattern=TASK_NAME)
    """Name of the task and of its column: lower case letters, digits and `_`."""
    readout: Annotated[str, Field(min_length=1)] | None = None
    """Path or URL of a trained readout (`assay fit`). Default: the probabilities that the model
    gives to the labels' tokens."""
    question: Annotated[str, Field(min_length=1)] | None
    """Question about the document. `null`, with a readout: read the state after the document
    itself, which takes no additional tokens."""
    labels: Labels
    """Two labels or more: a list of names, or a mapping from each name to the texts that mean this
    label."""
    chunks: Literal["max", "mean"] = "max"
    """How the answers to the chunks of a long document become one: the largest probability of each
    label, or the mean."""
    scoring: Literal["auto", "first_token", "full"] = "auto"
    """Which tokens of a label are scored: its first token or all of them. `auto` scores all tokens
    of labels that share a first token."""
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False, strict=False)
    """Exponent of the number of tokens that divides a label's log probability (`scoring: full`). 0:
    no penalty; 1: mean of the tokens."""
    beam: PositiveInt | None = None
    """Number of label prefixes that are kept at each token, for very many labels (`scoring: full`).
    Default: score every label exactly."""
    top_k: PositiveInt | None = None
    """Store the probabilities of this many likeliest labels instead of all. Required above 1,000
    labels."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the levels of hierarchical labels, such as `/`."""
    calibration: ContextualSpec | FittedSpec | None = Field(default=None, discriminator="method")
    """Adds calibrated probabilities to the answers. Default: none."""

    @field_validator("name")
    @classmethod
    def _has_a_column_of_its_own(cls, name: str) -> str:
        if name in DOCUMENT_COLUMNS:
            raise ValueError(
                "every document has a column of this name; choose a name other than "
                f"{', '.join(DOCUMENT_COLUMNS)}"
            )
        return name

    @field_validator("question")
    @classmethod
    def _is_asked_or_read(cls, question: str | None, other: ValidationInfo) -> str | None:
        if question is None and other.data.get("readout", "") is None:
            raise ValueError("a task without a question needs a readout; write one of the two")
        return question

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
        owner: dict[str, str] = {}
        for label, verbalizers in labels.items():
            if not label:
                raise ValueError("a label needs a name")
            if not verbalizers:
                raise ValueError(f"label {label!r} needs at least one text")
            for verbalizer in verbalizers:
                if verbalizer in owner:
                    raise ValueError(f"{verbalizer!r} occurs twice; write each text once")
                owner[verbalizer] = label
        return labels

    @field_validator("scoring", "length_penalty", "beam")
    @classmethod
    def _scores_label_tokens(
        cls, value: str | float | None, other: ValidationInfo
    ) -> str | float | None:
        if value and value != "auto" and other.data.get("readout") is not None:
            raise ValueError(
                "a trained readout reads no label's tokens; remove this, or the readout"
            )
        if value and other.data.get("scoring") == "first_token":  # a field before this one
            raise ValueError("a first token has neither length nor beams; write scoring: full")
        return value

    @field_validator("top_k")
    @classmethod
    def _fits_a_struct(cls, top_k: int | None, other: ValidationInfo) -> int | None:
        labels = len(other.data.get("labels", ()))
        if top_k is None and labels > MOST_COLUMNS:
            raise ValueError(
                f"{labels:,} labels are too many for a column each; keep the likeliest: top_k: 10"
            )
        return top_k

    @field_validator("separator")
    @classmethod
    def _occurs(cls, separator: str | None, other: ValidationInfo) -> str | None:
        labels = other.data.get("labels", ())
        if separator and labels and not any(separator in label for label in labels):
            raise ValueError("no label contains it; write the text between the levels of a label")
        return separator

    @field_validator("calibration")
    @classmethod
    def _knows_every_label(
        cls, calibration: ContextualSpec | FittedSpec | None, other: ValidationInfo
    ) -> ContextualSpec | FittedSpec | None:
        if calibration is not None and other.data.get("top_k") is not None:
            raise ValueError(
                "a calibration changes the probabilities of all labels, and top_k keeps only the "
                "likeliest; remove one of the two"
            )
        if isinstance(calibration, ContextualSpec) and other.data.get("beam") is not None:
            raise ValueError(
                "contextual calibration needs the probability of every label, and a beam does not "
                "reach every label; remove beam, or calibrate by a file"
            )
        return calibration


class ExitSpec(Frozen):
    """Early exit: all documents stop at one layer, or each stops when its answers are confident."""

    layer: PositiveInt | None = None
    """Layer at which every document stops. Layers are counted from 1."""
    layers: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Rising layers at which a document may stop, together with `confidence`."""
    confidence: float | None = Field(default=None, gt=0, le=1)
    """Probability that the likeliest label of every task must reach for a document to stop."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> ExitSpec:
        fixed = self.layer is not None and not self.layers and self.confidence is None
        confident = self.layer is None and bool(self.layers) and self.confidence is not None
        if not (fixed or confident):
            raise ValueError("write {layer: N}, or {layers: [N, ...], confidence: P}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must rise")
        return self


class FilterSpec(Frozen):
    """Which documents `assay filter` keeps."""

    keep: str = Field(min_length=1)
    """Boolean SQL expression over the tasks' columns, such as `toxic.p.toxic < 0.5`. Documents for
    which it is true are kept."""
    on_error: Literal["fail", "keep", "drop"] = "fail"
    """What happens to documents without an answer: the filter fails, keeps them or drops them."""
    storage_options: StorageOptions | None = None
    """Options of the fsspec file systems of `--to` and `--dropped`. Default: the output's."""


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
    storage_options: StorageOptions = {}
    """Options of the fsspec file system that opens `output`. Secrets are refused."""
    prompt: PromptSpec = PromptSpec()
    """The text around the document and the questions."""
    documents: DocumentsSpec = DocumentsSpec()
    """How much of a document the model reads."""
    max_error_rate: float | None = Field(default=None, ge=0, le=1)
    """Largest share of rows without an answer. A run above it fails. Default: none."""
    tasks: tuple[TaskSpec, ...] = Field(min_length=1, strict=False)
    """The questions. All are asked of every document."""
    exit: ExitSpec | None = None
    """Early exit, if every task has a trained readout. Default: all layers are read."""
    filter: FilterSpec | None = None
    """The rule of `assay filter`. A run ignores it."""

    @field_validator("exit")
    @classmethod
    def _suits_every_task(cls, exit: ExitSpec | None, other: ValidationInfo) -> ExitSpec | None:
        tasks: tuple[TaskSpec, ...] = other.data.get("tasks", ())
        plain = [task.name for task in tasks if task.readout is None]
        if exit is not None and plain:
            raise ValueError(
                f"tasks {plain} have no readout, and only a readout reads a layer before the last; "
                f"give them one, or remove exit"
            )
        measured = [task.name for task in tasks if isinstance(task.calibration, ContextualSpec)]
        if exit is not None and exit.layers and measured:
            raise ValueError(
                f"tasks {measured} are calibrated by documents without content, and the layer at "
                f"which these exit would depend on the other tasks; calibrate by a file, or write "
                f"{{layer: N}}"
            )
        return exit

    @field_validator("tasks")
    @classmethod
    def _names_are_unique(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        names = [task.name for task in tasks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{repeated} named more than once; give each task its own name")
        return tasks
