"""The files of Label Studio: tasks with predictions and annotations, and the labelling interface.

Entry points: `tasks_json`, `interface_xml` and `read_tasks`.
https://labelstud.io/guide/task_format describes the form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import quoteattr

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.people import GoldLine
from pipeline.review.exchange import (
    Lines,
    Origin,
    Record,
    json_records,
    predicted,
    question_of,
)
from pipeline.spec.tasks import TaskSpec

NAME = "Label Studio"
ORIGIN, TEXT = "assay", "text"  # keys of a task's data


def interface_xml(task: TaskSpec) -> bytes:
    """The labelling interface of a project: the question, the text and the labels."""
    many = task.kind == "multi"
    choices = "".join(f"    <Choice value={quoteattr(label)}/>\n" for label in task.labels)
    rule = 'choice="multiple"' if many else 'choice="single" required="true"'
    name = quoteattr(task.name)
    return (
        "<View>\n"
        f"  <Header value={quoteattr(question_of(task))}/>\n"
        f'  <Text name="{TEXT}" value="${TEXT}"/>\n'
        f'  <Choices name={name} toName="{TEXT}" {rule} showInline="true">\n'
        f"{choices}  </Choices>\n"
        "</View>\n"
    ).encode()


def tasks_json(records: Iterable[Record], task: TaskSpec) -> bytes:
    """The tasks to import into a project. A task's answers of people are its annotations."""
    tasks = [_task(record, task) for record in records]
    return json.dumps(tasks, ensure_ascii=False, indent=1).encode() + b"\n"


def _task(record: Record, task: TaskSpec) -> dict[str, Any]:
    origin = record.origin
    data = {TEXT: record.text, ORIGIN: record.origin_json}
    predictions = []
    if origin.p is not None:
        result = _result(predicted(origin, task), task)
        predictions.append({"model_version": origin.fp, "result": result})
    annotations = [
        _annotation(number, line, task) for number, line in enumerate(origin.answers, start=1)
    ]
    return {"data": data, "predictions": predictions, "annotations": annotations}


def _annotation(number: int, line: GoldLine, task: TaskSpec) -> dict[str, Any]:
    """An answer, whose number among those of its record Label Studio keeps as `import_id`."""
    labels = [line.label] if isinstance(line.label, str) else [*(line.label or ())]
    return {
        "id": number,
        "import_id": number,
        "result": _result(labels, task),
        "was_cancelled": line.action == "skip",
        "ground_truth": False,
        "lead_time": line.seconds,
    }


def _result(labels: list[str], task: TaskSpec) -> list[dict[str, Any]]:
    if not labels:
        return []
    value = {"choices": labels}
    own = {"from_name": task.name, "to_name": TEXT, "type": "choices", "value": value}
    return [own]


def read_tasks(data: bytes, path: str, task: TaskSpec) -> Lines:
    """The annotations in an export in the format JSON."""
    form = {"data": dict, "annotations": list}
    fix = f"export the project of {NAME} in the format JSON"
    for place, record in json_records(data, path, form, fix):
        origin = Origin.parse(record["data"].get(ORIGIN), place, NAME)
        for annotation in record["annotations"]:
            yield place, _line(annotation, origin, place, task)


def _line(annotation: Any, origin: Origin, place: Option, task: TaskSpec) -> GoldLine:
    try:
        results = [r for r in annotation["result"] if r["from_name"] == origin.task]
        labels = [label for r in results for label in r["value"]["choices"]]
        skipped = bool(annotation.get("was_cancelled"))
        number = annotation.get("import_id")
        by, at = annotation.get("completed_by"), annotation.get("created_at")
        seconds = float(annotation.get("lead_time") or 0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fix = f"has an annotation without {error}; use the labelling interface of the export"
        raise SpecError([Problem(place, fix)]) from error
    label = None if skipped else origin.label(labels, task, place)
    exported = origin.answers[number - 1 : number] if isinstance(number, int) and number else ()
    for line in exported:
        if line.label == label:  # — nobody changed it since the export
            return line
    person = by.get("email") if isinstance(by, dict) else f"label-studio:{by}"
    who, at = str(person), str(at)
    return origin.line(place, label, by=who, at=at, seconds=seconds, chosen="label-studio")
