"""From a corpus without labels to a filter that an audit has judged."""

from __future__ import annotations

import json
import re

import pytest
from annotator import Annotator, address_in
from person import Person, comments

CORPUS, LABELLED, JUDGED, AUDITED = 500, 100, 150, 120
TASK = """\
tasks:
  - name: toxic
    question: null
    readout: readouts/toxic.safetensors
    labels: [toxic, clean]

filter:
  keep: "toxic.p.toxic < 0.5"
"""


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_hundred_labels_are_enough_for_a_filter_that_an_audit_judges(person: Person) -> None:
    rows = comments(CORPUS)
    truth = {row["text"]: row["toxic"] for row in rows}
    lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in rows]
    person.writes("corpus.jsonl", "\n".join(lines))
    gold = [{"id": row["id"], "toxic": row["toxic"]} for row in rows]
    person.writes_csv("hundred.csv", gold[:LABELLED])
    person.writes_csv("others.csv", gold[LABELLED : LABELLED + JUDGED])

    person.types("assay init corpus.jsonl --to my.yaml --model smollm2.gguf")
    spec = (person.folder / "my.yaml").read_text()
    # the example task gets a name and two labels
    head = spec[: re.search(r"^tasks:", spec, re.MULTILINE).start()]  # type: ignore[union-attr]
    task = 'tasks: [{name: toxic, question: "Is it toxic?", labels: [toxic, clean]}]\n'
    person.writes("my.yaml", head + task)
    person.types("assay fit my.yaml --gold hundred.csv --to readouts")
    person.writes("my.yaml", head + TASK)
    run_output = person.types("assay run my.yaml")
    assert re.search(rf"labelled now +{CORPUS};", run_output.out)

    judged = person.types("assay eval my.yaml --gold others.csv --json")
    task = json.loads(judged.out)["tasks"]["toxic"]
    auroc = task["scores"]["headlines"]["auroc"]
    assert auroc["low"] > 0.8 and auroc["value"] >= 0.9, auroc

    person.types("assay filter my.yaml --to clean")
    files = sorted(person.folder.glob("clean/kept/*/*.jsonl"))
    kept = [json.loads(line)["id"] for file in files for line in file.read_text().splitlines()]
    exported = person.types("assay export my.yaml --to labels.csv") and person.reads_csv(
        "labels.csv"
    )
    assert kept == [r["doc_id"] for r in exported if float(r["toxic_p_toxic"]) < 0.5]

    asked = f"assay review my.yaml --by audit --to audit.jsonl --documents {AUDITED}"
    with person.runs_beside(asked) as review:
        [log] = person.folder.glob("log-*")
        labels = {text: "yes" if label == "toxic" else "no" for text, label in truth.items()}
        Annotator(address_in(log), labels).labels(AUDITED)
        review.terminate()
        assert review.wait(timeout=60) == 0
    assert "next: assay eval my.yaml --gold audit.jsonl" in log.read_text()
    lines = (person.folder / "audit.jsonl").read_text().splitlines()
    audited = {json.loads(line)["doc_id"] for line in lines}
    known = {row["id"] for row in rows[:LABELLED]}
    assert len(audited) == AUDITED and audited.isdisjoint(known), "readouts were fitted to these"
    output = person.types("assay eval my.yaml --gold audit.jsonl --json")
    intervals = json.loads(output.out)["filter"]

    dropped = {row["id"] for row in rows} - {*kept}
    toxic = {row["id"] for row in rows if row["toxic"] == "toxic"}
    whole_corpus = {
        "precision": len(dropped & toxic) / len(dropped),
        "recall": len(dropped & toxic) / len(toxic),
        "prevalence": len(toxic) / CORPUS,
    }
    for figure, value in whole_corpus.items():
        # — the interval is 95 % over samples; this sample is always the same
        assert intervals[figure]["low"] <= value <= intervals[figure]["high"], (
            figure,
            value,
            intervals,
        )

    person.types("assay report my.yaml --gold others.csv --to report.html")
    page = (person.folder / "report.html").read_text()
    assert not re.search(r'(src|href)="https?:', page) and f"{auroc['value']:.3f}" in page
    assert f"{len(kept):,}" in page and f"{len(dropped):,}" in page
