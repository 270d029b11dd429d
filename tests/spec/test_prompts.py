"""The text of a prompt: the text before the document, the text after it, and how templates fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.errors import ModelError
from pipeline.spec.prompts import Message, PromptText, Render, prompt_text
from pipeline.spec.schema import Example, PromptSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

EXAMPLES = (
    Example(document="It rains.", question="Wet?", answer="Yes"),
    Example(document="Sun {document}.", question="Wet?", answer="No"),
)


def task(name: str, question: str) -> TaskSpec:
    return QuestionTask(name=name, question=question, labels={"yes": ("Yes",), "no": ("No",)})


TASKS = (task("first", "Is it good?"), task("second", "Is it {document}, or\n\nbad?"))


def chat(messages: Sequence[Message]) -> str:
    turns = "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages)
    return f"{turns}<assistant>"


def written(text: PromptText, document: str) -> list[str]:
    """The whole prompt of every task, as the model would see it."""
    return [text.prefix + document + suffix for suffix in text.suffixes.values()]


def whole_chat(prompt: PromptSpec, document: str, question: str) -> str:
    """The oracle: the messages written out with the document in its place from the start."""
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    turns = [(e.document, e.question, e.answer) for e in prompt.examples]
    messages: list[Message] = [*system]
    for doc, asked, answer in [*turns, (document, question, "")]:
        shown = prompt.document.replace("{document}", doc)
        content = "\n\n".join(part for part in (prompt.instruction, shown, asked) if part)
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return chat(messages[:-1])


@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("examples", [(), EXAMPLES])
@pytest.mark.parametrize("instruction", ["", "Read."])
@pytest.mark.parametrize("template", ["{document}", "Text:\n{document}", "<{document}>\nEnd"])
def test_the_spans_around_a_document_make_the_conversation_with_it(
    system: str | None, examples: tuple[Example, ...], instruction: str, template: str
) -> None:
    prompt = PromptSpec(
        system=system, examples=examples, instruction=instruction, document=template
    )
    document = "Any {document} text,\n\nwith <user> in it."
    text = prompt_text(prompt, TASKS, render=chat)
    assert written(text, document) == [whole_chat(prompt, document, t.question) for t in TASKS]
    assert list(text.suffixes) == ["first", "second"]
    assert set(text.before_labels.values()) == {""}


def test_without_a_template_the_prompt_is_paragraphs_that_end_in_answer() -> None:
    prompt = PromptSpec(system="Be brief.", instruction="Read.", examples=EXAMPLES[:1])
    text = prompt_text(prompt, TASKS[:1], render=None)
    assert written(text, "DOC") == [
        "Be brief.\n\n"
        "Read.\n\nText:\nIt rains.\n\nWet?\nAnswer: Yes\n\n"
        "Read.\n\nText:\nDOC\n\nIs it good?\nAnswer:"
    ]
    assert text.before_labels == {"first": " "}


@pytest.mark.parametrize(
    ("render", "suffix"),
    [(None, "\n\nWhich?\nAnswer: law:"), (chat, "\n\nWhich?</user><assistant>law:")],
)
def test_an_answer_that_the_question_begins_is_followed_by_a_space(
    render: Render | None, suffix: str
) -> None:
    text = prompt_text(PromptSpec(), [task("first", "Which?{answer}law:")], render=render)
    assert (text.suffixes["first"], text.before_labels["first"]) == (suffix, " ")


@pytest.mark.parametrize("begun", ["clutter: ", "clutter:\n", " "])
@pytest.mark.parametrize("render", [None, chat])
def test_a_begun_answer_that_ends_in_a_space_gets_no_second_one(
    begun: str, render: Render | None
) -> None:
    text = prompt_text(PromptSpec(), [task("first", "Which?{answer}" + begun)], render=render)
    assert text.suffixes["first"].endswith(begun) and text.before_labels["first"] == ""


@pytest.mark.parametrize("render", [None, chat])
def test_the_prefix_is_the_same_whatever_is_asked(render: Render | None) -> None:
    prompt = PromptSpec(system="s", examples=EXAMPLES)
    both = prompt_text(prompt, TASKS, render=render)
    alone = prompt_text(prompt, TASKS[1:], render=render)
    assert alone.prefix == both.prefix
    assert alone.suffixes["second"] == both.suffixes["second"]


def test_a_template_that_trims_white_space_changes_nothing() -> None:
    def trimmed(messages: Sequence[Message]) -> str:
        return chat([{**m, "content": m["content"].strip()} for m in messages])

    prompt = PromptSpec()
    assert prompt_text(prompt, TASKS, render=trimmed) == prompt_text(prompt, TASKS, render=chat)


def _cut(messages: Sequence[Message]) -> str:
    return chat([{**m, "content": m["content"][:45]} for m in messages])


def _twice(messages: Sequence[Message]) -> str:
    return chat([*messages, *messages])


def _without_users(messages: Sequence[Message]) -> str:
    return chat([m for m in messages if m["role"] != "user"])


def _backwards(messages: Sequence[Message]) -> str:
    return chat([{**m, "content": "\n\n".join(m["content"].split("\n\n")[::-1])} for m in messages])


@pytest.mark.parametrize("render", [_cut, _twice, _without_users, _backwards, lambda _: ""])
def test_a_template_that_does_not_show_the_turn_once_is_refused(render: Render) -> None:
    with pytest.raises(ModelError, match="chat template shows the user's turn"):
        prompt_text(PromptSpec(), TASKS, render=render)
