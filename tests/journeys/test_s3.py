"""Everything on S3, a run that is killed, and a copy of its output on a disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from person import Person, comments
from servers import BUCKET, KEY, SECRET, Server

SPEC = f"""\
name: bucket
model: {{path: "s3://{BUCKET}/journey/model", dtype: float32}}
input: {{path: "s3://{BUCKET}/journey/in", id: id}}
output: s3://{BUCKET}/journey/out
documents: {{max_tokens: 256, too_long: head}}
tasks:
  - name: toxic
    question: null
    readout: s3://{BUCKET}/journey/readouts/toxic.safetensors
    labels: [toxic, clean]
filter:
  keep: "toxic.p.toxic < 0.5"
"""
ASKED = 'question: "Is this comment toxic?"'
FILES, ROWS, FITTED = 12, 20, 100
COPY = "python -c \"import fsspec; fsspec.filesystem('s3').{}, recursive=True)\""


def on_s3(server: Server, person: Person) -> Person:
    """The same person, whose credentials are in the environment."""
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return Person(person.folder, person.home, variables=variables)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_run_on_s3_goes_on_and_a_copy_of_its_output_is_read(
    person: Person, seaweedfs: Server
) -> None:
    user = on_s3(seaweedfs, person)
    rows = comments(FILES * ROWS)
    (person.folder / "in").mkdir()
    for number in range(FILES):
        part = rows[number * ROWS : (number + 1) * ROWS]
        lines = [json.dumps({"id": row["id"], "text": row["text"]}) for row in part]
        user.writes(f"in/{number:02}.jsonl", "\n".join(lines))
    gold = [{"id": row["id"], "toxic": row["toxic"]} for row in rows]
    user.writes_csv("train.csv", gold[:FITTED])
    user.writes_csv("gold.csv", gold[FITTED:])
    user.writes("s3.yaml", re.sub(r"question: null\n.*", ASKED, SPEC))
    user.writes("local.yaml", (person.folder / "s3.yaml").read_text())
    user.edits("local.yaml", (f'"s3://{BUCKET}/journey/model"', "smollm2.gguf"))
    model = json.loads(user.types("assay check local.yaml --documents 0 --json").out)["model"][
        "path"
    ]
    user.types(COPY.format(f"put('{model}/', '{BUCKET}/journey/model/'"))
    user.types(COPY.format(f"put('in/', '{BUCKET}/journey/in/'"))
    readouts = f"s3://{BUCKET}/journey/readouts"
    user.types(f"assay fit s3.yaml --gold train.csv --to {readouts}")
    user.writes("s3.yaml", SPEC)

    files = seaweedfs.file_system()
    labels = f"{BUCKET}/journey/out/labels/**/*.parquet"
    user.kills("assay run s3.yaml", once=lambda: files.glob(labels))
    before = json.loads(user.types("assay status s3.yaml --json").out)["tasks"]["toxic"]
    assert 0 < before["done"] < FILES * ROWS
    again = user.types("assay run s3.yaml")
    assert re.search(rf"labelled now +{before['missing']};", again.out)
    user.types(f"assay filter s3.yaml --to s3://{BUCKET}/journey/clean")
    user.types(f"assay export s3.yaml --to s3://{BUCKET}/journey/labels.csv")

    user.types(COPY.format(f"get('{BUCKET}/journey/out/', 'copy/'"))
    user.types(COPY.format(f"get('{BUCKET}/journey/labels.csv', 'labels.csv'"))
    user.writes("copy.yaml", SPEC.replace(f"s3://{BUCKET}/journey/out", "copy"))
    assert "intact" in user.types("assay verify copy.yaml").out
    assert "10 of 240 documents" in user.types("assay export copy.yaml --head 10").out
    user.types("assay export copy.yaml --to copied.csv")
    assert user.reads_csv("copied.csv") == user.reads_csv("labels.csv")
    judged = json.loads(user.types("assay eval copy.yaml --gold gold.csv --json").out)
    headlines = judged["tasks"]["toxic"]["scores"]["headlines"]
    assert headlines["auroc"]["value"] >= 0.9
    kept = files.glob(f"{BUCKET}/journey/clean/kept/**/*.jsonl")
    names = [json.loads(line)["id"] for file in kept for line in files.cat(file).splitlines()]
    below = [r["doc_id"] for r in user.reads_csv("copied.csv") if float(r["toxic_p_toxic"]) < 0.5]
    assert names == below
    # — a copy is continued, too
    assert re.search(r"labelled now +0;", user.types("assay run copy.yaml").out)
    damaged = sorted(Path(person.folder / "copy/labels").rglob("*.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-9] + bytes(9))
    assert damaged.name in user.types("assay verify copy.yaml", code=1).out
