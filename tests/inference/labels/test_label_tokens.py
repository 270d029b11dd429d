"""Which labels are scored in full, what they cost, and which are refused."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.errors import SpecError
from pipeline.inference.labels.label_tokens import is_fragment
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.spec.schema import PromptSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

TOPICS = ["财经", "政治", "娱乐", "体育", "军事", "科技", "农业民生", "能源", "汽车", "创新设计"]
COUNTRIES = ["英国", "中国", "法国", "日本", "美国", "印度"]
ANSWERS = {"是": ("是", "是的", "对"), "否": ("否", "不")}


def task(name: str, labels: object, **more: object) -> TaskSpec:
    return QuestionTask.model_validate(
        {"name": name, "question": f"{name}?", "labels": labels, **more}
    )


@pytest.mark.parametrize(
    ("labels", "more", "full"),
    [
        (TOPICS, {}, True),
        (COUNTRIES, {}, True),
        (ANSWERS, {}, True),
        (["art", "law", "sport"], {}, False),  # differ at once: first tokens
        (["art", "law", "sport"], {"length_penalty": 0.5}, True),
        (["art", "law", "sport"], {"beam": 2}, True),
    ],
)
def test_labels_are_scored_in_full_where_they_begin_alike_or_that_is_asked_for(
    labels: object, more: dict[str, object], full: bool, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    [question] = tokenise_prompt(
        byte_tokenizer, PromptSpec(), [task("t", labels, **more)]
    ).questions
    assert question.scores_first_tokens == (not full)
    texts = labels.values() if isinstance(labels, dict) else [[text] for text in labels]  # type: ignore[attr-defined]
    for scored, own in zip(question.trie.verbalizers, texts, strict=True):
        paths = {tuple(byte_tokenizer(text)["input_ids"]) for text in own}
        kept = {path if full else path[:1] for path in paths}
        # — a text that continues another of its label is left out
        assert {*scored} == {p for p in kept if not any(p != q and p[: len(q)] == q for q in kept)}


def test_a_label_that_begins_another_is_refused_by_name(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    labels = {"C": ["C"], "C++": ["C++", "Cpp"], "Java": ["Java"]}
    with pytest.raises(SpecError, match=r"label 'C' of 'lang' begins label 'C\+\+'") as caught:
        tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", labels)])
    assert len(str(caught.value).splitlines()) == 1
    distinct = {**labels, "C": ["plain C"]}
    tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", distinct)])
    tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", labels, length_penalty=1.0)])


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
def test_a_token_of_two_letters_that_ends_inside_a_word_is_ambiguous(
    token: str, verbalizers: list[str], little: bool
) -> None:
    assert is_fragment(token, verbalizers) == little
