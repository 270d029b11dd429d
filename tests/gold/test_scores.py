"""Scores of a label: the soft targets of a gold file's numbers, and an error for what is none."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judged import with_gold

from pipeline.errors import SpecError
from pipeline.gold.labels import read_gold
from pipeline.gold.values import UNLABELLED
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec

RUDE = {"name": "toxic", "question": "Rude?", "labels": ["clean", "toxic"]}
TONE = {"name": "tone", "question": "Which?", "labels": ["warm", "cold"]}
TOPIC = {"name": "topic", "question": "What?", "labels": ["art", "law", "sport"]}


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> JobSpec:
    return load_spec(write_spec(tasks=[RUDE, TONE, TOPIC]))


def csv_file(folder: Path, *lines: str) -> str:
    file = folder / "scores.csv"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_a_score_is_the_probability_of_the_label_that_it_names(
    spec: JobSpec, tmp_path: Path
) -> None:
    file = csv_file(
        tmp_path, "id,TOXICITY,COLD", "a,0.9,0.2", "b,.25,1", "c,1e-3,", "d,,0", "e,.5,.5"
    )
    gold = read_gold(file, with_gold(spec, scores={"toxic": "TOXICITY", "tone.warm": "COLD"}))
    assert list(gold.tasks) == ["toxic", "tone"]
    toxic, tone = gold.tasks["toxic"], gold.tasks["tone"]
    assert toxic.soft is not None and tone.soft is not None
    nan = [np.nan, np.nan]
    expected = [[0.1, 0.9], [0.75, 0.25], [0.999, 0.001], nan, [0.5, 0.5]]
    np.testing.assert_allclose(toxic.soft, expected, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(tone.soft, [[0.2, 0.8], [1, 0], nan, [0, 1], [0.5, 0.5]])
    # — at one half the label is the first, as in an answer
    assert toxic.truth.tolist() == [1, 0, 0, UNLABELLED, 0]
    assert tone.truth.tolist() == [1, 0, UNLABELLED, 1, 0]
    assert (toxic.scored, tone.scored, gold.kind("tone")) == ("toxic", "warm", "scores")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0.5, 1.0, None], pa.float32()),
        pa.array([0.5, 1.0, float("nan")]),
        pa.array([Decimal("0.50"), Decimal("1.00"), None]),
        pa.array(["0.5", "1", ""]),
    ],
)
def test_the_type_of_the_column_does_not_matter(
    values: pa.Array, spec: JobSpec, tmp_path: Path
) -> None:
    """NaN is a missing value, as it is in a column of labels."""
    file = tmp_path / "scores.parquet"
    pq.write_table(pa.table({"id": ["a", "b", "c"], "score": values}), file)
    toxic = read_gold(str(file), with_gold(spec, scores={"toxic": "score"})).tasks["toxic"]
    assert toxic.soft is not None
    np.testing.assert_array_equal(toxic.soft[:, 1], [0.5, 1, np.nan])


def test_scores_of_one_document_are_averaged_and_contradict_nothing(
    spec: JobSpec, tmp_path: Path
) -> None:
    lines = ["a,0.9,art", "b,0.1,law", "a,0.2,", "b,,law", "a,0.1,", "c,,art"]
    gold = read_gold(
        csv_file(tmp_path, "id,s,topic", *lines), with_gold(spec, scores={"toxic": "s"})
    )
    assert (gold.keys, gold.counts.repeated, gold.counts.contradictory) == (("a", "b", "c"), 3, 0)
    toxic = gold.tasks["toxic"]
    assert toxic.soft is not None
    np.testing.assert_allclose(toxic.soft[:, 1], [0.4, 0.1, np.nan], rtol=1e-15)
    assert toxic.truth.tolist() == [0, 0, UNLABELLED]
    assert gold.tasks["topic"].truth.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("value", "rows"), [("NaN", 1), ("1.01", 1), ("-0.1", 2), ("high", 3), ("1_0", 1), ("inf", 1)]
)
def test_a_value_that_is_no_score_names_row_column_value_and_fix(
    value: str, rows: int, spec: JobSpec, tmp_path: Path
) -> None:
    file = csv_file(tmp_path, "id,s", "a,0.5", *(f"b{n},{value}" for n in range(rows)))
    with pytest.raises(SpecError) as refused:
        read_gold(file, with_gold(spec, scores={"toxic": "s"}))
    (problem,) = refused.value.problems
    assert (problem.place, problem.value) == (f"{file}, row 2, column s", value)
    assert f"(such rows: {rows})" in problem.fix


@pytest.mark.parametrize("value", ["true", "[0.5]", '{"value": 0.5}'])
def test_a_value_of_json_that_is_no_number_is_refused(
    value: str, spec: JobSpec, tmp_path: Path
) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text(f'{{"id": "a", "s": {value}}}\n')
    with pytest.raises(SpecError, match="row 1, column s: is not a number from 0 to 1"):
        read_gold(str(file), with_gold(spec, scores={"toxic": "s"}))


@pytest.mark.parametrize(
    ("gold", "place", "fix"),
    [
        ({"scores": {"rude": "s"}}, "scores.rude", "toxic, tone, topic"),
        ({"scores": {"topic": "s"}}, "scores.topic", "two labels"),
        ({"scores": {"tone": "s"}}, "scores.tone", "write tone.warm: s or tone.cold: s"),
        ({"scores": {"toxic.Toxic": "s"}}, "scores.toxic.Toxic", "toxic.clean: s or toxic.toxic"),
        ({"scores": {"toxic": "s", "toxic.clean": "t"}}, "scores.toxic.clean", "in column s"),
        ({"scores": {"toxic": "s"}, "columns": {"toxic": "t"}}, "scores.toxic", "of labels, t"),
        ({"columns": {"rude": "s"}}, "columns.rude", "the spec has toxic, tone, topic"),
        ({"values": {"1": "rude"}}, "values.1", "no task has such a label"),
        ({"values": {"1": ["art", "law"]}}, "values.1", "means 2 labels of one task"),
    ],
)
def test_gold_of_the_spec_that_is_not_clear_is_an_error_in_one_line(
    gold: dict[str, Any], place: str, fix: str, spec: JobSpec
) -> None:
    with pytest.raises(SpecError) as refused:
        with_gold(spec, **gold)
    (problem,) = refused.value.problems
    assert problem.place == f"gold.{place}" and fix in problem.fix


def test_scores_are_in_a_column_of_a_file(spec: JobSpec, tmp_path: Path) -> None:
    file = csv_file(tmp_path, "id,s,t", "a,0.5,toxic")
    with pytest.raises(SpecError, match=r"gold.scores: .* it has id, s, t \(got 'S'\)"):
        read_gold(file, with_gold(spec, scores={"toxic": "S"}))
    with pytest.raises(SpecError, match=r"are read without gold\.scores"):
        read_gold(str(tmp_path), with_gold(spec, scores={"toxic": "s"}))


def test_one_value_may_mean_a_label_of_each_task(spec: JobSpec, tmp_path: Path) -> None:
    file = csv_file(tmp_path, "id,toxic,tone", "a,1,0", "b,0,1")
    gold = read_gold(file, with_gold(spec, values={1: ["toxic", "warm"], 0: ["clean", "cold"]}))
    assert gold.tasks["toxic"].truth.tolist() == gold.tasks["tone"].truth.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("column", "written"), [("toxic", "toxic: toxic"), ("tone", "tone.LABEL: tone")]
)
def test_numbers_in_a_column_of_labels_propose_the_key(
    column: str, written: str, spec: JobSpec, tmp_path: Path
) -> None:
    file = csv_file(tmp_path, f"id,{column}", "a,0.93", "b,0", "c,")
    with pytest.raises(SpecError) as refused:
        read_gold(file, spec)
    (problem,) = refused.value.problems
    assert problem.place == file and problem.fix.endswith(f"write {written} below gold.scores")


def test_zeros_and_ones_may_be_labels_with_other_names(spec: JobSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="write 1: LABEL below"):
        read_gold(csv_file(tmp_path, "id,toxic", "a,1", "b,0"), spec)
