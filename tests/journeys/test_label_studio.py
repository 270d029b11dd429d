"""The recipe for Label Studio with its server: documents are annotated through its API.

`make test-label-studio` installs it in an environment of its own, and runs this.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manual import blocks
from person import REPOSITORY, Person, comments

PROGRAM = Path(os.environ.get("LABEL_STUDIO", REPOSITORY / ".venv-label-studio/bin/label-studio"))
ANNOTATOR, TOKEN = "ann@example.org", "0123456789abcdef0123456789abcdef01234567"
DOCUMENTS, SKIPPED = 40, 3
SPEC = """\
name: comments
model: {path: smollm2.gguf, dtype: float32}
input: {path: comments.csv, id: id}
output: out/comments
documents: {max_tokens: 64}
tasks:
  - name: toxic
    question: "Is this comment toxic?"
    labels: {toxic: ["Yes"], clean: ["No"]}
"""


@dataclass(frozen=True)
class LabelStudio:
    """A server, used through its API as its only person does."""

    url: str

    def asks(self, method: str, path: str, content: object = None) -> Any:
        """The JSON that the API answers with; the bytes of a file are sent as a CSV."""
        kind = "text/csv" if isinstance(content, bytes) else "application/json"
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Authorization": f"Token {TOKEN}", "Content-Type": kind}
        if kind == "text/csv":
            boundary = "end-of-part"
            headers["Content-Type"] = f"multipart/form-data; boundary={boundary}"
            part = 'Content-Disposition: form-data; name="file"; filename="tasks.csv"\r\n'
            start = f"--{boundary}\r\n{part}Content-Type: text/csv\r\n\r\n".encode()
            data = start + data + f"\r\n--{boundary}--\r\n".encode()
        request = urllib.request.Request(
            f"{self.url}/api/{path}",
            data=None if content is None else data,
            headers=headers,
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def annotates(self, project: int, truth: dict[str, str]) -> None:
        """Answers all tasks of the project, but skips the first ones."""
        listed = self.asks("GET", f"tasks?project={project}&page_size=100&fields=all")["tasks"]
        for number, task in enumerate(sorted(listed, key=lambda task: task["id"])):
            value = {"from_name": "toxic", "to_name": "text", "type": "choices"}
            result = [{**value, "value": {"choices": [truth[task["data"]["doc_id"]]]}}]
            skips = number < SKIPPED
            annotation = {"result": [] if skips else result, "was_cancelled": skips}
            self.asks("POST", f"tasks/{task['id']}/annotations/", annotation)


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


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.exists(), reason="`make test-label-studio` installs Label Studio")
def test_annotations_of_label_studio_become_gold_and_a_readout(
    person: Person, label_studio: LabelStudio
) -> None:
    rows = comments(DOCUMENTS)
    truth = {row["id"]: row["toxic"] for row in rows}
    person.writes_csv("comments.csv", [{"id": row["id"], "text": row["text"]} for row in rows])
    person.writes("my.yaml", SPEC)
    person.types("assay run my.yaml")
    page = list(blocks(REPOSITORY / "docs" / "recipes.md"))
    (export,) = [each.code for each in page if "out/tasks.csv --with-text" in each.code]
    (interface,) = [each.code for each in page if "<Choices" in each.code]
    (script,) = [each.code for each in page if "gold_of_label_studio.csv" in each.code]
    person.types(export)

    content = {"title": "comments", "label_config": interface}
    project = label_studio.asks("POST", "projects/", content)["id"]
    tasks = (person.folder / "out/tasks.csv").read_bytes()
    imported = label_studio.asks("POST", f"projects/{project}/import", tasks)
    assert imported["task_count"] == DOCUMENTS
    label_studio.annotates(project, truth)
    exported = label_studio.asks("GET", f"projects/{project}/export?exportType=JSON")
    person.writes("label_studio.json", json.dumps(exported))
    person.writes("to_gold.py", script.replace('["doc", "toxic"]', '["id", "toxic"]'))
    person.types("python to_gold.py")

    gold = {row["id"]: row["toxic"] for row in person.reads_csv("gold_of_label_studio.csv")}
    assert len(gold) == DOCUMENTS - SKIPPED
    assert all(truth[id] == label for id, label in gold.items())
    person.types("assay fit my.yaml --gold gold_of_label_studio.csv --to fitted/")
    assert list((person.folder / "fitted").rglob("*.safetensors"))
