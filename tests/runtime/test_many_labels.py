"""Labels of several tokens, from text to file, stage by stage, against independent prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from calls import Assay
from changing_corpus import Corpus
from transformers import PreTrainedTokenizerFast

from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model
from pipeline.inference.model.loaded import LoadedModel
from pipeline.spec.schema import JobSpec

LABELS = [f"{a}/{b}/{c}" for a in ("art", "law") for b in ("old", "odd") for c in "xy"]
TASKS: list[dict[str, Any]] = [
    {"name": "theme", "question": "Which?", "labels": LABELS, "beam": 99, "top_k": 4},
    {"name": "mood", "question": "How?", "labels": ["very good", "very bad", "neutral"]},
    {"name": "rude", "question": "Rude?", "labels": {"toxic": ["Yes"], "clean": ["No"]}},
]
TEXTS = ["One.", "", "<|im_end|> and more"]


def expected(
    spec: JobSpec, model: LoadedModel, tokenizer: PreTrainedTokenizerFast, place: int, text: str
) -> dict[str, float]:
    """By label, the log-probability of all its tokens in a prompt of its own."""
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    document = DocumentTokenizer(tokenizer).encode(text)
    asked = (model, prompt.prefix, document, prompt.questions[place].token_ids)
    answers = {label: tokenizer(label)["input_ids"] for label in spec.tasks[place].labels}
    return {label: reference.verbalizer_log_prob(*asked, ids) for label, ids in answers.items()}


def test_files_hold_what_independent_prompts_answer(
    modelled: Corpus, model_folder: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    modelled.write("a", TEXTS)
    modelled.task, modelled.others = {**TASKS[0], "separator": "/"}, TASKS[1:]
    assert modelled.run().complete
    spec = modelled.spec
    tables = {task.name: [*modelled.rows(task.name).values()] for task in spec.tasks}
    model = load_model(model_folder, dtype="float32", device="cpu")
    for row, text in enumerate(TEXTS):
        answers = {name: rows[row] for name, rows in tables.items()}
        if not text:
            theme = answers["theme"]
            assert theme["top"] is theme["levels"] is answers["mood"]["p"] is None
            continue
        oracle = expected(spec, model, byte_tokenizer, 0, text)
        total = np.logaddexp.reduce(list(oracle.values()))
        p = {label: float(np.exp(log_prob - total)) for label, log_prob in oracle.items()}
        likeliest = sorted(p, key=lambda label: -p[label])[:4]
        top = answers["theme"]["top"]
        assert [each["label"] for each in top] == likeliest
        assert [each["p"] for each in top] == pytest.approx([p[x] for x in likeliest], abs=1e-3)
        below = sum(p[label] for label in p if label.startswith(likeliest[0][:3]))
        level = answers["theme"]["levels"][0]
        assert level == {"label": likeliest[0][:3], "p": pytest.approx(below, abs=1e-3)}
        oracle = expected(spec, model, byte_tokenizer, 1, text)
        total = np.logaddexp.reduce(list(oracle.values()))
        shares = {label: np.exp(log_prob - total) for label, log_prob in oracle.items()}
        assert answers["mood"]["p"] == pytest.approx(shares, abs=1e-3)
        assert answers["mood"]["mass"] == pytest.approx(np.exp(total), rel=1e-2)


def test_a_check_proves_whole_labels_and_a_search(modelled: Corpus, assay: Assay) -> None:
    modelled.write("a", ["Hello."])
    many = [f"{a}{b}{c}" for a in "abcd" for b in "efghi" for c in "jklm"]  # 80
    searched = {"name": "many", "question": "?", "labels": many, "beam": 3, "top_k": 5}
    modelled.task, modelled.others = TASKS[0], [*TASKS[1:], searched]
    report = assay("check", modelled.spec_file, "--json").json
    assert report["exactness"]["answers"] == 4 and report["exactness"]["max_abs_dp"] <= 1e-4
    whole = {prompt["task"]: bool(prompt["verbalizers"]) for prompt in report["prompts"]}
    assert whole == {"theme": True, "mood": True, "rude": False, "many": True}
    prompts = {prompt["task"]: prompt for prompt in report["prompts"]}
    assert prompts["rude"]["verbalizers"] is None
    verbalizer = prompts["mood"]["verbalizers"]["neutral"][0]
    assert (
        len(verbalizer) == len("neutral") and prompts["mood"]["labels"]["neutral"] == verbalizer[:1]
    )
