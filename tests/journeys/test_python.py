"""A program that uses Ray and torch for its own work, and assay beside them."""

from __future__ import annotations

import json

import pytest
from person import Person, comments

SPEC = """\
name: program
model: {path: smollm2.gguf, dtype: float32}
input: {path: comments.jsonl, id: id}
output: out/program
documents: {max_tokens: 64}
tasks:
  - name: toxic
    question: "Is this comment toxic? Answer yes or no."
    labels: {toxic: ["Yes", "yes"], clean: ["No", "no"]}
gold: {path: comments.jsonl}
filter: {keep: "toxic.p.toxic < 0.5"}
"""
# Ray and torch are there before assay; a notebook's cell runs in an event loop.
PROGRAM = """
import ray, torch
import asyncio, json
from pathlib import Path
import pipeline

lines = Path("comments.jsonl").read_text().splitlines()
spec = pipeline.load_spec("program.yaml")

async def cell():
    in_a_thread = await asyncio.to_thread(pipeline.run, spec)
    return in_a_thread, pipeline.run("program.yaml")
first, second = asyncio.run(cell())

labels = pipeline.open_labels("out/program")
stored = {row["doc_id"]: row["toxic"]["p"]["toxic"] for row in labels.to_table().to_pylist()}
labeller = pipeline.Labeller("program.yaml")
documents = [json.loads(line) for line in lines]
answers = labeller.label([each["text"] for each in documents])["toxic"].to_pylist()
alone = {each["id"]: a["p"]["toxic"] for each, a in zip(documents, answers, strict=True)}
judged = pipeline.evaluate("program.yaml")
kept = pipeline.filter("program.yaml", options=pipeline.FilterOptions(to="kept"))
to_readouts = pipeline.FitOptions(to="readouts/toxic.safetensors")
fitted = pipeline.fit("program.yaml", options=to_readouts)
print(json.dumps({
    "judged": judged.tasks["toxic"].rows.evaluated,
    "kept": [kept.documents, kept.documents - kept.dropped],
    "fitted": [fitted.tasks[0].rows, Path(fitted.tasks[0].readout).is_file()],
    "complete": [first.complete, second.complete],
    "snapshots": [first.snapshot, second.snapshot, labels.snapshot],
    "rows": [first.rows, second.rows],
    "ids": [sorted(stored), sorted(each["id"] for each in documents)],
    "largest": max(abs(stored[id] - alone[id]) for id in alone),
    "ray": ray.is_initialized(),
}))
"""


@pytest.mark.xdist_group("ray")
def test_a_program_beside_ray_and_torch(person: Person) -> None:
    rows = comments(60)
    person.writes("program.yaml", SPEC)
    person.writes("comments.jsonl", "\n".join(json.dumps(row) for row in rows))
    person.writes("program.py", PROGRAM)
    output = person.types("python program.py")
    assert "starting" not in output.err.lower(), "a library prints nothing"
    result = json.loads(output.out)
    assert result["complete"] == [True, True] and result["snapshots"] == [1, 1, 1]
    assert result["rows"] == [60, 60] and result["ids"][0] == result["ids"][1]
    assert result["judged"] == 60 and result["fitted"] == [60, True]
    documents, kept = result["kept"]
    assert documents == 60 and 0 <= kept <= 60
    assert result["largest"] < 1e-5, "float32: sums in another order"
    assert result["ray"] is False, "the run's own Ray has ended"
