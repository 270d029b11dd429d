"""The tutorial, as the manual has it: a CSV without labels becomes a filter that is audited."""

from __future__ import annotations

import re

import pytest
from annotator import Annotator, address_in
from manual import ON_THE_HUB, blocks, commands
from person import REPOSITORY, Output, Person, comments

PAGE = REPOSITORY / "docs" / "quickstart.md"
HERE, DOCUMENTS, LABELS = "smollm2.gguf", 400, 100


@pytest.mark.xdist_group("ray")
def test_the_tutorial_as_the_manual_has_it(person: Person) -> None:
    rows = comments(DOCUMENTS)
    person.writes_csv("comments.csv", [{"id": row["id"], "text": row["text"]} for row in rows])
    outputs = follow_the_page(person, {row["text"]: row["toxic"] for row in rows})

    (fitted,) = outputs["assay fit"]
    auroc = re.search(r"→ document.*?\) +(0\.\d+) \(", fitted.out)  # — behind the loss
    assert auroc is not None and float(auroc[1]) >= 0.85, fitted.out
    (labelled,) = outputs["assay run"]
    assert re.search(rf"labelled now +{DOCUMENTS};", labelled.out)

    exported = person.reads_csv("out/labels.csv")
    assert [row["doc_id"] for row in exported] == [row["id"] for row in rows]
    pairs = zip(exported, rows, strict=True)
    assert sum(row["toxic"] == known["toxic"] for row, known in pairs) >= 0.8 * DOCUMENTS
    is_kept = [row["doc_id"] for row in exported if float(row["toxic_p_toxic"]) < 0.5]
    files = sorted(person.folder.glob("out/clean/kept/*/*.csv"))
    kept = [row["id"] for file in files for row in person.reads_csv(str(file))]
    assert sorted(kept) == sorted(is_kept)
    (judged,) = outputs["assay eval"]
    figures = dict(re.findall(r"^(precision|recall|prevalence) .*?(0\.\d+) \(", judged.out, re.M))
    assert float(figures["precision"]) >= 0.75 and float(figures["recall"]) >= 0.75
    assert "quality of the filter" in outputs["assay report"][0].out


def follow_the_page(person: Person, truth: dict[str, str]) -> dict[str, list[Output]]:
    """What each line of the page's shell blocks printed, by its first two words.

    YAML after `init` adds or replaces keys of the spec.
    """
    outputs: dict[str, list[Output]] = {}
    for block in blocks(PAGE):
        code = block.code.replace(ON_THE_HUB, HERE)
        if block.language == "yaml":
            spec = (person.folder / "comments.yaml").read_text()
            key = code.partition(":")[0]
            before = re.split(rf"^(?={key}:)", spec, flags=re.MULTILINE)[0]
            person.writes("comments.yaml", before + code)
        for words in commands(code) if block.language == "bash" else []:
            line = " ".join(f'"{word}"' if " " in word else word for word in words)
            if words[1] == "init":
                line += f" --model {HERE}"
            if words[1] == "review":
                labels_on_the_page(person, line, truth)
            else:
                outputs.setdefault(" ".join(words[:2]), []).append(person.types(line))
    return outputs


def labels_on_the_page(person: Person, line: str, truth: dict[str, str]) -> None:
    """Opens the review, and labels as the page says; in an audit, what is toxic is dropped."""
    audits = "--by audit" in line
    drops = {text: "yes" if label == "toxic" else "no" for text, label in truth.items()}
    with person.runs_beside(line) as review:
        log = max(person.folder.glob("log-*"), key=lambda file: int(file.name[4:]))
        Annotator(address_in(log), drops if audits else truth).labels(LABELS)
        review.terminate()
        assert review.wait(timeout=60) == 0
