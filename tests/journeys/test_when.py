"""A question about some of the documents: the language first, then toxicity of English alone."""

from __future__ import annotations

import json
import re

import pytest
from person import REPOSITORY, Person

SPEC = """
name: posts
model: {path: smollm2.gguf}
input: {path: posts.jsonl, text: text, id: id}
output: out/posts
tasks:
  - name: language
    classifier: {kind: language}
    labels: [en, fr, ru, zh]
  - name: toxic
    question: "Is the text toxic? Answer yes or no."
    labels: [yes, no]
    when: language.label = 'en'
""".replace("[yes, no]", '["yes", "no"]')
LANGUAGES = {"English": 6, "French": 3, "Russian": 3}


@pytest.mark.xdist_group("ray")
def test_a_question_is_asked_of_the_documents_whose_language_another_task_found(
    person: Person,
) -> None:
    lines = (REPOSITORY / "jobs/corpus/train.jsonl").read_text(encoding="utf-8")
    gold = [json.loads(line) for line in lines.rstrip("\n").split("\n")]
    texts = [
        text
        for name, count in LANGUAGES.items()
        for text in [g["text"] for g in gold if g.get("language") == name][:count]
    ]
    rows = [{"id": f"{number}", "text": text} for number, text in enumerate(texts)]
    person.writes("posts.jsonl", "\n".join(json.dumps(row) for row in rows))
    person.writes("posts.yaml", SPEC)
    output = person.types("assay run posts.yaml")
    assert re.search(r"toxic skipped +6: its `when` is not true", output.out)
    assert re.search(r"labelled now +12; the model read 6 of them", output.out)
    counted = person.types("assay status posts.yaml").out
    assert re.search(r"toxic +12 +0 +0 +6 +0", counted)
    query = (
        "import pipeline, duckdb; labels = pipeline.open_labels('out/posts'); "
        "print(duckdb.sql('select language.label, toxic.status, count(*) from labels "
        "group by all order by all').fetchall())"
    )
    printed = person.types(f'python -c "{query}"').out
    assert printed.strip() == "[('en', 'ok', 6), ('fr', 'skipped', 3), ('ru', 'skipped', 3)]"

    person.writes("posts.yaml", SPEC.replace("= 'en'", "in ('en', 'fr')"))
    planned = json.loads(person.types("assay run posts.yaml --dry-run --json").out)
    assert planned["missing_documents"] == 12
    again = json.loads(person.types("assay run posts.yaml --json").out)
    assert (again["documents_read_by_model"], again["skipped"]) == (3, {"toxic": 3})
    assert json.loads(person.types("assay run posts.yaml --json").out)["objects_created"] == 0

    person.writes("posts.yaml", SPEC.replace("language.label =", "langauge.label ="))
    refused = person.types("assay run posts.yaml", code=2).err
    assert "tasks.1.when: langauge is not in the scope of a condition" in refused
