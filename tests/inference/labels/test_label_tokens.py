"""A label's first token may say little about the label."""

from __future__ import annotations

import pytest

from pipeline.inference.labels.label_tokens import is_fragment


@pytest.mark.parametrize(
    ("token", "verbalizers", "little"),
    [
        (" s", ["sports"], True),
        ("s", ["sports"], True),
        (" po", ["politics", "policy"], True),
        (" ", ["sports"], True),
        ("1", ["10"], True),
        (" pol", ["politics"], False),
        (" sports", ["sports"], False),
        (" no", ["no", "nope"], False),  # the whole of one text
        (" A", ["A", "B"], False),
        ("sci", ["sci-fi"], False),
        ("体", ["体育"], False),
        ("�", ["é"], False),
    ],
)
def test_a_token_of_two_letters_that_ends_inside_a_word_says_little(
    token: str, verbalizers: list[str], little: bool
) -> None:
    assert is_fragment(token, verbalizers) == little
