"""One task's exchange with another annotation tool: what the tool does is done to its files.

Entry point: `Exchange`.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from finished import toy_spec

from pipeline.gold.people import GoldFile, GoldLine
from pipeline.review.options import ExchangeOptions, ReviewOptions, ReviewTool
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.verbs.review_exchange import export_review, import_review

TASKS = [
    {"name": "topic", "question": "?", "labels": ["art", "law", "sport"]},
    {"name": "themes", "kind": "multi", "question": "Of {label}?", "labels": ["a&b", "c<d", "e;f"]},
    {
        "name": "quality",
        "kind": "score",
        "question": "How good?{answer}It is",
        "labels": ["-1", "0", "1"],
    },
]

QUESTIONS = {"topic": "?", "themes": "Of …?", "quality": "How good?"}  # as a person reads them


def spec_of(folder: Path, tasks: list[dict[str, Any]] = TASKS) -> JobSpec:
    return parse_spec(json.dumps(toy_spec(folder, tasks=tasks)))


class Exchange:
    """Exports and imports of one task in one form, beside a gold file."""

    def __init__(self, folder: Path, task: str, tool: ReviewTool) -> None:
        self.folder, self.tool, self.spec = folder, tool, spec_of(folder)
        self.task = next(own for own in self.spec.tasks if own.name == task)
        ending = tool if tool in ("jsonl", "csv") else "json"
        self.file = folder / f"for-{tool}.{ending}"

    def export(self, gold: str = "gold.jsonl", seed: int = 0, **options: Any) -> Any:
        review = ReviewOptions(self.task.name, str(self.folder / gold), seed=seed)
        others = ExchangeOptions(str(self.file), self.tool, overwrite=True, **options)
        return export_review(self.spec, review, others, cache_dir=self.folder / "cache")

    def import_(self, gold: str = "gold.jsonl", **options: Any) -> Any:
        review = ReviewOptions(self.task.name, str(self.folder / gold))
        others = ExchangeOptions(import_file=str(self.file), import_from=self.tool, **options)
        return import_review(self.spec, review, others, cache_dir=self.folder / "cache")

    def lines(self, gold: str = "gold.jsonl") -> tuple[GoldLine, ...]:
        with GoldFile.open(self.folder / gold, self.task) as file:
            return file.lines

    def append(self, *lines: GoldLine) -> None:
        with GoldFile.open(self.folder / "gold.jsonl", self.task) as file:
            for line in lines:
                file.append(line)

    def answer(self, labels: list[Any], by: str = "ann") -> None:
        """Puts answers of a person into the exported file, as the tool does."""
        {"label-studio": self._in_label_studio, "argilla": self._in_argilla}.get(
            self.tool, self._in_table
        )(labels, by)

    def _in_label_studio(self, labels: list[Any], by: str) -> None:
        tasks = json.loads(self.file.read_text())
        for number, (task, label) in enumerate(zip(tasks, labels, strict=False), start=1):
            names = [label] if isinstance(label, str) else list(reversed(label))
            control = {"from_name": self.task.name, "to_name": "text", "type": "choices"}
            annotation = {
                "id": number,
                "completed_by": {"email": by},
                "created_at": "2026-01-31T09:00:00.123456Z",
                "lead_time": 2.5,
                "was_cancelled": False,
                "result": [{**control, "value": {"choices": names}}] if names else [],
            }
            task["annotations"].append(annotation)
        self.file.write_text(json.dumps(tasks))

    def _in_argilla(self, labels: list[Any], by: str) -> None:
        records = json.loads(self.file.read_text())
        for record, label in zip(records, labels, strict=False):
            value = label if isinstance(label, str) else list(reversed(label)) or ["-"]
            responses = record["responses"].setdefault(self.task.name, [])
            responses.append({"value": value, "user_id": by})
        self.file.write_text(json.dumps(records))

    def _in_table(self, labels: list[Any], by: str) -> None:
        is_csv = self.tool == "csv"
        with self.file.open(encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)] if is_csv else [json.loads(line) for line in file]
        for row, label in zip(rows, labels, strict=False):
            many = json.dumps(label) if is_csv else list(label)
            row |= {"label": label if isinstance(label, str) else many, "by": by}
        with self.file.open("w", encoding="utf-8", newline="") as file:
            if is_csv:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
