"""vLLM in place of assay's own engine: proved, killed, continued, and compared with it.

`make test-vllm` installs vLLM beside assay, in an environment of its own, and runs this.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
from person import Person, comments

HAS_VLLM = find_spec("vllm") is not None
FILES, ROWS = 6, 10
SPEC = """\
name: two-engines
model: {path: smollm2.gguf, dtype: float32, engine: vllm}
input: {path: in, id: id}
output: by-vllm
documents: {max_tokens: 200, too_long: head}
tasks:
  - name: toxic
    question: "Is this comment toxic?"
    labels: {toxic: ["Yes"], clean: ["No"]}
  - name: about
    question: "What is it about: football, food or politics?"
    labels: [football, food, politics and elections, politics and taxes]
"""
OWN = [("engine: vllm", "engine: assay"), ("by-vllm", "by-assay")]


def corpus(user: Person) -> None:
    (user.folder / "in").mkdir()
    rows = comments(FILES * ROWS)
    for number in range(FILES):
        part = rows[number * ROWS : (number + 1) * ROWS]
        lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in part]
        user.writes(f"in/{number:02}.jsonl", "\n".join(lines))


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
@pytest.mark.xdist_group("ray")
def test_without_vllm_a_run_says_what_to_install_and_writes_nothing(person: Person) -> None:
    corpus(person)
    person.writes("vllm.yaml", SPEC)
    for command in ("check", "run"):
        error = person.types(f"assay {command} vllm.yaml", code=1).err
        assert "pip install 'corpus-assay[vllm]'" in error
    assert not list((person.folder / "by-vllm").glob("labels/**/*.parquet"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here; `make test-vllm` does that")
@pytest.mark.xdist_group("ray")
def test_vllm_answers_as_assay_does_and_a_killed_run_goes_on(person: Person) -> None:
    corpus(person)
    person.writes("vllm.yaml", SPEC)
    person.writes("assay.yaml", SPEC)
    person.edits("assay.yaml", *OWN)
    proof = json.loads(person.types("assay check vllm.yaml --json").out)
    assert proof["model"]["engine"] == "vllm" and proof["exactness"]["exact"]

    labels = person.folder / "by-vllm" / "labels"
    person.kills("assay run vllm.yaml", once=lambda: list(labels.rglob("*.parquet")))
    before = json.loads(person.types("assay status vllm.yaml --json").out)["tasks"]["toxic"]
    assert 0 < before["done"] < FILES * ROWS
    again = person.types("assay run vllm.yaml")
    assert re.search(rf"labelled now +{before['missing']};", again.out)
    person.types("assay verify vllm.yaml")
    person.types("assay run assay.yaml")

    for name in ("vllm", "assay"):
        person.types(f"assay export {name}.yaml --to {name}.csv")
    pairs = list(zip(person.reads_csv("vllm.csv"), person.reads_csv("assay.csv"), strict=True))
    scores = [column for column in pairs[0][0] if "_p_" in column]
    assert len(pairs) == FILES * ROWS and len(scores) == 6
    largest = max(abs(float(a[column]) - float(b[column])) for a, b in pairs for column in scores)
    flips = sum(a[task] != b[task] for a, b in pairs for task in ("toxic", "about"))
    print(f"largest |dp| {largest:.1e}, {flips} other labels")
    assert largest <= 1e-4 and not flips
