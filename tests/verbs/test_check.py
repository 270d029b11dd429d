"""A wrong attention is refused twice, every difference is seen, 8-bit products are compared."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processors import needs_products

from pipeline.cli import main
from pipeline.errors import ModelError
from pipeline.inference import alternatives, loading
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention import plan
from pipeline.inference.attention.kernels import Attended
from pipeline.inference.attention.plan import Segment
from pipeline.inference.engine import LabelEngine, Labelled
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.progress import COMPARING, LISTING
from pipeline.spec.parse import load_spec
from pipeline.verbs import exactness
from pipeline.verbs.check import check
from pipeline.verbs.exactness import (
    Difference,
    Exactness,
    choose_compared,
    compared_answers,
    difference,
)

WriteSpec = Callable[..., Path]
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What a verb said last on standard error, behind transformers' progress bars."""
    return capsys.readouterr().err.splitlines()[-1]


def some_ids(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(300) for _ in range(tokens))


def whole_labels(
    name: str, token_ids: tuple[int, ...], forms: list[list[tuple[int, ...]]], *, beam: int
) -> Question:
    labels = {f"l{i}": paths for i, paths in enumerate(forms)}
    return Question(name, token_ids, labels, beam=beam)


def siblings_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question also reads the questions before it."""
    correct = plan._over_span

    def over_span(layout: Any, span: Any, window: int | None) -> Iterator[Segment]:
        yield from correct(layout, span, window)
        keys = plan._keys(layout.tree, span)
        for queries in layout.queries:
            if queries.start >= span.subtree_stop:
                yield Segment(layout.all_copies(queries), keys)

    monkeypatch.setattr(plan, "_over_span", over_span)


def the_document_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_over_documents", lambda _layout, _window: ())


def the_instruction_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_over_prefix", lambda _layout, _documents, _window: ())


def scores_are_scaled_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = layers.attend_tree

    def attend(*args: Any, scale: float, **options: Any) -> Attended:
        return correct(*args, scale=scale / 2, **options)

    monkeypatch.setattr(layers, "attend_tree", attend)


BUGS = [
    siblings_leak,
    the_document_is_not_seen,
    the_instruction_is_not_seen,
    scores_are_scaled_wrongly,
]


@pytest.mark.parametrize("plant", BUGS)
def test_a_wrong_attention_is_refused_when_the_model_is_loaded(
    plant: Plant,
    write_spec: WriteSpec,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    with pytest.raises(ModelError, match="gives other answers under the tree"):
        load_model(model_folder, dtype="float32", device="cpu")
    assert main(["check", str(write_spec())]) == 1
    line = last_line(capsys)
    assert line.startswith("assay: model family 'llama' gives other answers under the tree")


def a_model(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(folder), "dtype": "float32", **changes}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", BUGS)
def test_a_wrong_attention_that_gets_past_loading_is_not_exact_and_exit_1(
    plant: Plant,
    dtype: str,
    write_spec: WriteSpec,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(loading, "tree_error", lambda _model: 0.0)
    spec = str(write_spec(model=a_model(model_folder, dtype=dtype)))
    assert main(["check", spec]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("differs: all questions in one reading and a prompt for each question ")
    assert "allowed: at most" in shown
    assert main(["check", spec, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["exactness"]
    in_float32 = found if dtype == "float32" else found["in_float32"]
    assert in_float32["max_abs_dp"] > 1e-4 and not found["exact"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_planted_and_the_same_spec_is_exact(
    dtype: str, write_spec: WriteSpec, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(model=a_model(model_folder, dtype=dtype)))
    assert main(["check", spec, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"]["processor"]["attention"].endswith(f" torch.{dtype}")
    found = printed["exactness"]
    assert found["exact"] and found["answers"] == 2
    assert printed["quantization"] is None
    allowed = found["allowed"]
    assert found["max_abs_dp"] <= allowed["max_abs_dp"] and allowed["max_abs_dp_in_float32"] == 1e-4
    if dtype == "float32":
        assert allowed == {**allowed, "max_abs_dp": 1e-4, "mean_abs_dp": None}
        assert found["max_abs_dp"] <= 1e-4
        assert found["in_float32"] is None and found["rounding"] is None
    else:
        assert found["in_float32"]["max_abs_dp"] <= 1e-4 < found["max_abs_dp"]
        assert 0 < found["rounding"]["mean_abs_dp"] < 0.1
        assert found["mean_abs_dp"] <= allowed["mean_abs_dp"]
        assert allowed["mean_abs_dp"] == 3 * found["rounding"]["mean_abs_dp"] + 1e-3


def test_in_half_precision_people_are_told_of_both_proofs(
    write_spec: WriteSpec, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_spec(model=a_model(model_folder, dtype="bfloat16")))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("exact: all questions in one reading and a prompt for each question ")
    assert "in float32 p differs by at most " in shown
    assert "in bfloat16 p differs by at most " in shown and "allowed: at most " in shown
    assert "from their float32 answers" in shown
    found = re.search(r"kernels products by \w+, attention by (assay|torch) torch.bfloat16", shown)
    assert found, shown


def test_without_room_for_float32_weights_half_precision_is_proved_alone(
    write_spec: WriteSpec,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(exactness, "_USABLE", 0.0)
    spec = str(write_spec(model=a_model(model_folder, dtype="bfloat16")))
    assert main(["check", spec]) == 0
    assert "not in float32 there is no room for its weights" in " ".join(
        capsys.readouterr().out.split()
    )
    the_document_is_not_seen(monkeypatch)
    monkeypatch.setattr(loading, "tree_error", lambda _model: 0.0)
    assert main(["check", spec, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["exactness"]
    assert found["in_float32"] is None and found["mean_abs_dp"] > exactness.HALF_MEAN["bfloat16"]


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
    found = compared("bfloat16", apart, in_float32=in_float32, rounding=rounding)
    assert found.exact == exact


@pytest.mark.parametrize(
    "dtype, apart, exact",
    [
        ("bfloat16", far(0.006, largest=0.07), True),
        ("bfloat16", far(0.006, largest=0.25), False),
        ("bfloat16", far(0.03), False),
        ("float16", far(0.001, largest=0.009), True),
        ("float16", far(0.001, largest=0.02), False),
        ("float16", far(0.003), False),
        ("float32", far(1e-5, largest=5e-5), True),
        ("float32", far(1e-5, largest=2e-4), False),
        ("bfloat16", far(np.nan), False),
    ],
)
def test_alone_a_format_has_bounds_of_its_own(dtype: str, apart: Difference, exact: bool) -> None:
    assert compared(dtype, apart).exact == exact


def less_mass(log_probs: torch.Tensor) -> torch.Tensor:
    """Half of every label's probability goes to other tokens: `p` stays as it was."""
    return log_probs - np.log(2)


def another_share(log_probs: torch.Tensor) -> torch.Tensor:
    """The labels change places: their probabilities together stay as they were."""
    return log_probs.flip(0)


@pytest.mark.parametrize("distort", [less_mass, another_share])
def test_a_check_compares_the_mass_as_well_as_the_shares(
    distort: Callable[[torch.Tensor], torch.Tensor],
    write_spec: WriteSpec,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    correct, seen = alternatives.per_question, []

    def per_question(*args: Any) -> list[list[torch.Tensor]]:
        answers = correct(*args)
        seen.extend(log_probs for of_document in answers for log_probs in of_document)
        return [[distort(log_probs) for log_probs in of_document] for of_document in answers]

    monkeypatch.setattr(alternatives, "per_question", per_question)
    checked = check(load_spec(write_spec()), cache_dir=tmp_path / "cache", documents=None)
    shares = [(a.softmax(0) - distort(a).softmax(0)).abs().max() for a in seen]
    out_of_all = [(a.exp() - distort(a).exp()).abs().max() for a in seen]
    assert (float(max(shares)) < 1e-6) == (distort is less_mass)
    expected = float(max(*shares, *out_of_all))
    found = checked.exactness
    assert found.max_abs_dp == pytest.approx(expected, abs=1e-5)
    assert expected > exactness.FLOAT32_MAX and not found.exact


def test_of_each_label_the_larger_difference_counts() -> None:
    answers = [np.log([[0.4, 0.4], [0.1, 0.3]])]
    others = [np.log([[0.2, 0.2], [0.3, 0.1]])]
    found = difference(answers, others)
    assert (found.argmax_flips, found.answers) == (1, 2)
    assert found.max_abs_dp == pytest.approx(0.5)  # 1/4 -> 3/4 of the labels
    assert found.mean_abs_dp == pytest.approx((0.2 + 0.2 + 0.5 + 0.5) / 4)


def test_of_labels_with_several_forms_below_a_beam_nothing_is_claimed(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beam may have left one of the forms, which the label's own prompts would sum."""
    source = random.Random(0)
    forms = [[some_ids(source, 3) for _ in range(1 + place % 2)] for place in range(6)]
    question = whole_labels("q", some_ids(source, 6), forms, beam=2)
    prompt = PromptTokens(some_ids(source, 4), (question,))
    document = list(some_ids(source, 20))
    model = load_model(model_folder, dtype="float32", device="cpu")
    answers = LabelEngine(model, prompt, max_batch_tokens=500).label([document]).log_probs
    reached = np.isfinite(answers[0][0])
    assert reached[1::2].any() and reached[::2].any()  # of two forms, and of one
    (asked,) = choose_compared(prompt, [document], answers)
    alone = alternatives.answers_alone(model, asked.prompt, document, readouts={})
    found = difference([compared_answers([asked], answers)], [alone])
    assert found.answers == 1 and found.max_abs_dp < 1e-4


def test_whole_labels_that_are_no_numbers_are_not_exact(
    write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = LabelEngine.label

    def overflown(engine: LabelEngine, *args: Any, **options: Any) -> Labelled:
        labelled = correct(engine, *args, **options)
        nothing = tuple(np.full_like(answers, np.nan) for answers in labelled.log_probs)
        return replace(labelled, log_probs=nothing)

    monkeypatch.setattr(LabelEngine, "label", overflown)
    task = {"name": "t", "question": "?", "labels": ["law", "lawn", "art"]}
    spec = write_spec(tasks=[{**task, "length_penalty": 1.0}])
    assert main(["check", str(spec), "--json"]) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail)["exactness"]["max_abs_dp"] is None


def test_fewer_documents_than_none_are_refused(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_spec()), "--documents", "-1"]) == 2
    assert last_line(capsys).startswith("--documents: write a number")


def test_nothing_compared_is_no_change() -> None:
    found = difference([np.empty((0, 2))], [np.empty((0, 2))])
    assert (found.max_abs_dp, found.mean_abs_dp, found.answers) == (0.0, 0.0, 0)


@needs_products
def test_8_bit_products_are_compared_with_the_models_own(
    write_spec: WriteSpec, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(model=a_model(model_folder, dtype="int8"))
    dtype = place(load_spec(spec).model, this_machine()).dtype
    assert main(["check", str(spec), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(model_folder)
    prompt = tokenise_prompt(tokenizer, load_spec(spec).prompt, load_spec(spec).tasks)
    document = DocumentTokenizer(tokenizer).encode("Hello.")
    rounded, plain = (
        LabelEngine(
            load_model(model_folder, dtype=dtype, device="cpu", int8=int8),
            prompt,
            max_batch_tokens=1_000,
        )
        .label([document])
        .log_probs
        for int8 in (True, False)
    )
    expected = difference(rounded, plain)
    assert found["model"]["int8"] and found["model"]["dtype"] == dtype
    assert found["quantization"] == {
        "max_abs_dp": pytest.approx(expected.max_abs_dp, abs=1e-6),
        "mean_abs_dp": pytest.approx(expected.mean_abs_dp, abs=1e-6),
        "argmax_flips": expected.argmax_flips,
        "answers": 2,
    }
    assert expected.max_abs_dp > 1e-4


@needs_products
def test_people_are_told_what_quantising_changed(
    write_spec: WriteSpec, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(model=a_model(model_folder, dtype="int8"))
    assert main(["check", str(spec)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " with 8-bit products on cpu" in shown
    assert "of 2 answers have another label, against the model without quantisation" in shown


def test_check_names_each_phase(write_spec: WriteSpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipeline.report.progress")
    assert main(["check", str(write_spec())]) == 0
    phases = [record.getMessage() for record in caplog.records]
    assert phases[:2] == ["starting", LISTING]
    assert phases[-1].startswith(COMPARING)
