"""Documents and people's labels in the files of other annotation tools.

Entry points: `Record` for what is exported, `Origin` for what comes back, and `new_lines` for what
an import adds to a gold file. The form of each tool is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.people import Action, GoldFile, GoldLine, Label, Shown, check_line
from pipeline.hashes import parse_json, validated
from pipeline.spec.tasks import ANSWER, SLOT, TaskSpec

PLACE = "import_file"  # the option that names the file of an import
# The lines that a file has, each with its place in the file.
Lines = Iterator[tuple[Option, GoldLine]]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a record is about: it goes to the other tool with the record, and comes back."""

    doc_id: str
    content_hash: str
    task: str
    question: str | None
    labels: tuple[str, ...]
    fp: str | None = None  # fingerprint of the model's answer; None: there is none
    p: Mapping[str, float] | None = None  # the model's probabilities
    answers: tuple[GoldLine, ...] = ()  # of people, with which the record was exported

    @classmethod
    def parse(cls, value: object, place: Option, format: str) -> Origin:
        """The origin in a record; SpecError if it has none."""
        try:
            return validated(cls, value)
        except ValueError as error:
            fix = (
                f"`assay review --export` did not write this record, or it was changed ({error}); "
            )
            fix += f"export the {format} file with all data of its records"
            raise SpecError([Problem(place, fix)]) from error

    def label(self, names: Iterable[str], task: TaskSpec, place: Option) -> Label:
        """The label that these names are: one, or of the kind `multi` several, in their order."""
        order = {name: number for number, name in enumerate(self.labels)}
        ordered = tuple(sorted(names, key=lambda name: order.get(name, len(order))))
        if task.kind == "multi":
            return ordered
        if len(ordered) != 1:
            raise SpecError([Problem(place, "has no single label; choose one", list(ordered))])
        return ordered[0]

    def line(
        self,
        place: Option,
        label: Label | None,
        action: Action | None = None,
        *,
        by: str,
        at: str,
        seconds: float,
        chosen: str,
        blind: bool = False,
    ) -> GoldLine:
        """A person's answer to the record, or a skip; SpecError if it is neither."""
        shown = Shown(self.question, self.labels, self.fp, self.p, blind, chosen)
        own = self.doc_id, self.content_hash, self.task
        action = action or ("skip" if label is None else "label")
        try:
            return GoldLine(*own, action, label, by, in_utc(at), seconds, shown)
        except ValueError as error:
            raise SpecError([Problem(place, f"is not the answer of a person: {error}")]) from error


@dataclass(frozen=True, slots=True)
class Record:
    """A document in a file for another tool."""

    origin: Origin
    text: str

    @property
    def origin_json(self) -> dict[str, Any]:
        """The origin as JSON values."""
        return asdict(self.origin)


def question_of(task: TaskSpec) -> str:
    """The question as a person reads it, above the names of the labels."""
    if task.question is None:
        several = "Which labels of {} fit?" if task.kind == "multi" else "Which label of {} fits?"
        return several.format(task.name)
    question = task.question.partition(ANSWER)[0]
    return question.replace(SLOT, "…") if task.kind == "multi" else question


def predicted(origin: Origin, task: TaskSpec) -> list[str]:
    """The model's labels: one, or those that apply; [] without an answer."""
    if not origin.p:
        return []
    if task.kind == "multi":
        return [label for label in task.labels if origin.p[label] >= 0.5]
    return [max(origin.p, key=origin.p.__getitem__)]


def in_utc(at: str) -> str:
    """A time in UTC; a time without a zone is in UTC. ValueError unless it is in ISO 8601."""
    time = datetime.fromisoformat(at)
    if time.utcoffset() == timedelta(0):
        return at
    utc = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return utc.isoformat()


def json_records(
    data: bytes, path: str, form: Mapping[str, type], fix: str
) -> Iterator[tuple[Option, dict[str, Any]]]:
    """The records in a JSON list of objects, each with its place in the file.

    SpecError, which ends with `fix`, unless every record has a value of each type of `form`.
    """
    try:
        values = parse_json(data)
    except ValueError as error:
        raise SpecError([Problem(Option(PLACE), f"is not JSON ({error}); {fix}", path)]) from error
    if not isinstance(values, list):
        raise SpecError([Problem(Option(PLACE), f"is not a JSON list; {fix}", path)])
    for number, value in enumerate(values, start=1):
        place = Option(PLACE, part=f" {path}, record {number}")
        record = value if isinstance(value, dict) else {}
        if missing := [key for key, kind in form.items() if not isinstance(record.get(key), kind)]:
            raise SpecError([Problem(place, f"has no {', '.join(missing)}; {fix}")])
        yield place, record


def new_lines(
    lines: Iterable[tuple[Option, GoldLine]], gold: GoldFile, task: TaskSpec
) -> dict[str, tuple[Option, list[GoldLine]]]:
    """What an import adds to the gold file, by content hash, with the place of the first line.

    An answer that the file has, or had before the person changed it, is not added again.

    SpecError, if a line is of another task or an older wording, has a label that the task does not
    have, or gives a document another label than the same person gave it.
    """
    known = {(*line.key, line.action, line.label) for line in gold.lines}
    current = {key: line for key, line in gold.answers.items() if line.action == "label"}
    added: dict[str, tuple[Option, list[GoldLine]]] = {}
    for place, line in lines:
        if line.task != task.name:
            fix = f"is of task {line.task}; name it: --task {line.task}"
            raise SpecError([Problem(place, fix, line.task)])
        check_line(line, task, place)
        if (*line.key, line.action, line.label) in known:
            continue
        before = current.get(line.key)
        if before is not None:
            fix = f"{line.by} has answered this document with {_shown(before)} already; undo that "
            fix += "in a review, or remove one of the two answers"
            raise SpecError([Problem(place, fix, _shown(line))])
        known.add((*line.key, line.action, line.label))
        current[line.key] = line
        added.setdefault(line.content_hash, (place, []))[1].append(line)
    return added


def _shown(line: GoldLine) -> str:
    label = line.label if line.label is not None else line.action
    return label if isinstance(label, str) else ", ".join(label) or "no label"
