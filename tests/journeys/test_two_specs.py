"""Two people share one output; the run of one is interrupted, and the other cleans up."""

from __future__ import annotations

import json
import re

import pytest
from person import Person, comments

SPEC = """\
name: NAME
model: {path: smollm2.gguf, dtype: float32}
input: {path: data, id: id}
output: out/shared
documents: {max_tokens: 64}
tasks:
  - name: NAME
    question: "Is this comment about NAME? Answer yes or no."
    labels: {NAME: ["Yes", "yes"], other: ["No", "no"]}
"""
FILES, ROWS = 6, 8


@pytest.mark.xdist_group("ray")
def test_gc_of_one_spec_keeps_the_unfinished_work_of_the_other(person: Person) -> None:
    for name in ("sport", "politics"):
        person.writes(f"{name}.yaml", SPEC.replace("NAME", name))
    (person.folder / "data").mkdir()
    for number in range(FILES):
        lines = [json.dumps(row) for row in comments(ROWS, start=number * ROWS)]
        person.writes(f"data/{number}.jsonl", "\n".join(lines))

    person.types("assay run sport.yaml")
    # — as soon as a shard is done; a shell starts background jobs without Ctrl-C
    stopped = person.types(
        "assay run politics.yaml & "
        "until ls out/shared/labels/politics/*/*/*.parquet 2> /dev/null; do sleep 0.1; done; "
        "kill -TERM $!; wait $!",
        code=3,
    )
    assert "to continue, run: assay run politics.yaml" in stopped.err
    before = json.loads(person.types("assay status politics.yaml --json").out)["tasks"]["politics"]
    assert 0 < before["done"] < FILES * ROWS

    person.types("assay gc sport.yaml --keep 1 --delete")
    finished = person.types("assay run politics.yaml")
    assert re.search(rf"labelled now +{FILES * ROWS - before['done']};", finished.out)
    for name in ("sport", "politics"):
        verified = person.types(f"assay verify {name}.yaml").out
        assert "intact" in verified and f" of {name}" in verified
