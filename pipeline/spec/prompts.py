"""The text around a document: one prompt as a tree of three spans.

    prefix            system prompt, examples, instruction: the same for every document
      └─ document      its text, which this module does not have
           └─ suffix  what follows it: the question and the answer position, one per task

Entry points: `prompt_text`, to which a chat template is passed as a function, and `messages` for
a server that applies its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import ModelError
from pipeline.spec.labels import ANSWER
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]

# Private-use characters, which neither templates nor texts contain.
_DOCUMENT = "\ue0d0document\ue0d1"
_QUESTION = "\ue0d0question\ue0d1"


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text before a document, and by task name what follows it."""

    prefix: str
    suffixes: Mapping[str, str]  # up to a label; without a question, of an empty one
    before_labels: Mapping[str, str]  # " " after "Answer:" or a begun answer without one, else ""


def prompt_text(
    prompt: PromptSpec, tasks: Sequence[TaskSpec], *, render: Render | None
) -> PromptText:
    """The prompt of every task; `render` is the tokenizer's chat template, if it has one."""
    prefix, suffix = _split((render or _plain)(messages(prompt, _DOCUMENT, _QUESTION)), _DOCUMENT)
    before_question, after_question = _split(suffix, _QUESTION)
    space = " " if render is None else ""
    suffixes, before_labels = {}, {}
    for task in tasks:
        question, _, begun = (task.question or "").partition(ANSWER)
        begun = space + begun if begun else ""
        suffixes[task.name] = before_question + question + after_question + begun
        before = " " if begun else space
        before_labels[task.name] = "" if begun[-1:].isspace() else before
    return PromptText(prefix, suffixes, before_labels)


def messages(prompt: PromptSpec, document: str, question: str) -> list[Message]:
    """The turns of a chat about a document, up to the one with the question."""
    turns: list[Message] = []
    if prompt.system is not None:
        turns.append({"role": "system", "content": prompt.system})
    for example in prompt.examples:
        user = _user_turn(prompt, example.document, example.question)
        turns.append({"role": "user", "content": user})
        turns.append({"role": "assistant", "content": example.answer})
    turns.append({"role": "user", "content": _user_turn(prompt, document, question)})
    return turns


def _plain(messages: Sequence[Message]) -> str:
    """The turns without a chat template: paragraphs, and `Answer:` after each of the user's."""
    forms = {"system": "{}\n\n", "user": "{}\nAnswer:", "assistant": " {}\n\n"}
    return "".join(forms[message["role"]].format(message["content"]) for message in messages)


def _user_turn(prompt: PromptSpec, document: str, question: str) -> str:
    parts = [prompt.instruction, prompt.document.replace("{document}", document), question]
    return "\n\n".join(part for part in parts if part)


def _split(text: str, mark: str) -> tuple[str, str]:
    before, separator, after = text.partition(mark)
    if not separator or mark in after:
        raise ModelError(
            f"the model's chat template shows the user's turn {text.count(mark)} times instead of "
            "once; use a model with a plain chat template"
        )
    return before, after
