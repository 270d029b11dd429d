"""From posts without labels to a filter: a person labels a hundred of them on a page."""

from __future__ import annotations

import json
import re

import pytest
from annotator import Annotator, address_in
from person import Person
from sklearn.metrics import roc_auc_score

from benchmarks.annotators import news
from pipeline.hashes import sha256_hex

POSTS, CHARS, LABELS = 600, 600, 100
TASKS = """\
documents: {max_tokens: 96}
tasks:
  - name: kind
    question: null
    readout: readouts/kind.safetensors
    labels: [advert, other]
"""
FILTER = """
filter:
  keep: "kind.p.advert < 0.5"
"""


def posts() -> list[dict[str, str]]:
    """Starts of real posts to six newsgroups, of which one is for classified advertisements."""
    kinds = {
        text[:CHARS]: "advert" if group == "misc.forsale" else "other" for text, group in news()
    }
    texts = sorted(kinds, key=lambda text: sha256_hex(text.encode()))[:POSTS]
    return [{"id": f"p{n}", "text": text, "kind": kinds[text]} for n, text in enumerate(texts)]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_hundred_labels_on_a_page_are_enough_for_a_filter(person: Person) -> None:
    rows = posts()
    truth = {row["text"]: row["kind"] for row in rows}
    corpus = [json.dumps({"id": row["id"], "text": row["text"]}) for row in rows]
    person.writes("posts.jsonl", "\n".join(corpus))
    person.types("assay init posts.jsonl --to my.yaml --model smollm2.gguf")
    spec = (person.folder / "my.yaml").read_text()
    head = spec[: re.search(r"^tasks:", spec, re.MULTILINE).start()]  # type: ignore[union-attr]
    head = re.sub(r"(?m)^documents:.*\n(  .*\n)*", "", head)
    person.writes("my.yaml", head + TASKS)

    with person.runs_beside("assay review my.yaml --task kind --to gold.jsonl") as review:
        [log] = person.folder.glob("log-*")
        annotator = Annotator(address_in(log), truth)
        annotator.labels(LABELS // 2)
        person.types("cp gold.jsonl half.jsonl")
        annotator.labels(LABELS // 2)
        assert annotator.view["progress"]["labels"] == LABELS
        review.terminate()
        assert review.wait(timeout=60) == 0
    assert "next: assay fit my.yaml --gold gold.jsonl" in log.read_text()

    aurocs = {}
    for gold, number in (("half.jsonl", LABELS // 2), ("gold.jsonl", LABELS)):
        options = "--to readouts/kind.safetensors --overwrite"
        person.types(f"assay fit my.yaml --gold {gold} --layers 12 {options}")
        person.types("assay run my.yaml")
        person.types("assay export my.yaml --to labels.csv --overwrite")
        lines = (person.folder / gold).read_text().splitlines()
        labelled = {json.loads(line)["doc_id"] for line in lines}
        assert len(labelled) == number
        p = {row["doc_id"]: float(row["kind_p_advert"]) for row in person.reads_csv("labels.csv")}
        others = [row for row in rows if row["id"] not in labelled]
        is_advert = [row["kind"] == "advert" for row in others]
        aurocs[number] = roc_auc_score(is_advert, [p[row["id"]] for row in others])
    print("AUROC of the other posts, by labels:", aurocs)
    assert aurocs[LABELS // 2] > 0.8 and aurocs[LABELS] > 0.85

    person.writes("my.yaml", head + TASKS + FILTER)
    person.writes_csv("truth.csv", [{"id": row["id"], "kind": row["kind"]} for row in rows])
    judged = person.types("assay eval my.yaml --gold truth.csv --json")
    task = json.loads(judged.out)["tasks"]["kind"]
    assert (
        task["rows"]["evaluated"] == len(rows) - LABELS
    )  # not those that the readout was fitted to
    person.types("assay report my.yaml --gold truth.csv --to report.html")
    person.types("assay filter my.yaml --to clean")
    kept = [path.read_text().splitlines() for path in person.folder.glob("clean/kept/*/*.jsonl")]
    assert sum(map(len, kept)) == sum(value < 0.5 for value in p.values())
