"""What one reader answers: a task of a spec, or a stage of a cascade.

Entry point: `StageSpec`, a union of classes. The keys of a task determine its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from pipeline.spec.labels import (
    ANSWER,
    LANGUAGES,
    MOST_COLUMNS,
    NO,
    NOT,
    SLOT,
    YES,
    YES_OR_NO,
    Labels,
    equal_in_sql,
    part_file,
    scores_fix,
    with_slot,
)
from pipeline.spec.locations import FilePath
from pipeline.spec.model import ClassifierSpec, Frozen, ModelSpec, mistakes_error

if TYPE_CHECKING:
    from pipeline.spec.tasks import TaskSpec

TASK_NAME = r"^[a-z][a-z0-9_]{0,62}$"
# Columns of `open_labels` that every document has, beside one column a task.
DOCUMENT_COLUMNS = ("doc_id", "path", "row", "content_hash", "n_chars", "status")
_TAKEN = (*DOCUMENT_COLUMNS, "doc")  # in SQL, the columns of the input are in `doc`

# What answers a task, by the key that determines it; without one of these it is a `HEAD`.
READERS = {
    "cascade": "a cascade",
    "classifier": "a classifier",
    "readout": "a question",
    "question": "a question",
}
HEAD = "a sequence classifier"
Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


def _combination(task: Mapping[str, Any]) -> Literal["max", "mean"]:
    """How a task combines the answers to chunks by default."""
    return "max" if len(task["labels"]) == 2 or task["kind"] == "multi" else "mean"


class DocumentsSpec(Frozen):
    """How much of a document the model reads."""

    max_tokens: PositiveInt = 2048
    """Maximum number of tokens of a document, or of a chunk."""
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

    def part(self, max_tokens: int) -> DocumentsSpec:
        """What reads this number of tokens of a document in one piece: of chunks the first one."""
        too_long = "head" if self.too_long == "chunk" else self.too_long
        return self.model_copy(update={"max_tokens": max_tokens, "too_long": too_long})


class Task(Frozen):
    """The keys that every task has."""

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
    chunks: Literal["max", "mean"] = Field(default_factory=_combination)
    """How the answers to the chunks of a long document become one. `max`, for two labels: the
    answer of the chunk in which the label that is named first is the most probable. `mean`: the
    mean probability of each label. Default: `max` for two labels and for the kind `multi`, `mean`
    for others."""
    top_k: PositiveInt | None = None
    """Store the probabilities of this many likeliest labels instead of all. Required above 1,000
    labels."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the levels of hierarchical labels, such as `/`."""
    guide: Text | None = None
    """Text on the page of `assay review` in place of the question. It changes no answer."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        """A key that is null is not set."""
        if not isinstance(content, Mapping):
            return content
        return {key: value for key, value in content.items() if value is not None}

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

    @property
    def parts(self) -> tuple[TaskSpec, ...]:
        """What is asked for its answer: a task of yes or no for each label of the kind `multi`, in
        their order, named `TASK.LABEL`; of another kind the task itself.
        """
        labels = self._asked_of_labels() if self.kind == "multi" else ()
        parts = tuple(
            self.model_copy(update={"name": f"{self.name}.{label}", "kind": "choice", **own})
            for label, own in labels
        )
        return cast("tuple[TaskSpec, ...]", parts or (self,))

    def _asked_of_labels(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of each label of the kind `multi`, the keys of its part."""
        yield from ()

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages of its cascade, each a task of this name; () without one."""
        return ()

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> Task:
        if mistakes := [((key,), fix) for key, fix in self._contradictions()]:
            raise mistakes_error(mistakes)
        return self

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """The keys of the task that contradict another of its keys, and the fix of each."""
        if (getattr(self, "question", None) or "?").isspace():
            yield "question", "write a text; this one has only spaces"
        if self.chunks == "max" and _combination(dict(self)) != "max":
            yield "chunks", "max follows the label that is named first alone; write mean"
        if self.top_k is None and len(self.labels) > MOST_COLUMNS:
            fix = "labels are too many for a column each; keep the likeliest: top_k: 10"
            yield "top_k", f"{len(self.labels):,} {fix}"
        elif self.top_k is None and (alike := equal_in_sql(self.labels)):
            yield (
                "labels",
                f"SQL takes {alike[0]!r} and {alike[1]!r} for one name: they differ only in case; "
                "rename one of them",
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
        if self.kind == "multi" and isinstance(self, ClassifierTask):
            fix = "takes a question, a readout or the head of an encoder; write one of them, or a "
            yield "kind", f"{fix}task for each label"


class QuestionTask(Task):
    """A closed question about every document, or a trained readout of the model's state."""

    question: Text | None = None
    """Question about the document. Of a task of kind `multi`: a question of yes or no, in which
    `{label}` is replaced by the text of a label. Without it, ` {label}: yes or no` is added. What
    follows `{answer}` is not asked but begins the answer. So all labels share one question in
    `Which topics is it about? Answer yes or no.{answer}{label}:`. `null`, with a readout: read the
    state after the document itself, which takes no additional tokens."""
    readout: FilePath | None = None
    """Path or URL of a trained readout (`assay fit`), which answers from the state after the
    question. Of a task of kind `multi`: a folder with a file for each label."""
    model: ModelSpec | None = None
    """Model of a stage of a cascade. Default: the spec's. Its `dtype: auto` is that of the spec's
    model."""
    documents: DocumentsSpec | None = None
    """How much of a document a stage of a cascade reads. Default: as in the spec."""
    length_penalty: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Exponent of the number of tokens that divides a label's log probability, of which all tokens
    are then scored. 0: no penalty; 1: mean of the tokens."""
    beam: PositiveInt | None = None
    """Number of label prefixes that are kept at each token, for very many labels, of which all
    tokens are then scored. Default: score every label exactly."""
    classifier: ClassVar[None] = None

    def _asked_of_labels(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for label, (text, *_) in self.labels.items():
            question = self.question and with_slot(self.question).replace(SLOT, text)
            readout = self.readout and part_file(self.readout, label)
            yield label, {"labels": YES_OR_NO, "question": question, "readout": readout}

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        if (self.question or "").count(ANSWER) > 1:
            yield "question", f"has one answer; write {ANSWER} once"
        for key, is_set in {"length_penalty": self.length_penalty, "beam": self.beam}.items():
            if is_set and self.readout is not None:
                yield key, f"a readout takes no {key}; remove one of the two"
            elif is_set and self.kind == "multi":
                yield key, "each label is answered with yes or no; remove this"
        if self.kind == "multi":
            if any(len(texts) > 1 for texts in self.labels.values()):
                yield "labels", f"{SLOT} is replaced by one text; write one text for each label"
            if (self.readout or "").endswith(".safetensors"):
                yield "readout", "is one file; name a folder, which has a file for each label"


class UnaskedTask(Task):
    """A task that puts no question to a language model itself."""

    readout: ClassVar[None] = None
    length_penalty: ClassVar[float] = 0
    beam: ClassVar[None] = None


class ClassifierTask(UnaskedTask):
    """The answer of a classifier, from the whole text. A spec of such tasks needs no `model`."""

    classifier: ClassifierSpec
    """A classifier that answers instead of the model. The texts of a label are the names of its
    classes."""
    question: ClassVar[None] = None
    model: ClassVar[None] = None
    documents: ClassVar[None] = None

    @model_validator(mode="before")
    @classmethod
    def _knows_the_languages(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and "labels" not in content:
            classifier = content.get("classifier")
            if isinstance(classifier, Mapping) and classifier.get("kind") == "language":
                return {**content, "labels": list(LANGUAGES)}
        return content


class EncoderTask(UnaskedTask):
    """Labels alone: classes of the head of a sequence classifier, such as BERT, DeBERTa, XLM-R or
    ModernBERT. Of kind `multi`, each label is an output of a head whose classes do not exclude each
    other. Of kind `score`, a head with one output gives the score."""

    model: ModelSpec | None = None
    """Model of a stage of a cascade. Default: the spec's."""
    documents: DocumentsSpec | None = None
    """How much of a document a stage of a cascade reads. Default: as in the spec."""
    question: ClassVar[None] = None
    classifier: ClassVar[None] = None

    def _asked_of_labels(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for label, (output, *_) in self.labels.items():
            yield label, {"labels": {YES: (output,), NO: (NOT + output,)}}

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super()._contradictions()
        if self.kind == "multi" and any(len(texts) > 1 for texts in self.labels.values()):
            yield "labels", "each is one output of the head; write one class for each label"


def unread_by_servers(task: StageSpec) -> Iterator[tuple[str, str]]:
    """The keys of a task that a server with the chat API cannot answer, each with the fix.

    A server shows its first tokens as text alone. So the first letter decides which label a token
    begins: a token may be as short as that.
    """
    if ANSWER in (task.question or ""):
        fix = f"a server's chat begins each answer itself; remove {ANSWER} and what follows it"
        yield "question", fix
    if task.kind == "multi":
        return
    by_letter: dict[str, list[str]] = {}
    for label, texts in task.labels.items():
        for letter in {text.lstrip()[:1] for text in texts}:
            by_letter.setdefault(letter, []).append(label)
    for letter, labels in by_letter.items():
        if len(labels) > 1:
            yield (
                "labels",
                f"{labels} begin with {letter!r}, and the first token of a server's answer may be "
                "that letter alone; give them texts with different first letters, as in "
                "{sports: [A], science: [B]}, and name these in the question",
            )
            return


def reader_of(content: Any) -> str:
    """The kind of reader that answers a task with these keys, or a valid task."""
    for key, reader in READERS.items():
        is_mapping = isinstance(content, Mapping)
        if (content.get(key) if is_mapping else getattr(content, key, None)) is not None:
            return reader
    return HEAD


StageSpec = Annotated[
    Annotated[QuestionTask, Tag(READERS["question"])]
    | Annotated[ClassifierTask, Tag(READERS["classifier"])]
    | Annotated[EncoderTask, Tag(HEAD)],
    Discriminator(reader_of),
]
