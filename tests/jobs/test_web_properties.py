"""The specs of web documents: eighteen properties of all kinds, and educational quality alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.inference.attention.tree import Branches
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.spec.parse import load_spec

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "jobs" / "specs" / "web_properties.yaml")


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


def test_educational_quality_alone_is_a_score_from_0_to_5() -> None:
    [task] = load_spec(ROOT / "jobs" / "specs" / "educational_quality.yaml").tasks
    assert (task.kind, task.values) == ("score", (0, 1, 2, 3, 4, 5))
    [of_all] = [task for task in SPEC.tasks if task.name == "educational"]
    assert of_all.values == task.values


@pytest.mark.slow
def test_the_questions_are_short_and_read_at_one_position() -> None:
    """The tokenizer of the model that the spec names; labels differ in their first token."""
    model = ROOT / "models" / "smollm2-135m-instruct.gguf"
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    prompt = tokenise_prompt(tokenizer, SPEC.prompt, SPEC.parts)
    branches = Branches.of([question.token_ids for question in prompt.questions])
    assert len(branches.token_ids) == 552
    assert all(question.scores_first_tokens for question in prompt.questions)
