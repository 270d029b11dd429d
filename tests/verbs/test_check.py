"""A wrong attention is not exact, every difference is reported, rounding to 8 bits is compared."""

from __future__ import annotations

import logging
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import Assay, WriteSpec
from numpy.typing import NDArray
from processors import takes_int8
from transformers import AutoModelForCausalLM

from pipeline.inference import alternatives, loading
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention import tiles
from pipeline.inference.attention.reference import Attended
from pipeline.inference.attention.tree import Tree
from pipeline.inference.engine import LabelEngine, Labelled
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.progress import COMPARING, LISTING
from pipeline.spec.model import RoundedFormat
from pipeline.spec.parse import load_spec
from pipeline.verbs import check as checks
from pipeline.verbs import exactness
from pipeline.verbs.exactness import (
    Difference,
    Exactness,
    choose_compared,
    compared_answers,
    difference,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def siblings_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question also reads the questions before it."""
    made = Tree.__init__

    def leaking(tree: Tree, *args: Any) -> None:
        made(tree, *args)
        tree.subtree_stops[:] = 1 << 30
        tree.top_starts[:] = 0

    monkeypatch.setattr(Tree, "__init__", leaking)


def the_document_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = tiles._tiles

    def wrong(*args: Any, **options: Any) -> NDArray[np.int32]:
        table = correct(*args, **options)
        table[:, tiles.WHOLE_STOP] = table[:, tiles.WHOLE_FIRST]
        return table

    monkeypatch.setattr(tiles, "_tiles", wrong)


def the_instruction_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = layers.TreeAttention.attend

    def attend(own: layers.TreeAttention, *args: Any, **options: Any) -> Attended:
        return correct(replace(own, prefix=None), *args, **options)

    monkeypatch.setattr(layers.TreeAttention, "attend", attend)


def scores_are_scaled_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = layers.TreeAttention.attend

    def attend(*args: Any, scale: float, **options: Any) -> Attended:
        return correct(*args, scale=scale / 2, **options)

    monkeypatch.setattr(layers.TreeAttention, "attend", attend)


BUGS = [
    siblings_leak,
    the_document_is_not_seen,
    the_instruction_is_not_seen,
    scores_are_scaled_wrongly,
]


def a_model(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(folder), "dtype": "float32", **changes}


@pytest.mark.parametrize(
    ("plant", "dtype"), [*((bug, "float32") for bug in BUGS), (siblings_leak, "bfloat16")]
)
def test_a_wrong_attention_that_gets_past_loading_is_not_exact_and_exit_1(
    plant: Plant,
    dtype: str,
    write_spec: WriteSpec,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(loading, "tree_error", lambda _model: 0.0)
    spec = write_spec(model=a_model(model_folder, dtype=dtype))
    result = assay("check", spec, "--json", code=1).json["exactness"]
    in_float32 = result if dtype == "float32" else result["in_float32"]
    assert in_float32["max_abs_dp"] > 1e-4 and not result["exact"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_planted_error_the_same_spec_is_exact(
    dtype: str, write_spec: WriteSpec, model_folder: Path, assay: Assay
) -> None:
    spec = write_spec(model=a_model(model_folder, dtype=dtype))
    printed = assay("check", spec, "--json").json
    # — a processor without products of half precision computes it in float32
    assert printed["model"]["processor"]["attention"].split()[1] in (dtype, "float32")
    result = printed["exactness"]
    assert result["exact"] and result["answers"] == 2 and printed["quantization"] is None
    allowed = result["allowed"]
    assert (
        result["max_abs_dp"] <= allowed["max_abs_dp"] and allowed["max_abs_dp_in_float32"] == 1e-4
    )
    if dtype == "float32":
        assert allowed == {**allowed, "max_abs_dp": 1e-4, "mean_abs_dp": None}
        assert result["in_float32"] is None and result["rounding"] is None
    else:
        assert result["in_float32"]["max_abs_dp"] <= 1e-4 < result["max_abs_dp"]
        assert 0 < result["rounding"]["mean_abs_dp"] < 0.1
        assert result["mean_abs_dp"] <= allowed["mean_abs_dp"]
        assert allowed["mean_abs_dp"] == 3 * result["rounding"]["mean_abs_dp"] + 1e-3


def test_people_read_the_verdict_first_then_both_proofs_labels_tokens_and_prompts(
    write_spec: WriteSpec, model_folder: Path, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    spec = write_spec(model=a_model(model_folder, dtype="bfloat16"))
    shown = assay("check", spec, "--prompts").words
    assert shown.startswith("exact: all questions in one reading and a prompt for each question ")
    assert "in float32 p differs by at most " in shown
    assert "in bfloat16 p differs by at most " in shown and "allowed: at most " in shown
    assert re.search(r"kernels products by \w+, attention by \w+ (bfloat16|float32)", shown)
    assert "art 'a', law 'l', sport 's'" in shown and "Hello." in shown and "Rude?" in shown
    monkeypatch.setattr(exactness, "_USABLE", 0.0)
    shown = assay("check", spec).words
    assert "not in float32 there is no room for its weights" in shown
    the_document_is_not_seen(monkeypatch)
    monkeypatch.setattr(loading, "tree_error", lambda _model: 0.0)
    printed = assay("check", spec, code=1).words
    assert printed.startswith("differs: all questions in one reading and a prompt for each que")
    result = assay("check", spec, "--json", code=1).json["exactness"]
    assert result["in_float32"] is None and result["mean_abs_dp"] > exactness.HALF_MEAN["bfloat16"]


def test_check_gives_prompts_whose_label_tokens_a_plain_forward_finds(
    write_spec: WriteSpec, assay: Assay
) -> None:
    result = assay("check", write_spec(), "--prompts", "--json").json
    assert result["exactness"]["argmax_flips"] == 0
    assert [prompt["task"] for prompt in result["prompts"]] == ["toxic", "topic"]
    network = AutoModelForCausalLM.from_pretrained(result["model"]["path"], dtype=torch.float32)
    for prompt in result["prompts"]:
        assert "Hello." in prompt["text"] and prompt["doc_id"] == "a"
        logits = network(torch.tensor([prompt["token_ids"]])).logits[0, -1]
        for first in prompt["labels"].values():
            assert 0 < logits.softmax(-1)[first].sum() < 1


def far(mean: float, largest: float = 0.0) -> Difference:
    return Difference(max_abs_dp=largest or mean, mean_abs_dp=mean, argmax_flips=0, answers=9)


def compared(dtype: str, apart: Difference, **others: Difference) -> Exactness:
    return Exactness(**asdict(apart), number_format=dtype, **others)


@pytest.mark.parametrize(
    "apart, in_float32, exact",
    [
        (far(0.006, largest=0.07), far(1e-6), True),  # SmolLM2 in bfloat16, as it is
        (far(0.15), far(1e-6), False),  # only the kernel of half precision is wrong
        (far(0.006, largest=0.4), far(1e-6), False),  # one answer among many
        (far(0.006), far(2e-4), False),  # only float32 shows it
        (far(np.nan), far(1e-6), False),
        (far(0.006), far(np.nan), False),
    ],
)
def test_half_precision_is_exact_where_float32_is_and_rounding_explains_the_rest(
    apart: Difference, in_float32: Difference, exact: bool
) -> None:
    rounding = far(0.006, largest=0.05)
    result = compared("bfloat16", apart, in_float32=in_float32, rounding=rounding)
    assert result.exact == exact


@pytest.mark.parametrize(
    "dtype, apart, exact",
    [
        ("bfloat16", far(0.006, largest=0.07), True),
        ("bfloat16", far(0.006, largest=0.25), False),
        ("bfloat16", far(0.03), False),
        ("float16", far(0.001, largest=0.009), True),
        ("float16", far(0.001, largest=0.02), False),
        ("float16", far(0.003), False),
        ("fp8", far(0.032, largest=0.27), True),
        ("fp8", far(0.032, largest=0.5), False),
        ("fp8", far(0.07), False),
        ("float32", far(1e-5, largest=5e-5), True),
        ("float32", far(1e-5, largest=2e-4), False),
        ("bfloat16", far(np.nan), False),
    ],
)
def test_alone_a_format_has_bounds_of_its_own(dtype: str, apart: Difference, exact: bool) -> None:
    assert compared(dtype, apart).exact == exact


def test_of_each_label_the_larger_difference_counts() -> None:
    answers = [np.log([[0.4, 0.4], [0.1, 0.3]])]
    others = [np.log([[0.2, 0.2], [0.3, 0.1]])]
    result = difference(answers, others)
    assert (result.argmax_flips, result.answers) == (1, 2)
    assert result.max_abs_dp == pytest.approx(0.5)  # 1/4 -> 3/4 of the labels
    assert result.mean_abs_dp == pytest.approx((0.2 + 0.2 + 0.5 + 0.5) / 4)
    empty = difference([np.empty((0, 2))], [np.empty((0, 2))])
    assert (empty.max_abs_dp, empty.mean_abs_dp, empty.answers) == (0.0, 0.0, 0)


def test_of_labels_with_several_forms_below_a_beam_nothing_is_claimed(model_folder: Path) -> None:
    """The beam may have left one of the forms, which the label's own prompts would sum."""
    source = random.Random(0)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(source.randrange(300) for _ in range(tokens))

    labels = {f"l{n}": [some(3) for _ in range(1 + n % 2)] for n in range(6)}
    question = Question("q", some(6), labels, beam=2)
    prompt = PromptTokens(some(4), (question,))
    document = list(some(20))
    model = load_model(model_folder, dtype="float32", device="cpu")
    answers = LabelEngine(model, prompt, max_batch_tokens=500).label([document]).log_probs
    reached = np.isfinite(answers[0][0])
    assert reached[1::2].any() and reached[::2].any()  # of two forms, and of one
    (asked,) = choose_compared(prompt, [document], answers)
    alone = alternatives.answers_alone(model, asked.prompt, document, readouts={})
    result = difference([compared_answers([asked], answers)], [alone])
    assert result.answers == 1 and result.max_abs_dp < 1e-4


def test_whole_labels_that_are_no_numbers_are_not_exact(
    write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    correct = LabelEngine.label

    def overflown(engine: LabelEngine, *args: Any, **options: Any) -> Labelled:
        labelled = correct(engine, *args, **options)
        nan_answers = tuple(np.full_like(answers, np.nan) for answers in labelled.log_probs)
        return replace(labelled, log_probs=nan_answers)

    monkeypatch.setattr(LabelEngine, "label", overflown)
    task = {"name": "t", "question": "?", "labels": ["law", "lawn", "art"], "length_penalty": 1.0}
    printed = assay("check", write_spec(tasks=[task]), "--json", code=1)
    assert printed.json["exactness"]["max_abs_dp"] is None


@pytest.mark.parametrize("rounded_to", [pytest.param("int8", marks=takes_int8), "fp8"])
def test_8_bit_products_are_compared_with_the_models_own(
    rounded_to: RoundedFormat,
    write_spec: WriteSpec,
    model_folder: Path,
    assay: Assay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_spec(model=a_model(model_folder, dtype=rounded_to))
    spec = load_spec(file)
    if rounded_to == "fp8":  # — a run has it on GPUs alone
        dtype = "bfloat16"
        monkeypatch.setattr(checks, "place", lambda *_: Placement("cpu", dtype, 1, 1))
    else:
        dtype = place(spec.model, this_machine()).dtype
    result = assay("check", file, "--json").json
    tokenizer = load_tokenizer(model_folder)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    document = DocumentTokenizer(tokenizer).encode("Hello.")
    formats: tuple[RoundedFormat | None, ...] = (rounded_to, None)
    models = [
        load_model(model_folder, dtype=dtype, device="cpu", rounded_to=each) for each in formats
    ]
    engines = [LabelEngine(model, prompt, max_batch_tokens=1_000) for model in models]
    expected = difference(*(engine.label([document]).log_probs for engine in engines))
    assert result["model"]["rounded_to"] == rounded_to and result["model"]["dtype"] == dtype
    assert result["quantization"] == pytest.approx(asdict(expected), abs=1e-6)
    assert expected.max_abs_dp > 1e-4 and expected.answers == 2
    shown = assay("check", file).words
    assert f" with {rounded_to} products on cpu" in shown
    assert "of 2 answers have another label, against the model without quantisation" in shown


def test_kept_keys_in_8_bits_are_compared_too(
    write_spec: WriteSpec, model_folder: Path, assay: Assay
) -> None:
    spec = write_spec(model=a_model(model_folder, kv="int8"))
    result = assay("check", spec, "--json").json
    assert result["model"]["kv"] == "int8" and result["exactness"]["max_abs_dp"] <= 1e-4
    assert 0 < result["quantization"]["max_abs_dp"] < 0.2
    assert "float32, kv: int8 on cpu" in assay("check", spec).words


def test_a_model_of_recurrent_layers_keeps_nothing_in_8_bits(
    write_spec: WriteSpec,
    tiny_model: Callable[[str], LoadedModel],
    model_folder: Path,
    tmp_path: Path,
    assay: Assay,
) -> None:
    hybrid = tmp_path / "hybrid"
    shutil.copytree(model_folder, hybrid, ignore=shutil.ignore_patterns("*.safetensors"))
    tiny_model("qwen3_5_text").network.save_pretrained(hybrid)
    printed = assay("check", write_spec(model={"path": str(hybrid), "kv": "int8"}), code=2)
    assert "model.kv: layers with a recurrent state keep it" in printed.err


def test_check_names_each_phase(
    write_spec: WriteSpec, assay: Assay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.report.progress")
    assay("check", write_spec())
    phases = [record.getMessage() for record in caplog.records]
    assert phases[:2] == ["starting", LISTING]
    assert phases[-1].startswith(COMPARING)


def test_a_cascade_is_checked_with_the_question_of_its_last_stage(
    write_spec: WriteSpec, assay: Assay
) -> None:
    task = {"name": "topics", "kind": "multi", "question": "Is it about {label}?"}
    spec = write_spec(tasks=[{**task, "labels": ["art", "law"], "cascade": "auto"}])
    printed = assay("check", spec, "--json").json
    assert printed["exactness"]["exact"]
    assert {*printed["answers"]} == {"topics.art", "topics.law"}
