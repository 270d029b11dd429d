"""Labels of several tokens, from text to file, stage by stage, against independent prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
from answer_rules import broken_answers
from stages import label_and_commit
from transformers import PreTrainedTokenizerFast

from pipeline.cli import main
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model
from pipeline.inference.model.loaded import LoadedModel
from pipeline.ledger.keys import label_key
from pipeline.runtime.job import make_job, plan
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore

LABELS = [f"{a}/{b}/{c}" for a in ("art", "law") for b in ("old", "odd") for c in "xy"]
TASKS: list[dict[str, Any]] = [
    {"name": "theme", "question": "Which?", "labels": LABELS, "beam": 99, "top_k": 4},
    {"name": "mood", "question": "How?", "labels": ["very good", "very bad", "neutral"]},
    {"name": "rude", "question": "Rude?", "labels": {"toxic": ["Yes"], "clean": ["No"]}},
]
TEXTS = ["One.", "", "<|im_end|> and more"]


def committed_by_hand(spec: JobSpec, tmp_path: Path) -> dict[str, pa.Table]:
    """The label files of a spec of one shard, without Ray."""
    job = make_job(spec, place(spec.model, this_machine()), tmp_path / "cache")
    store = LocalStore(tmp_path / "out")
    (work,) = plan(job, store).work_items
    list(label_and_commit([work], job))
    keys = {task: label_key(task, fp, work.shard.id) for task, fp in job.fp.items()}
    return {task: pq.read_table(pa.BufferReader(store.read(key))) for task, key in keys.items()}


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
    write_spec: Callable[..., Path],
    tmp_path: Path,
    model_folder: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    spec = load_spec(write_spec(tasks=[{**TASKS[0], "separator": "/"}, *TASKS[1:]]))
    tables = committed_by_hand(spec, tmp_path)
    for task in spec.tasks:
        assert list(broken_answers(tables[task.name], list(task.labels))) == []
    model = load_model(model_folder, dtype="float32", device="cpu")
    for row, text in enumerate(TEXTS):
        answers = {name: table.to_pylist()[row] for name, table in tables.items()}
        if not text:
            assert (
                answers["theme"]["top"]
                is answers["theme"]["levels"]
                is answers["mood"]["p"]
                is None
            )
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


def test_a_check_proves_whole_labels_and_a_search(
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    many = [f"{a}{b}{c}" for a in "abcd" for b in "efghi" for c in "jklm"]  # 80
    searched = {"name": "many", "question": "?", "labels": many, "beam": 3, "top_k": 5}
    spec = write_spec(tasks=[*TASKS, searched])
    assert main(["check", str(spec), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exactness"]["answers"] == 4 and report["exactness"]["max_abs_dp"] <= 1e-4
    scoring = {prompt["task"]: prompt["scoring"] for prompt in report["prompts"]}
    assert scoring == {"theme": "full", "mood": "full", "rude": "first_token", "many": "full"}
    prompts = {prompt["task"]: prompt for prompt in report["prompts"]}
    assert prompts["rude"]["verbalizers"] is None
    verbalizer = prompts["mood"]["verbalizers"]["neutral"][0]
    assert (
        len(verbalizer) == len("neutral") and prompts["mood"]["labels"]["neutral"] == verbalizer[:1]
    )
