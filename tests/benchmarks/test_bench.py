from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processors import needs_products, takes_int8

from benchmarks.bench import Workload, app, as_questions, equally_long, fits, shaped
from benchmarks.timing import Timed, Turn, matmul_flops, take_turns
from pipeline.cli.app import call
from pipeline.errors import SpecError
from pipeline.inference.attention.tree import Branches
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import prepare
from pipeline.inference.model.rounded_products import round_linear
from pipeline.spec.stages import QuestionTask

PROMPT = PromptTokens((1, 2), tuple(Question(n, (5, 6, 7), {"a": [(1,)]}) for n in "xy"))
STREAM = [10, 11, 12]


def test_a_workload_has_the_specs_questions_or_the_number_that_it_states() -> None:
    assert len(shaped(PROMPT, Workload(5), STREAM).questions) == 2
    many = shaped(PROMPT, Workload(5, questions=5), STREAM).questions
    assert [q.token_ids for q in many] == [
        (5, 6, 7),
        (5, 6, 7),
        (11, 5, 6, 7),
        (11, 5, 6, 7),
        (12, 5, 6, 7),
    ]


def test_repeated_questions_share_no_prefix_with_the_first() -> None:
    many = shaped(PROMPT, Workload(5, questions=4), STREAM).questions
    assert Branches.of([many[0].token_ids, many[2].token_ids]).token_ids == (5, 6, 7, 11, 5, 6, 7)


def test_a_longer_prefix_begins_with_the_specs_own() -> None:
    assert shaped(PROMPT, Workload(5, prefix=6), STREAM).prefix == (1, 2, 10, 11, 12, 10)
    assert shaped(PROMPT, Workload(5, prefix=1), STREAM).prefix == (1, 2)


@pytest.mark.parametrize("context, expected", [(13, False), (14, True)])
def test_a_workload_beyond_the_models_context_is_left_out(context: int, expected: bool) -> None:
    # 4 before, 6 of the document, 3 of a question and one that distinguishes its repeat
    assert fits(Workload(6, prefix=4), PROMPT, context) is expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--tokens", "0"), "--tokens: write a number above 0"),
        (("--rounds", "0"), "--rounds: write a number above 0"),
        (("--tokens", "100000"), "--tokens: the model's context has "),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    options: tuple[str, str],
    error: str,
    write_spec: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(app, [str(write_spec()), *options]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(error)


def test_documents_are_the_corpus_in_order() -> None:
    assert equally_long(STREAM, 4, 2) == [[10, 11, 12, 10], [11, 12, 10, 11]]


def test_tasks_with_readouts_are_asked_as_questions_where_they_have_one() -> None:
    labels = {"x": ("X",), "y": ("Y",)}
    tasks = [
        QuestionTask(name="plain", question="Q?", labels=labels),
        QuestionTask(name="asked", question="R?", readout="r", labels=labels),
        QuestionTask(name="document", question=None, readout="r", labels=labels),
    ]
    assert [(t.name, t.readout) for t in as_questions(tasks)] == [("plain", None), ("asked", None)]
    with pytest.raises(SpecError, match=r"give at least one task a question \(got \['document'\]"):
        as_questions(tasks[2:])


def test_methods_take_turns_until_their_rounds_are_over() -> None:
    calls: list[str] = []
    timed = take_turns(
        {
            "a": Turn(lambda: calls.append("a"), documents=2, rounds=3, warm_up=True),
            "b": Turn(lambda: calls.append("b"), documents=1, rounds=1, warm_up=False),
        }
    )
    assert calls == ["a", "a", "b", "a", "a"]
    assert [len(timed[name].seconds) for name in "ab"] == [3, 1]


def test_a_ratio_is_the_median_of_paired_rounds() -> None:
    noisy, tree = Timed((2.0, 30.0, 4.0), 0), Timed((1.0, 10.0, 4.0), 0)
    assert noisy.times(tree) == 2 and tree.times(tree) == 1


def test_the_peak_counts_what_a_method_held_and_gave_back() -> None:
    def hold() -> None:
        torch.ones(1 << 26).mul_(2)  # 256 MB

    timed = take_turns({"hold": Turn(hold, documents=1, rounds=2, warm_up=False)})
    assert 0.8 * (1 << 28) < timed["hold"].peak_bytes < 1.3 * (1 << 28)


@needs_products
def test_the_rate_of_8_bit_products_is_their_own(make_network: Any) -> None:
    model = prepare(make_network("llama"))
    round_linear(model.network, "int8")
    assert matmul_flops(model) > 0


@takes_int8
def test_bench_measures_the_quantised_model_where_the_spec_asks_for_it(
    write_spec: Callable[..., Path], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(model={"path": str(model_folder), "dtype": "int8"})
    command = [str(spec), "--rounds", "1", "--tokens", "20"]
    assert call(app, [*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["rounded_to"] == "int8"
    assert call(app, command) == 0
    assert " with int8 products on cpu" in capsys.readouterr().out


def test_bench_measures_every_method_on_equally_long_documents(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(write_spec()), "--rounds", "2", "--tokens", "40"]
    assert call(app, [*command, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    methods = ["tree", "expand", "per_question", "per_label"]
    assert [row["method"] for row in measured["rows"]] == methods
    for row in measured["rows"]:
        assert row["workload"].startswith("40 tokens x 2 questions, 5 labels")
        assert row["seconds_per_document"] * row["docs_per_s"] == pytest.approx(1)
        assert row["tokens_per_s"] == pytest.approx(row["docs_per_s"] * row["document_tokens"])
        assert row["seconds_per_document"] > 0 and row["peak_bytes"] >= 0
        assert row["matmul_share"] > 0
        assert row["times_tree"] > 0
    assert measured["rows"][0]["times_tree"] == 1 and measured["matmul_flops"] > 0
    assert call(app, command) == 0
    assert "per_question" in capsys.readouterr().out


def test_a_spec_that_cannot_be_measured_is_refused_in_one_line(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(input={"path": str(write_spec().parent), "image": "picture"})
    assert call(app, [str(spec)]) == 2
    assert "input.image: bench cuts texts to equal length" in capsys.readouterr().err
