"""The code blocks of the README and the manual, and a folder in which they run.

Entry points: `blocks`, `run_line`, and the fixtures `manual_folder` and `in_manual`.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from annotator import Annotator, address_in
from stages import run_without_ray

from pipeline.cli import main

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>no-run|test): (?P<reason>[\w-]+) -->\n)?"
    r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TOPIC = {"name": "topic", "question": "What is this about?", "labels": ["art", "law"]}
ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
LABELS = 100
RULE = 'filter:\n  keep: "toxic.p.toxic < 0.5"\n'  # which a page has as an addition


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    code: str
    mark: str | None
    reason: str | None


def blocks(*pages: Path) -> Iterator[Block]:
    """The blocks of the pages, or of all."""
    for page in pages or PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            place = f"{page.relative_to(REPOSITORY)}:{line}"
            yield Block(place, *match.group("language", "code", "mark", "reason"))


def commands(code: str) -> list[list[str]]:
    """The words of each line of a shell block, without comments."""
    lines = code.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_line(words: list[str]) -> None:
    """One command, in this process where it is `assay` or a line of Python."""
    match words:
        case ["assay", "review", *_]:
            label_on_the_page(words)
        case ["assay", *arguments]:
            assert main(arguments) == 0, words
            if arguments[0] == "init":
                with Path(arguments[-1]).open("a") as spec:
                    spec.write(RULE)
        case ["python", "-c", code]:
            exec(code, {})
        case _:
            print(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


class Judgement(dict[str, str]):
    """A label for any text: that of an audit, or of a task."""

    def __init__(self, *, audits: bool) -> None:
        self.labels = ("no", "yes") if audits else ("clean", "toxic")

    def __missing__(self, text: str) -> str:
        return self.labels[sum(text.encode()) % 2]


def label_on_the_page(words: list[str]) -> None:
    """Opens the review, and labels a hundred documents as a browser would."""
    log = Path("review.log")
    with log.open("wb") as file:
        command = [sys.executable, "-m", "pipeline", *words[1:]]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        annotator = Annotator(address_in(log), Judgement(audits="audit" in words))
        for _ in range(LABELS):
            if annotator.view["row"] is not None:
                annotator.labels(1)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    print(log.read_text())


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The folder is the current one, and `assay` and `python` are those of this environment."""
    patch.chdir(folder)
    patch.setenv("ASSAY_CACHE", str(folder / "cache"))
    patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    patch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture(scope="session")
def manual_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the manual's examples: `my.yaml`, its input, and gold labels."""
    made = tmp_path_factory.mktemp("manual")
    for name in ("jobs", "models"):
        (made / name).symlink_to(REPOSITORY / name)
    first = next(each for each in blocks(REPOSITORY / "docs/spec.md") if each.language == "yaml")
    spec = yaml.safe_load(first.code)
    spec["model"] = {"path": str(model_folder), "dtype": "float32"}
    spec["tasks"].append(TOPIC)
    spec["filter"] = {"keep": "toxic.p.toxic < 0.5", "on_error": "drop"}
    (made / "my.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    rows = [{"doc": f"d{n}", "text": f"This is text {n}. " * (1 + n % 3)} for n in range(10)]
    labels = [("clean", "toxic")[n % 2] for n in range(10)]
    gold = [f'{{"doc": "d{n}", "toxic": "{label}"}}\n' for n, label in enumerate(labels)]
    (made / "gold.jsonl").write_text("".join(gold))
    (made / "data" / "de").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[:5]), made / "data" / "a.parquet")
    readme = made / "README.md"  # a folder of its own, where the README's commands run
    for each in (made, readme):
        (each / ON_THE_HUB).parent.mkdir(parents=True)
        (each / ON_THE_HUB).symlink_to(model_folder)
    write_posts(readme / "posts.csv")
    write_annotated(made, labels)
    # — scores as those of another service
    for name, gold_file, key in [("scores", "train", "text"), ("compare", "gold", "id")]:
        write_scores(made / f"{name}.csv", REPOSITORY / f"jobs/corpus/{gold_file}.jsonl", key)
    with pytest.MonkeyPatch.context() as patch:
        enter(made, patch)
        run_without_ray(patch)
        run_line(["assay", "run", "my.yaml"])
        pq.write_table(pa.Table.from_pylist(rows[5:]), made / "data" / "de" / "b.parquet")
        run_line(["assay", "run", "my.yaml"])
        for table in ("labels.parquet", "tasks.csv"):
            run_line(["assay", "export", "my.yaml", "--to", f"out/{table}", "--with-text"])
    return made


@pytest.fixture
def in_manual(manual_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test runs in the folder of the manual."""
    enter(manual_folder, monkeypatch)
    return manual_folder


def write_posts(file: Path) -> None:
    """A CSV of texts without labels."""
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["id", "text"])
        writer.writerows([f"p{number}", f"Post {number},\nin two lines."] for number in range(300))


def write_annotated(folder: Path, labels: list[str]) -> None:
    """What Label Studio and Argilla export, of documents with these labels."""
    tasks = [
        {
            "data": {"doc_id": f"d{n}", "text": f"text {n}"},
            "annotations": [
                {"result": [{"from_name": "toxic", "value": {"choices": [label]}}]},
                {"result": [], "was_cancelled": True},
            ],
        }
        for n, label in enumerate(labels)
    ]
    (folder / "label_studio.json").write_text(json.dumps(tasks))
    records = [
        {
            "id": f"d{n}",
            "fields": {"text": f"text {n}"},
            "responses": {
                "toxic": [
                    {"value": label, "user_id": "ann", "status": "submitted"},
                    {"value": None, "user_id": "bob", "status": "discarded"},
                ]
            },
        }
        for n, label in enumerate(labels)
    ]
    (folder / "argilla.json").write_text(json.dumps(records))


def write_scores(file: Path, gold: Path, key: str) -> None:
    """Scores of the Perspective API's attributes, made from labels of people with noise."""
    names = ["TOXICITY", "SEVERE_TOXICITY", "IDENTITY_ATTACK", "INSULT", "PROFANITY", "THREAT"]
    noise = random.Random(0)
    with gold.open(encoding="utf-8") as lines:
        judged = [row for row in map(json.loads, lines) if "toxic" in row]
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([key, *names])
        for row in judged:
            middle = 1.5 if row["toxic"] == "toxic" else -1.5
            scores = [1 / (1 + math.exp(-noise.gauss(middle, 1.5))) for _ in names]
            writer.writerow([row[key], *scores])
