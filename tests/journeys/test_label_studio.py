"""Label Studio itself: documents are annotated through its API, and a readout is fitted to them.

`make test-label-studio` installs it in an environment of its own, and runs this.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from person import REPOSITORY, Person, comments

PROGRAM = REPOSITORY / ".venv-label-studio/bin/label-studio"
ANNOTATOR, TOKEN = "ann@example.org", "0123456789abcdef0123456789abcdef01234567"
DOCUMENTS, SKIPPED = 40, 3
SPEC = """\
name: comments
model: {path: smollm2.gguf, dtype: float32}
input: {path: comments.csv, id: id}
output: out
tasks:
  - name: toxic
    question: "Is this comment toxic?"
    labels: {toxic: ["Yes"], clean: ["No"]}
  - name: traits
    kind: multi
    question: "Is this comment {label}?"
    labels: [rude & "toxic", long]
  - name: rating
    kind: score
    question: "How long is this comment?"
    labels: [0, 1, 2]
"""


@dataclass(frozen=True)
class LabelStudio:
    """A server, used through its API as its only person does."""

    url: str

    def asks(self, method: str, path: str, content: object = None) -> Any:
        """The JSON that the API answers with."""
        data = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.url}/api/{path}", data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def project(self, interface: Path, tasks: Path) -> int:
        """A new project with this labelling interface and these tasks."""
        content = {"title": tasks.stem, "label_config": interface.read_text()}
        number: int = self.asks("POST", "projects/", content)["id"]
        imported = self.asks("POST", f"projects/{number}/import", json.loads(tasks.read_text()))
        assert imported["task_count"] == len(json.loads(tasks.read_text()))
        return number

    def annotates(self, project: int, answer: Callable[[str], list[str]]) -> None:
        """Answers all tasks of the project, but skips the first ones."""
        listed = self.asks("GET", f"tasks?project={project}&page_size=100&fields=all")["tasks"]
        config = self.asks("GET", f"projects/{project}")["parsed_label_config"]
        ((name, control),) = config.items()
        for number, task in enumerate(sorted(listed, key=lambda task: task["id"])):
            choices = answer(task["data"]["text"])
            value = {"from_name": name, "to_name": "text", "type": "choices"}
            result = [{**value, "value": {"choices": choices}}] if choices else []
            assert set(choices) <= set(control["labels"])
            skips = number < SKIPPED
            annotation = {"result": [] if skips else result, "lead_time": 1.5}
            annotation["was_cancelled"] = skips
            self.asks("POST", f"tasks/{task['id']}/annotations/", annotation)

    def exports(self, project: int, to: Path) -> None:
        """Downloads the project in the format JSON."""
        export = self.asks("GET", f"projects/{project}/export?exportType=JSON")
        to.write_text(json.dumps(export))


@pytest.fixture(scope="module")
def label_studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabelStudio]:
    """A server on 127.0.0.1 with a new database."""
    folder = tmp_path_factory.mktemp("label-studio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PROGRAM, "start", "--init", "--no-browser", "--internal-host", "127.0.0.1"),
        *("--port", str(port), "--data-dir", folder, "--username", ANNOTATOR),
        *("--password", "only-for-tests", "--user-token", TOKEN, "--enable-legacy-api-token"),
    ]
    off = {"COLLECT_ANALYTICS": "false", "SENTRY_DSN": "", "LATEST_VERSION_CHECK": "false"}
    studio = LabelStudio(f"http://127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, **off, "BASE_DATA_DIR": str(folder), "HOME": str(folder)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, folder / "log"
            with suppress(OSError):
                studio.asks("GET", "projects")
                break
            time.sleep(1)
        yield studio
    finally:
        process.terminate()
        process.wait(timeout=60)


def toxic(text: str) -> list[str]:
    return ["toxic" if TRUTH[text] else "clean"]


def traits(text: str) -> list[str]:
    return ["long"] * (len(text) > 60) + ['rude & "toxic"'] * TRUTH[text]


def rating(text: str) -> list[str]:
    return [str(min(2, len(text) // 60))]


# Whether a comment is toxic, by its text.
TRUTH = {row["text"]: row["toxic"] == "toxic" for row in comments(3 * DOCUMENTS)}


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.exists(), reason="`make test-label-studio` installs Label Studio")
@pytest.mark.parametrize("answer", [toxic, traits, rating])
def test_annotations_of_label_studio_become_gold_and_a_readout(
    person: Person, label_studio: LabelStudio, answer: Callable[[str], list[str]]
) -> None:
    task, folder = answer.__name__, person.folder
    person.writes_csv(
        "comments.csv", [{"id": row["id"], "text": row["text"]} for row in comments(3 * DOCUMENTS)]
    )
    person.writes("spec.yaml", SPEC)
    review = f"assay review spec.yaml --task {task} --to gold.jsonl"
    person.types(f"{review} --export tasks.json --as label-studio --documents {DOCUMENTS}")
    project = label_studio.project(folder / "tasks.interface.xml", folder / "tasks.json")
    label_studio.annotates(project, answer)
    label_studio.exports(project, folder / "annotated.json")
    line = f"{review} --import annotated.json --from label-studio --json"
    imported = json.loads(person.types(line).out)
    (annotator,) = imported["people"]
    assert imported["added"] == DOCUMENTS and re.fullmatch(r"label-studio:\d+", annotator)
    again = json.loads(person.types(line).out)
    assert (again["added"], again["known"]) == (0, DOCUMENTS)

    text_of = {
        task["data"]["assay"]["doc_id"]: task["data"]["text"]
        for task in json.loads((folder / "tasks.json").read_text())
    }
    lines = [json.loads(line) for line in (folder / "gold.jsonl").read_text().splitlines()]
    assert [line["action"] for line in lines].count("skip") == SKIPPED
    for line in lines:
        if line["action"] == "label":
            label = line["label"]
            own = [label] if isinstance(label, str) else label
            assert set(own) == set(answer(text_of[line["doc_id"]])) and line["seconds"] == 1.5

    # — gold goes to a project as annotations, and comes back as the answers of the same person
    person.types(f"{review} --export gold.json --as label-studio")
    project = label_studio.project(folder / "gold.interface.xml", folder / "gold.json")
    label_studio.exports(project, folder / "back.json")
    other = review.replace("gold.jsonl", "other.jsonl")
    person.types(f"{other} --import back.json --from label-studio")
    assert sorted((folder / "other.jsonl").read_text().splitlines()) == sorted(
        (folder / "gold.jsonl").read_text().splitlines()
    )
    person.types(f"assay fit spec.yaml --gold gold.jsonl --task {task} --document --to fitted/")
    assert list((folder / "fitted").rglob("*.safetensors"))
