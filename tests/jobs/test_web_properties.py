"""The specs of web documents: eighteen properties of all kinds, and educational quality alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.inference.attention.tree import Branches
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "jobs" / "specs" / "web_properties.yaml")
SHEET = load_spec(ROOT / "jobs" / "specs" / "web_properties_sheet.yaml")


def test_eighteen_properties_of_all_kinds_are_46_questions() -> None:
    assert Counter(task.kind for task in SPEC.tasks) == {"choice": 7, "multi": 5, "score": 6}
    assert len(SPEC.tasks) == 18
    assert len(SPEC.parts) == 46


def test_every_property_is_on_its_page() -> None:
    page = (ROOT / "jobs" / "README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for task in SPEC.tasks:
        (row,) = [row for row in rows if f"| `{task.name}` |" in row]
        assert f"| {task.kind} |" in row
        assert set(task.labels) <= set(row.replace(",", " ").split()) or task.kind == "score", row


def test_the_sheet_has_the_same_properties_and_asks_for_all_of_them_before_the_document() -> None:
    asked, sheet = (
        [(task.name, task.kind, [*task.labels], task.values) for task in spec.tasks]
        for spec in (SPEC, SHEET)
    )
    assert asked == sheet
    lines = dict(
        line.split(": ", 1) for line in SHEET.prompt.instruction.splitlines() if ": " in line
    )
    assert [*lines] == [task.name for task in SHEET.tasks]
    for task in SHEET.tasks:
        assert (task.question or "").startswith(f"{{answer}}{task.name}"), "only the answer's begin"
        texts = [texts[-1] for texts in task.labels.values()]
        if task.kind == "score":  # — the ends of the scale
            texts = [texts[0], texts[-1]]
        assert [text for text in texts if text not in lines[task.name]] == []


def test_educational_quality_alone_is_a_score_from_0_to_5() -> None:
    [task] = load_spec(ROOT / "jobs" / "specs" / "educational_quality.yaml").tasks
    assert (task.kind, task.values) == ("score", (0, 1, 2, 3, 4, 5))
    [of_all] = [task for task in SPEC.tasks if task.name == "educational"]
    assert of_all.values == task.values


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "kept", "read"), [(SPEC, 44, 552), (SHEET, 545, 122)])
def test_the_questions_are_short_and_read_at_one_position(
    spec: JobSpec, kept: int, read: int
) -> None:
    """The tokenizer of the model that the specs name; labels differ in their first token."""
    model = ROOT / "models" / "smollm2-135m-instruct.gguf"
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.parts)
    branches = Branches.of([question.token_ids for question in prompt.questions])
    assert (len(prompt.prefix), len(branches.token_ids)) == (kept, read)
    assert all(question.scores_first_tokens for question in prompt.questions)
