"""The files of Argilla 2: records with suggestions and responses, and the settings of a dataset.

Entry points: `records_json`, `settings_json` and `read_records`. The forms are those of
`dataset.records.from_json` and `Settings.from_json`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.people import GoldLine
from pipeline.hashes import parse_json
from pipeline.review.exchange import (
    Lines,
    Origin,
    Record,
    json_records,
    predicted,
    question_of,
)
from pipeline.spec.tasks import TaskSpec

NAME = "Argilla"
USER = "argilla:"  # before the id of a user, in place of a person's name
ORIGIN = "assay"  # key of a record's metadata
# The option for none of the labels: Argilla submits no empty answer.
NONE = "-"


def settings_json(task: TaskSpec) -> bytes:
    """The settings of a dataset: the text as its field, and the task as its question."""
    many = task.kind == "multi"
    options = [{"value": label, "text": label} for label in task.labels]
    options += [{"value": NONE, "text": "none of these"}] * many
    kind = "multi_label_selection" if many else "label_selection"
    question = {
        "name": task.name,
        "title": question_of(task),
        "required": True,
        "settings": {"type": kind, "options": options},
    }
    field = {"name": "text", "title": "text", "required": True}
    settings = {
        "guidelines": None,
        "fields": [{**field, "settings": {"type": "text", "use_markdown": False}}],
        "questions": [question],
        "metadata": [],
        "vectors": [],
        "allow_extra_metadata": True,
    }
    return json.dumps(settings, ensure_ascii=False, indent=1).encode() + b"\n"


def records_json(records: Iterable[Record], task: TaskSpec) -> bytes:
    """The records of a dataset. Their ids make an import into Argilla idempotent."""
    content = [_record(record, task) for record in records]
    return json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"


def _record(record: Record, task: TaskSpec) -> dict[str, Any]:
    origin = record.origin
    suggestions = {}
    if origin.p is not None:
        value = _value(predicted(origin, task), task)
        suggestions[task.name] = {"value": value, "agent": origin.fp}
    responses = [_response(line, task) for line in origin.answers]
    return {
        "id": f"{task.name}-{origin.content_hash}",
        "fields": {"text": record.text},
        "metadata": {ORIGIN: json.dumps(record.origin_json, ensure_ascii=False)},
        "suggestions": suggestions,
        "responses": {task.name: responses} if responses else {},
    }


def _response(line: GoldLine, task: TaskSpec) -> dict[str, Any]:
    labels = [line.label] if isinstance(line.label, str) else [*(line.label or ())]
    skipped = line.action == "skip"
    return {
        "value": None if skipped else _value(labels, task),
        "user_id": user_id(line.by),
        "status": "discarded" if skipped else "submitted",
    }


def _value(labels: list[str], task: TaskSpec) -> str | list[str]:
    return labels[0] if task.kind != "multi" else labels or [NONE]


def user_id(person: str) -> str:
    """The id of a person as a user of Argilla."""
    if person.startswith(USER):  # — the answers came from there
        return person.removeprefix(USER)
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"assay:{person}"))


def read_records(data: bytes, path: str, task: TaskSpec, now: str) -> Lines:
    """The submitted and the discarded responses in a file of `dataset.records.to_json`.

    The file has no times, so the answers are of `now`. Where a response has no status, it was
    submitted.
    """
    form = {"metadata": dict, "responses": dict}
    for place, record in json_records(data, path, form, f"write it with {NAME}'s records.to_json"):
        written = str(record["metadata"].get(ORIGIN, ""))
        try:
            content = parse_json(written)
        except ValueError:
            content = written
        origin = Origin.parse(content, place, NAME)
        for response in record["responses"].get(origin.task) or ():
            line = _line(response, origin, place, task, now)
            if line is not None:
                yield place, line


def _line(
    response: Any, origin: Origin, place: Option, task: TaskSpec, now: str
) -> GoldLine | None:
    try:
        user, value = str(response["user_id"]), response.get("value")
        status = response.get("status") or "submitted"
    except (KeyError, TypeError, AttributeError) as error:
        fix = f"has a response without user_id or value: {error}"
        raise SpecError([Problem(place, fix)]) from error
    if status == "draft":
        return None
    labels = [value] if isinstance(value, str) else [*(value or ())]
    names = [] if labels == [NONE] and NONE not in origin.labels else labels
    label = None if status == "discarded" else origin.label(names, task, place)
    people = {user_id(line.by): line for line in origin.answers}
    if user in people and people[user].label == label:
        return people[user]  # — it was not changed since the export
    by = people[user].by if user in people else f"{USER}{user}"
    return origin.line(place, label, by=by, at=now, seconds=0, chosen="argilla")
