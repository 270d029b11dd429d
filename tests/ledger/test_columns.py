"""Answers out of a task's struct column: all labels, or the likeliest."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.ledger.columns import only, overlaid, probabilities, with_column

LABELS = ("b", "a", "not. so")
P = [{"a": 0.25, "b": 0.5, "not. so": 0.25}, None]


def test_p_is_read_by_name_and_no_answer_is_not_a_number() -> None:
    answers = pa.array([{"p": p, "status": s} for p, s in zip(P, ("ok", "empty"), strict=True)])
    np.testing.assert_array_equal(probabilities(answers, LABELS), [[0.5, 0.25, 0.25], [np.nan] * 3])


def test_what_the_likeliest_labels_leave_is_shared_by_the_others_if_there_are_any() -> None:
    top = [[{"label": "a", "p": 0.5}], [{"label": "a", "p": 0.7}, {"label": "b", "p": 0.2}], None]
    p = probabilities(pa.array([{"top": each} for each in top]), LABELS)
    np.testing.assert_allclose(p, [[0.25, 0.5, 0.25], [0.2, 0.7, 0.1], [np.nan] * 3])
    top = [{"label": label, "p": p} for label, p in zip("xy", (0.6, 0.40000004), strict=True)]
    p = probabilities(pa.array([{"top": top}]), ("x", "y"))
    np.testing.assert_allclose(p, [[0.6, 0.40000004]])


def test_answers_replace_the_rows_below_that_have_one() -> None:
    """The result has the columns of the rows below, in their order."""
    below = pa.array([{"label": "x", "p": 0.5}, {"label": None, "p": None}])
    above = pa.array([{"p": 0.25, "label": "y"}, None])
    assert overlaid(None, below) is below
    for answers in (
        above,
        only(with_column(above, "stage", pa.array([1, 2])), np.array([True, False])),
    ):
        merged = overlaid(answers, below)
        assert merged.type == below.type
        assert merged.to_pylist() == [{"label": "y", "p": 0.25}, {"label": None, "p": None}]
