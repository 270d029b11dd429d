"""The quick start, as the manual has it: from a CSV file to labels, figures and a filter."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from person import REPOSITORY, Person, Seen, comments

PAGE = REPOSITORY / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_THE_HUB, HERE = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2.gguf"
LABELLED, ALL = 120, 180


@pytest.mark.xdist_group("ray")
def test_the_quick_start_as_the_manual_has_it(person: Person) -> None:
    rows = comments(ALL)
    judged = {row["id"]: row["toxic"] for row in rows}
    in_file = [row if n < LABELLED else {**row, "toxic": ""} for n, row in enumerate(rows)]
    person.writes_csv("comments.csv", in_file)
    person.writes_csv("gold.csv", [{"id": r["id"], "toxic": r["toxic"]} for r in rows[LABELLED:]])

    seen = follow_the_page(person)

    ((_, proof),) = seen["assay check"]
    assert re.search(r"exact", proof.out)
    ((_, fitted),) = seen["assay fit"]
    assert "out/readouts/toxic.safetensors" in fitted.out
    dry, first, second = (each for _, each in seen["assay run"])
    assert f"{ALL}" in dry.out
    assert re.search(rf"labelled now +{ALL};", first.out)
    assert re.search(r"labelled now +0;", second.out)
    ((_, figures),) = seen["assay eval"]
    assert f"{ALL - LABELLED}" in figures.out
    auroc = re.search(r"auroc\D+(\d\.\d+)", figures.out, re.IGNORECASE)
    assert auroc is not None and float(auroc[1]) >= 0.9, figures.out

    exported = person.reads_csv("out/labels.csv")
    assert [row["doc_id"] for row in exported] == [row["id"] for row in rows]
    right = sum(row["toxic"] == judged[row["doc_id"]] for row in exported[LABELLED:])
    assert right >= 0.85 * (ALL - LABELLED)
    counts = Counter(row["toxic"] for row in exported)
    ((_, queried),) = seen["python -c"]
    assert str(counts["toxic"]) in queried.out and str(counts["clean"]) in queried.out
    (kept,) = person.folder.glob("out/clean/kept/*/*.csv")
    is_clean = [row["id"] for row in exported_rows(exported) if float(row["p"]) < 0.5]
    assert [row["id"] for row in person.reads_csv(str(kept))] == is_clean
    ((_, verified),) = seen["assay verify"]
    assert "intact" in verified.out


def exported_rows(exported: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"id": row["doc_id"], "p": row["toxic_p_toxic"]} for row in exported]


def follow_the_page(person: Person) -> dict[str, list[tuple[str, Seen]]]:
    """What each line of the page's blocks printed, by its first two words.

    The first YAML block is the spec; later ones replace or add its keys.
    """
    seen: dict[str, list[tuple[str, Seen]]] = {}
    text = PAGE.read_text().partition("## Your documents")[2]
    spec: dict[str, str] = {}
    for language, code in BLOCK.findall(text.replace(ON_THE_HUB, HERE)):
        if language == "yaml":
            keys = re.split(r"^(?=\w)", code, flags=re.MULTILINE)[1:]
            spec |= {key.partition(":")[0]: key for key in keys}
            person.writes("comments.yaml", "".join(spec.values()))
            continue
        for line in code.replace("\\\n", "").splitlines():
            seen.setdefault(" ".join(line.split()[:2]), []).append((line, person.types(line)))
    return seen
