"""Lines of a file of people's labels, for tasks of the three kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.gold.people import Drawn, GoldFile, GoldLine, Shown
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

TOPIC = QuestionTask(name="topic", question="Which?", labels=["art", "law"])
THEMES = QuestionTask(name="themes", kind="multi", question="Of {label}?", labels=["art", "law"])
QUALITY = QuestionTask(name="quality", kind="score", question="How good?", labels=["0", "1", "2"])


def line(document: str, label: Any = "art", *, task: TaskSpec = TOPIC, **others: Any) -> GoldLine:
    fields = {"action": "label", "by": "ann", "at": "2026-01-31T09:00:00Z", "seconds": 1.5}
    sample = others.pop("sample", None)
    audit = sample and Drawn(sample, 1, "p < 1", texts=9, drawn=4, stratum=0, size=9, inclusion=0.4)
    shown = Shown.of(task, chosen=others.pop("chosen", ""), audit=audit)
    fields |= {"doc_id": document, "content_hash": f"hash-{document}", "task": task.name}
    return GoldLine(**{**fields, "label": label, "shown": shown, **others})


def lines(file: Path) -> list[dict[str, Any]]:
    """The JSON of each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def written(path: Path, *lines: GoldLine, task: TaskSpec = TOPIC) -> Path:
    with GoldFile.open(path, task) as gold:
        for each in lines:
            gold.append(each)
    return path
