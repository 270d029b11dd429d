"""From mails without labels to a filter: a person labels a hundred of them on a page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from person import REPOSITORY, Person
from sklearn.metrics import roc_auc_score

CHARS, LABELS = 300, 100
MAILS = 300
TASKS = """\
documents: {max_tokens: 64}
tasks:
  - name: spam
    question: null
    readout: readouts/spam.safetensors
    labels: [spam, other]
exit: {layer: 12}
"""
FILTER = """
filter:
  keep: "spam.p.spam < 0.5"
"""


def mails() -> list[dict[str, str]]:
    """Different starts of real mails, with what the SpamAssassin project sorted them into."""
    lines = (REPOSITORY / "jobs/corpus/train.jsonl").read_text().strip().split("\n")
    rows = [row for row in map(json.loads, lines) if not row.keys() & {"toxic", "language"}]
    spam = {row["text"][:CHARS]: row["spam"] for row in rows}
    return [
        {"id": f"m{n}", "text": text, "spam": spam[text]}
        for n, text in enumerate(list(spam)[:MAILS])
    ]


def address_in(log: Path) -> str:
    """The page's address, once the review has printed it."""
    deadline = time.monotonic() + 300
    while (found := re.search(r"assay: open (\S+)", log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return found[1]


class Annotator:
    """Somebody who knows the labels, and whose page sends what a browser sends."""

    def __init__(self, address: str, truth: dict[str, str]) -> None:
        self.root, _, self.token = address.partition("?token=")
        self.truth = truth
        self.view = self.sends("next")

    def sends(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"X-Review-Token": self.token, "Content-Type": "application/json"}
        sent = json.dumps({"by": "ann", **body}).encode()
        with urlopen(Request(self.root + path, sent, headers), timeout=60) as reply:
            return dict(json.load(reply))

    def labels(self, times: int) -> None:
        for _ in range(times):
            row = self.view["row"]
            label = self.truth[row["text"]]
            self.view = self.sends("answer", id=row["id"], action="label", label=label)

    def waits_for_a_fit(self) -> None:
        deadline = time.monotonic() + 300
        while self.view["progress"]["fitting"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            self.view = self.sends("next")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_hundred_labels_on_a_page_are_enough_for_a_filter(person: Person) -> None:
    rows = mails()
    truth = {row["text"]: row["spam"] for row in rows}
    corpus = [json.dumps({"id": row["id"], "text": row["text"]}) for row in rows]
    person.writes("mails.jsonl", "\n".join(corpus))
    person.types("assay init mails.jsonl --to my.yaml --model smollm2.gguf")
    spec = (person.folder / "my.yaml").read_text()
    head = spec[: re.search(r"^tasks:", spec, re.MULTILINE).start()]  # type: ignore[union-attr]
    head = re.sub(r"(?m)^documents:.*\n(  .*\n)*", "", head)
    person.writes("my.yaml", head + TASKS)

    with person.runs_beside("assay review my.yaml --task spam --to gold.jsonl") as review:
        [log] = person.folder.glob("log-*")
        annotator = Annotator(address_in(log), truth)
        annotator.labels(LABELS // 2)
        person.types("cp gold.jsonl half.jsonl")
        annotator.labels(LABELS // 2)
        annotator.waits_for_a_fit()
        assert annotator.view["progress"]["points"]
        review.terminate()
        assert review.wait(timeout=60) == 0
    assert "next: assay fit my.yaml --gold gold.jsonl" in log.read_text()

    aurocs = {}
    for gold, number in (("half.jsonl", LABELS // 2), ("gold.jsonl", LABELS)):
        person.types(f"assay fit my.yaml --gold {gold} --layers 12")
        person.types("assay run my.yaml")
        person.types("assay export my.yaml --to labels.csv --overwrite")
        lines = (person.folder / gold).read_text().splitlines()
        labelled = {json.loads(line)["doc_id"] for line in lines}
        assert len(labelled) == number
        p = {row["doc_id"]: float(row["spam_p_spam"]) for row in person.reads_csv("labels.csv")}
        others = [row for row in rows if row["id"] not in labelled]
        is_spam = [row["spam"] == "spam" for row in others]
        aurocs[number] = roc_auc_score(is_spam, [p[row["id"]] for row in others])
    print("AUROC of the other mails, by labels:", aurocs)
    assert aurocs[LABELS // 2] > 0.8 and aurocs[LABELS] > 0.85

    person.writes("my.yaml", head + TASKS + FILTER)
    person.writes_csv("truth.csv", [{"id": row["id"], "spam": row["spam"]} for row in rows])
    judged = person.types("assay eval my.yaml --gold truth.csv --json")
    task = json.loads(judged.out)["tasks"]["spam"]
    assert task["rows"]["evaluated"] == len(rows) - LABELS  # not those that the readout knows
    person.types("assay report my.yaml --gold truth.csv --to report.html")
    person.types("assay filter my.yaml --to clean")
    kept = [path.read_text().splitlines() for path in person.folder.glob("clean/kept/*/*.jsonl")]
    assert sum(map(len, kept)) == sum(value < 0.5 for value in p.values())
