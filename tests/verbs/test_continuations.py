"""`export --head --why` prints what transformers' own greedy decoding gives after each prompt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import Assay, WriteSpec
from pydantic import TypeAdapter
from stages import run_without_ray
from transformers import AutoModelForCausalLM

from pipeline.runtime.assembly import reader_prompt
from pipeline.runtime.job import make_reader
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.parse import load_spec
from pipeline.spec.tasks import TaskSpec
from pipeline.verbs.continuations import MOST_TOKENS, _deciding, _unasked

TASKS: list[dict[str, Any]] = [
    {"name": "toxic", "question": "Rude?", "labels": {"toxic": ["Yes"], "clean": ["No"]}},
    {
        "name": "topic",
        "kind": "multi",
        "question": "About {label}?{answer}So:",
        "labels": ["a", "b"],
    },
]


def greedy(network: Any, ids: list[int]) -> list[tuple[int, float]]:
    """Without a cache: one whole forward for each token."""
    chosen = []
    for _ in range(MOST_TOKENS):
        with torch.inference_mode():
            p = network(torch.tensor([ids])).logits[0, -1].softmax(-1)
        chosen.append((int(p.argmax()), float(p.max())))
        ids = [*ids, chosen[-1][0]]
    return chosen


def test_each_question_has_the_greedy_continuation_of_its_prompt(
    write_spec: WriteSpec,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    run_without_ray(monkeypatch)
    file = write_spec(tasks=TASKS)
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "text": "Hello."}\n{"id": "b", "text": ""}')
    assay("run", file)
    command = "export", file, "--head", 2, "--why"
    answered, empty = assay(*command, "--json").json["why"]
    spec = load_spec(file)
    reader = make_reader(spec, place(spec.model, this_machine()), tmp_path / "cache")
    _, tokenizer, prompt = reader_prompt(reader)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    assert [own["question"] for own in answered] == ["toxic", "topic.a", "topic.b"]
    for own, question in zip(answered, prompt.questions, strict=True):
        ids = [*prompt.prefix, *tokenizer("Hello.").input_ids, *question.token_ids]
        expected = greedy(network, ids)
        assert [t["text"] for t in own["tokens"]] == [tokenizer.decode([i]) for i, _ in expected]
        assert [t["p"] for t in own["tokens"]] == pytest.approx([p for _, p in expected], abs=1e-5)
    assert {own["none"] for own in empty} == {"no answer: empty"}
    shown = assay(*command).out.splitlines()
    first = answered[0]["tokens"][0]
    [line] = [line for line in shown if line.startswith("    toxic: the model would say ")]
    assert f"say {first['text']!r} {first['p']:.2f}, " in line
    assert shown.count("topic: no answer: empty") == 1


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"question": "Rude?", "readout": "r.safetensors"}, "a readout answers"),
        ({"readout": "r.safetensors"}, "a readout answers"),
        ({"classifier": {"kind": "onnx", "path": "model.onnx"}}, "a classifier answers"),
        ({}, "a classifier answers"),  # — the head of an encoder
        ({"question": "Rude?", "beam": 3}, None),
    ],
)
def test_what_asks_no_language_model_has_no_continuation(
    answers: dict[str, Any], reason: str | None
) -> None:
    content = {"name": "toxic", "labels": ["toxic", "clean"], **answers}
    task: TaskSpec = TypeAdapter(TaskSpec).validate_python(content)
    reason_of = _unasked(task, "ok")
    assert reason_of == reason is None or (reason_of or "").startswith(str(reason))
    assert _unasked(task, "skipped") == "no answer: skipped"


def test_of_a_cascade_the_stage_that_decided_is_asked() -> None:
    names = ["other", "toxic", "toxic", "last"]
    steps: Any = [SimpleNamespace(task=name, number=n) for n, name in enumerate(names)]
    numbers = [_deciding(steps, "toxic", stage).number for stage in (1, 2, None)]  # type: ignore[attr-defined]
    assert numbers == [1, 2, 2] and _deciding(steps, "last", None) is steps[3]
