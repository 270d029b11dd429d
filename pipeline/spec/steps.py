"""What one reader answers: a question, a readout, a classifier, or the classes of an encoder.

Entry point: `StageSpec`, the union of these, which are tasks and stages of cascades.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.spec.labels import (
    ANSWER,
    LANGUAGES,
    MOST_COLUMNS,
    SLOT,
    YES_OR_NO,
    Labels,
    equal_in_sql,
    part_file,
    scores_fix,
    with_numbers_as_texts,
    with_slot,
)
from pipeline.spec.model import ClassifierSpec, Frozen, ModelSpec, mistakes_error

if TYPE_CHECKING:
    from pipeline.spec.tasks import CascadeTask, TaskSpec

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
# Columns of `open_labels` that every document has, beside one column a task.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")
_TAKEN = (*DOCUMENT_COLUMNS, "doc")  # in SQL, the columns of the input are in `doc`

_BY_LABELS: Any = None  # the default of `chunks`, which follows from the number of labels
SCORING = ("length_penalty", "beam")
# The key that says of which class a task is; without them, it is an `EncoderTask`.
_FORMS = {
    "cascade": "CascadeTask",
    "classifier": "ClassifierTask",
    "readout": "ReadoutTask",
    "question": "QuestionTask",
}
Text = Annotated[str, Field(min_length=1)]


def _without_tokens(reader: str) -> dict[str, str]:
    fix = f"{reader} reads no label's tokens; remove this, or {reader.replace('a ', 'the ')}"
    return dict.fromkeys(SCORING, fix)


class Task(Frozen):
    """What every task has."""

    refused: ClassVar[Mapping[str, str]] = {}  # keys of other tasks, with the fix of each
    asked_for: ClassVar[tuple[str, ...]] = ()  # those that are refused also where they are null

    name: str = Field(pattern=TASK_NAME)
    """Name of the task and of its column: lower case letters, digits and `_`."""
    kind: Literal["choice", "multi", "score"] = "choice"
    """`choice`: one of the labels applies; their probabilities add up to 1. `multi`: each label
    applies or not, independently; each has a probability of its own. `score`: the labels are
    numbers in rising order, such as 0 to 5; the answer also has their expected value."""
    when: Text | None = None
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
    top_k: PositiveInt | None = None
    """Store the probabilities of this many likeliest labels instead of all. Required above 1,000
    labels."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the levels of hierarchical labels, such as `/`."""

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, content: Any) -> Any:
        """Without keys of other tasks that are null; the labels of a score may be numbers."""
        if not isinstance(content, Mapping):
            return content
        own = {*cls.model_fields, *cls.asked_for}
        set_keys = {k: v for k, v in content.items() if v is not None or k in own}
        return with_numbers_as_texts(set_keys) if set_keys.get("kind") == "score" else set_keys

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers that the labels of a task of kind `score` are; () of another kind."""
        return tuple(map(float, self.labels)) if self.kind == "score" else ()

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

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """What is asked for its answer: a task of yes or no for each label of the kind `multi`, in
        their order, named `TASK.LABEL`; of another kind the task itself.
        """
        return (cast("TaskSpec", self),)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade; () without one."""
        return ()

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> Task:
        if mistakes := [((key,), fix) for key, fix in self._contradictions()]:
            raise mistakes_error(mistakes)
        return self

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """The keys of the task that contradict another of its keys, and the fix of each."""
        if self.chunks == "max" and len(self.labels) > 2 and self.kind != "multi":
            yield (
                "chunks",
                "the largest probability is that of one label, and the task has "
                f"{len(self.labels)}; write chunks: mean, or leave it out",
            )
        if self.top_k is None and len(self.labels) > MOST_COLUMNS:
            fix = "labels are too many for a column each; keep the likeliest: top_k: 10"
            yield "top_k", f"{len(self.labels):,} {fix}"
        elif self.top_k is None and (alike := equal_in_sql(self.labels)):
            yield (
                "labels",
                f"SQL does not tell {alike[0]!r} from {alike[1]!r}, which differ only in case; "
                "give one of them another name",
            )
        if self.separator is not None and not any(self.separator in label for label in self.labels):
            yield "separator", "no label contains it; write the text between the levels of a label"
        if self.kind == "score" and (wrong := scores_fix(list(self.labels))):
            yield "labels", wrong
        of_kind = {
            "score": "a score is computed from all its labels; remove this",
            "multi": "not supported with kind: multi; remove this, or write a task for each label",
        }
        for key in ("top_k", "separator") if self.kind in of_kind else ():
            if getattr(self, key) is not None:
                yield key, of_kind[self.kind]
        if self.kind == "multi" and not isinstance(self, AskedTask):
            yield "kind", "takes a question or a readout; write one, or a task for each label"


class AskedTask(Task):
    """A task that reads a language model after a question, or after the document."""

    model: ModelSpec | None = None
    """Model of a stage of a cascade. Default: the spec's. Its `dtype: auto` is that of the spec's
    model."""
    classifier: ClassVar[None] = None

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """A task of yes or no for each label of the kind `multi`, or the task itself."""
        if self.kind != "multi":
            return super().parts
        return tuple(self._part(label, texts[0]) for label, texts in self.labels.items())

    def _part(self, label: str, text: str) -> TaskSpec:
        asked = cast("QuestionTask | ReadoutTask", self).question
        own: dict[str, Any] = {
            "name": f"{self.name}.{label}",
            "kind": "choice",
            "labels": YES_OR_NO,
            "question": asked and with_slot(asked).replace(SLOT, text),
        }
        return cast("TaskSpec", self.model_copy(update=own))

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        if (cast("QuestionTask | ReadoutTask", self).question or "").count(ANSWER) > 1:
            yield "question", f"has one answer; write {ANSWER} once"
        if self.kind == "multi" and any(len(texts) > 1 for texts in self.labels.values()):
            yield "labels", f"{SLOT} stands for one text; write one text for each label"


class QuestionTask(AskedTask):
    """A closed question about every document."""

    question: Text
    """Question about the document. Of a task of kind `multi`: a question of yes or no, in which
    `{label}` stands for the text of a label. Without it, ` {label}: yes or no` is added. What
    follows `{answer}` is not asked but begins the answer. So all labels share one question in
    `Which topics is it about? Answer yes or no.{answer}{label}:`."""
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False, strict=False)
    """Exponent of the number of tokens that divides a label's log probability, of which all tokens
    are then scored. 0: no penalty; 1: mean of the tokens."""
    beam: PositiveInt | None = None
    """Number of label prefixes that are kept at each token, for very many labels, of which all
    tokens are then scored. Default: score every label exactly."""
    readout: ClassVar[None] = None

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        for key in scoring_keys(self) if self.kind == "multi" else ():
            yield key, "each label is answered with yes or no; remove this"


class ReadoutTask(AskedTask):
    """A trained readout of the state after a question, or of the document itself."""

    readout: Text
    """Path or URL of a trained readout (`assay fit`). Of a task of kind `multi`: a folder with a
    file for each label."""
    question: Text | None = None
    """Question about the document, as without a readout. `null`: read the state after the document
    itself, which takes no additional tokens."""
    length_penalty: ClassVar[float] = 0
    beam: ClassVar[None] = None
    refused: ClassVar = _without_tokens("a readout")

    def _part(self, label: str, text: str) -> TaskSpec:
        readout = self.readout and part_file(self.readout, label)
        return super()._part(label, text).model_copy(update={"readout": readout})

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        if self.kind == "multi" and self.readout.endswith(".safetensors"):
            yield "readout", "is one file; name a folder, which has a file for each label"


class ClassifierTask(Task):
    """The answer of a classifier, from the whole text. A spec of such tasks needs no `model`."""

    classifier: ClassifierSpec
    """A classifier that answers instead of the model. The texts of a label are the names of its
    classes."""
    model: ClassVar[None] = None
    question: ClassVar[None] = None
    readout: ClassVar[None] = None
    length_penalty: ClassVar[float] = 0
    beam: ClassVar[None] = None
    refused: ClassVar = {
        "model": "a classifier needs no model; remove the model",
        "readout": "a task has a readout or a classifier; remove one of the two",
        "question": "a classifier reads the text alone; remove the question, or it",
        **_without_tokens("a classifier"),
    }

    @model_validator(mode="before")
    @classmethod
    def _knows_the_languages(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and "labels" not in content:
            classifier = content.get("classifier")
            if isinstance(classifier, Mapping) and classifier.get("kind") == "language":
                return {**content, "labels": list(LANGUAGES)}
        return content


class EncoderTask(Task):
    """Labels alone: classes of the head of a sequence classifier, such as BERT, DeBERTa, XLM-R or
    ModernBERT."""

    model: ModelSpec | None = None
    """Model of a stage of a cascade. Default: the spec's."""
    question: ClassVar[None] = None
    readout: ClassVar[None] = None
    classifier: ClassVar[None] = None
    length_penalty: ClassVar[float] = 0
    beam: ClassVar[None] = None
    asked_for: ClassVar = ("question",)
    refused: ClassVar = dict.fromkeys(
        ("question", *SCORING), "a task needs a question, a readout or a classifier; write one"
    )


def form_of(content: Any) -> str:
    """The name of the class of tasks that the keys of a task are of."""
    for key, name in _FORMS.items():
        is_mapping = isinstance(content, Mapping)
        if (content.get(key) if is_mapping else getattr(content, key, None)) is not None:
            return name
    return "EncoderTask"


StageSpec = Annotated[
    Annotated[QuestionTask, Tag("QuestionTask")]
    | Annotated[ReadoutTask, Tag("ReadoutTask")]
    | Annotated[ClassifierTask, Tag("ClassifierTask")]
    | Annotated[EncoderTask, Tag("EncoderTask")],
    Discriminator(form_of),
]


def scoring_keys(task: QuestionTask | CascadeTask) -> list[str]:
    """The keys of a task that choose how the tokens of labels are scored."""
    set_keys = {"length_penalty": task.length_penalty != 0, "beam": task.beam is not None}
    return [key for key, is_set in set_keys.items() if is_set]
