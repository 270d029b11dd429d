"""Prompts to tokens: labels are where the model answers, and texts write no control tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from byte_tokenizer import CHAT_TEMPLATE, make_byte_tokenizer
from small_tokenizers import byte_pairs, pieces_of_words
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ModelError, SpecError
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer, chat_template
from pipeline.spec.schema import PromptSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec


def task(
    labels: dict[str, tuple[str, ...]], name: str = "t", question: str = "Q?", **more: Any
) -> TaskSpec:
    return QuestionTask(name=name, question=question, labels=labels, **more)


EXAMPLE = {"document": "a text", "question": "Q?", "answer": "Yes"}
YES_NO = task({"yes": ("Yes", "yes"), "no": ("No",)})


def plain_bytes(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_pairs(merges=merges))


USERS_TURN = "{{ messages[-1]['content'] }}"
SPACED = [("Ġ", "Y"), ("Ġ", "y"), ("Ġ", "N")]


@pytest.mark.parametrize(
    "tokenizer, template, question, pieces",
    [
        # — after a chat header; two texts that begin alike count once
        (make_byte_tokenizer(), CHAT_TEMPLATE, "Q?", {"yes": ["Y", "y"], "no": ["N"]}),
        (plain_bytes(*SPACED), None, "Q?", {"yes": ["ĠY", "Ġy"], "no": ["ĠN"]}),
        (pieces_of_words(), None, "that is it:", {"yes": ["▁Yes", "▁"], "no": ["▁No"]}),
        # — alone, "Yes" begins a text and becomes the piece with the space before it
        (pieces_of_words(), USERS_TURN + ":", "Q", {"yes": ["Y", "y"], "no": ["N"]}),
        # — an answer never takes back a token of the prompt
        (plain_bytes(("x", "Y")), USERS_TURN + "x", "Q?", {"yes": ["Y", "y"], "no": ["N"]}),
    ],
    ids=["chat header", "no template", "word pieces", "after a colon", "merges with the prompt"],
)
def test_a_label_is_tokenised_where_the_model_answers(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    question: str,
    pieces: dict[str, list[str]],
) -> None:
    tokenizer.chat_template = template
    labels = task({"yes": ("Yes", "Yeah", "yes"), "no": ("No",)}, question=question)
    prompt = tokenise_prompt(tokenizer, PromptSpec(instruction=""), [labels])
    for label, ids in prompt.questions[0].first_tokens.items():
        assert sorted(tokenizer.convert_ids_to_tokens(ids)) == sorted(pieces[label])


WRITES = "a <|im_end|> b"


@pytest.mark.parametrize(
    "place, prompt, asked",
    [
        ("prompt.system", {"system": WRITES}, YES_NO),
        ("prompt.instruction", {"instruction": WRITES}, YES_NO),
        ("prompt.document", {"document": "<|im_end|>{document}"}, YES_NO),
        *[
            (
                f"prompt.examples.1.{key}",
                {"examples": [EXAMPLE, {**EXAMPLE, key: WRITES}]},
                YES_NO,
            )
            for key in EXAMPLE
        ],
        ("tasks.1.question", {}, task({"yes": ("Yes",), "no": ("No",)}, "u", WRITES)),
        ("tasks.1.labels", {}, task({"yes": ("Yes",), "no": (WRITES,)}, "u")),
        (
            "tasks.1.question",
            {},
            task({"a": (WRITES,), "b": ("b",)}, "u", "Is it {label}?", kind="multi"),
        ),
    ],
)
def test_a_text_of_the_spec_that_writes_a_control_token_is_refused_by_its_place(
    place: str, prompt: dict[str, Any], asked: TaskSpec, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tasks = [task(YES_NO.labels, "s"), *asked.parts]
    with pytest.raises(SpecError) as refused:
        tokenise_prompt(byte_tokenizer, PromptSpec(**prompt), tasks)
    [problem] = refused.value.problems
    assert (problem.place, problem.value) == (place, "<|im_end|>")
    # — a classifier answers the first of all tasks, and the model the others
    all_tasks = [task(YES_NO.labels, "classified"), *tasks]
    with pytest.raises(SpecError) as refused:
        tokenise_prompt(byte_tokenizer, PromptSpec(**prompt), tasks, of=all_tasks)
    [problem] = refused.value.problems
    assert problem.place == place.replace("tasks.1.", "tasks.2.")


def test_what_follows_the_mark_of_the_answer_may_write_control_tokens(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = task({"yes": ("Yes",), "no": ("No",)}, question="Q?{answer}<|im_start|>")
    [question] = tokenise_prompt(byte_tokenizer, PromptSpec(), [asked]).questions
    assert question.token_ids[-1] == byte_tokenizer.convert_tokens_to_ids("<|im_start|>")


HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<tool_call>final"
    "<|im_end|>{% else %}<|im_end|>{% endif %}{{ m.content }}{% endfor %}<|im_start|>assistant"
)


@pytest.mark.parametrize(
    "template, begun",
    [
        (HARMONY, "<tool_call>final<|im_end|>"),  # as gpt-oss
        (CHAT_TEMPLATE + "<think>\n", "</think>"),  # as the distillations of DeepSeek R1
        (CHAT_TEMPLATE + "<thinking>", "</thinking>"),
        (CHAT_TEMPLATE + "<reasoning>\n\n", "</reasoning>"),
        (CHAT_TEMPLATE, ""),
        (CHAT_TEMPLATE + "<think>\n\n</think>\n\n", ""),  # as Qwen3
        (HARMONY.replace("<tool_call>final<|im_end|>", " "), ""),
        ("{{ messages[-1].content }}", ""),
        (CHAT_TEMPLATE + "{{ raise_exception('no') if messages | length > 2 }}", ""),
    ],
)
@pytest.mark.parametrize("kind", ["choice", "multi"])
def test_a_model_that_answers_behind_a_control_token_needs_the_beginning_of_an_answer(
    kind: str, template: str, begun: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    labels = {"yes": ("Yes",), "no": ("No",), "x": ("X",)}
    for question, refused in (("Is it?", bool(begun)), (f"Is it?{{answer}}{begun}It is", False)):
        parts = task(labels, question=question, kind=kind).parts
        if not refused:
            tokenise_prompt(tokenizer, PromptSpec(), parts)
            continue
        with pytest.raises(SpecError) as caught:
            tokenise_prompt(tokenizer, PromptSpec(), parts)
        [problem] = caught.value.problems
        assert problem.place == "tasks.0.question"
        assert problem.fix.endswith(f"end the question in {{answer}}{begun}Answer:")


def test_labels_of_the_same_tokens_are_refused_by_name(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folding = copy.deepcopy(byte_tokenizer)
    folding.backend_tokenizer.normalizer = normalizers.Lowercase()
    tasks = [
        YES_NO,
        task({"sport": ("Sport",), "science": ("SPORT", "Tech"), "art": ("Art",)}, "topic"),
        task({"a": ("x1", "y1"), "b": ("X1", "Y1")}, "other"),
    ]
    with pytest.raises(SpecError) as caught:
        tokenise_prompt(folding, PromptSpec(), tasks)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "tasks.1.labels: labels ['sport', 'science'] of 'topic' are the same tokens 'sport'; "
        "give them texts that differ (got {'sport': ['Sport'], 'science': ['SPORT', 'Tech']})"
    )
    assert [line.split(": ")[0] for line in lines] == ["tasks.1.labels"] + ["tasks.2.labels"] * 2


def test_labels_that_only_share_their_space_are_scored_whole_where_the_space_is_a_token() -> None:
    whole = tokenise_prompt(plain_bytes(), PromptSpec(), [YES_NO]).questions[0]
    assert whole.first_tokens == {"yes": [220], "no": [220]} and not whole.scores_first_tokens


@pytest.mark.parametrize("chat", [True, False])
def test_prefix_document_and_question_are_the_prompt(
    chat: bool, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer) if chat else plain_bytes(("Ġ", "Y"), ("Ġ", "N"))
    prompt_spec = PromptSpec(system="Be brief." if chat else None)
    tasks = [task({"yes": ("Yes",), "no": ("No",)}, n, q) for n, q in [("a", "A?"), ("b", "Bb?")]]
    prompt = tokenise_prompt(tokenizer, prompt_spec, tasks)
    document = DocumentTokenizer(tokenizer).encode("some <|im_end|> text")
    read = [
        tokenizer.decode([*prompt.prefix, *document, *question.token_ids])
        for question in prompt.questions
    ]
    turn = "Read the text, then answer the question.\n\nText:\nsome <|im_end|> text\n\n"
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" if chat else ""
    tail = "<|im_end|>\n<|im_start|>assistant\n" if chat else "\nAnswer:"
    assert read == [f"{head}{turn}{asked}{tail}" for asked in ("A?", "Bb?")]
    assert [question.name for question in prompt.questions] == ["a", "b"]
    if chat:  # the template's own control tokens are one token each
        start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        spans = (prompt.prefix, *(question.token_ids for question in prompt.questions))
        assert [(ids.count(start), ids.count(end)) for ids in spans] == [(2, 1), (1, 1), (1, 1)]


def test_a_tokenizer_that_begins_every_text_begins_the_prompt_too() -> None:
    backend = byte_pairs(merges=[("Ġ", "Y"), ("Ġ", "N")])
    backend.add_special_tokens(["<bos>"])
    added = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    plain = tokenise_prompt(added, PromptSpec(), [task({"y": ("Y",), "n": ("N",)})])
    assert plain.prefix[0] != added.bos_token_id
    backend.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", added.bos_token_id)]
    )
    begun = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    prompt = tokenise_prompt(begun, PromptSpec(), [task({"y": ("Y",), "n": ("N",)})])
    assert prompt.prefix == (added.bos_token_id, *plain.prefix)
    assert prompt.questions == plain.questions
    assert begun.bos_token_id not in DocumentTokenizer(begun).encode("text")


def test_a_context_leaves_room_for_the_longest_question_with_its_longest_label(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    short, long = ({"y": ("Y",), "n": ("N",)}, {"y": ("Y",), "n": ("Nine",)})
    tasks = [task(short, "a", "Longest?"), task(long, "b", "B?", length_penalty=0.5)]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    first, second = (len(question.token_ids) for question in prompt.questions)
    assert first - second == len("Longest?") - len("B?") == 6
    # — of a label, all tokens but the last are read
    assert prompt.room(4_096) == 4_096 - len(prompt.prefix) - first
    asked_in_full = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks[1:])
    assert asked_in_full.room(4_096) == 4_096 - len(prompt.prefix) - second - 3


@pytest.mark.parametrize(
    "printed, text",
    [
        ("date_string", "1 January 2025"),
        ("strftime_now('%d %B %Y')", "1 January 2025"),
        ("enable_thinking", "False"),
    ],
)
def test_a_template_that_prints_the_date_or_thinks_gives_the_same_prompt_every_day(
    printed: str, text: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = f"{{{{ {printed} }}}}|{{{{ messages[-1]['content'] }}}}"
    render = chat_template(tokenizer)
    assert render is not None
    assert render([{"role": "user", "content": "hello"}]) == f"{text}|hello"


def test_a_template_that_refuses_a_system_turn_is_a_problem_of_the_job(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    with pytest.raises((ModelError, SpecError), match="no system role"):
        tokenise_prompt(tokenizer, PromptSpec(system="s"), [YES_NO])
