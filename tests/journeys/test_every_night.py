"""A nightly job: a new file, an edited one, a reworded question, a gate that fails."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from person import REPOSITORY, Person, comments

SPEC = f"""\
name: nightly
model: {{path: smollm2.gguf, dtype: float32}}
input: {{path: data, id: id}}
output: out/nightly
prompt:
  instruction: "Read the text, then answer the question about it."
  document: "Text:\\n{{document}}"
documents: {{max_tokens: 256, too_long: head}}
tasks:
  - name: toxic
    question: null
    readout: {REPOSITORY}/jobs/corpus/readouts/toxic.safetensors
    labels: [toxic, clean]
  - name: sport
    question: "Is this about sport? Answer yes or no."
    labels: {{sport: ["Yes", "yes"], other: ["No", "no"]}}
gold: {{path: gold.csv}}
publish:
  gates: [toxic.auroc >= 0.9]
  max_psi: 0.1
  max_flip_rate: 0.05
  max_failing: 0.05
"""


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_nightly_runs_label_what_changed_and_publish_what_passes(person: Person) -> None:
    rows = comments(90)
    person.writes("nightly.yaml", SPEC)
    gold = [{"id": row["id"], "toxic": row["toxic"]} for row in rows[:60]]
    person.writes_csv("gold.csv", gold)
    (person.folder / "data").mkdir()

    def writes(name: str, part: list[dict[str, str]]) -> None:
        lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in part]
        person.writes(f"data/{name}.jsonl", "\n".join(lines))

    def night(*, code: int = 0) -> dict[str, Any]:
        output = person.types("assay run nightly.yaml --json", code=code)
        result: dict[str, Any] = json.loads(output.out)
        return result

    writes("monday", rows[:60])
    first = night()
    assert (first["snapshot"], first["documents_read_by_model"]) == (1, 60)

    writes("tuesday", rows[60:])
    second = night()
    assert (second["snapshot"], second["documents_read_by_model"]) == (2, 30)

    edited = [{**rows[0], "text": "Something else entirely, about football."}, *rows[1:60]]
    writes("monday", edited)
    third = night()
    assert (third["snapshot"], third["documents_read_by_model"]) == (3, 1)

    person.edits("nightly.yaml", ("Is this about sport?", "Does this text speak of a game?"))
    person.edits("nightly.yaml", (">= 0.9]", ">= 0.9999]"))
    fourth = night(code=1)
    assert fourth["documents_read_by_model"] == 90 and not fourth["published"]
    assert [each["passed"] for each in fourth["gates"]] == [False]
    shown = person.types("assay export nightly.yaml --to before.csv").out
    assert "snapshot 00000003" in shown, "the last one that passed is the current one"

    person.edits("nightly.yaml", (">= 0.9999]", ">= 0.9]"))
    person.edits(
        "nightly.yaml",
        ("max_psi: 0.1", "max_psi: 100"),
        ("max_flip_rate: 0.05", "max_flip_rate: 1"),
    )
    words = person.types("assay run nightly.yaml")
    assert re.search(r"labelled now +0;", words.out)
    assert "snapshot 00000004" in person.types("assay export nightly.yaml --to after.csv").out
    before, after = person.reads_csv("before.csv"), person.reads_csv("after.csv")
    assert [row["toxic_p_toxic"] for row in before] == [row["toxic_p_toxic"] for row in after]
    assert [row["sport_p_sport"] for row in before] != [row["sport_p_sport"] for row in after]
