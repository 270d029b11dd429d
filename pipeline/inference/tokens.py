"""Text to token ids, so that a document can never become a control token.

Knows tokenizers, prompts as text and label surfaces. Knows nothing of weights or attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, ModelError, Problem, SpecError
from pipeline.prompts import Message, PromptText, Render, prompt_text
from pipeline.spec import PromptSpec, TaskSpec

# A template that prints today's date would make the prompt change overnight. It gets this one,
# by name or through the function that transformers offers, which the macro hides.
_DATE = "1 January 2025"
_DATELESS = f"{{%- macro strftime_now(format) -%}}{_DATE}{{%- endmacro -%}}"


@dataclass(frozen=True, slots=True)
class Question:
    """One task as the model sees it: what follows the document, and each label's first tokens."""

    name: str
    token_ids: tuple[int, ...]
    labels: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The canonical prompt: `opening + document + question`, concatenated token ids."""

    opening: tuple[int, ...]
    questions: tuple[Question, ...]

    def room(self, context_tokens: int) -> int:
        """What a context leaves for a document beside the opening and the longest question."""
        longest = max(len(question.token_ids) for question in self.questions)
        return context_tokens - len(self.opening) - longest


class DocumentTokenizer:
    """Encodes document text with a tokenizer that has lost its control tokens.

    `split_special_tokens=True` is not enough: it leaves added tokens that are not marked special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.control_ids = control_ids(tokenizer)
        self._backend = _without(_backend(tokenizer), self.control_ids)

    def encode(self, text: str) -> list[int]:
        """The text's token ids; DocumentError rather than a control token among them."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        forbidden = self.control_ids.intersection(ids)
        if forbidden:
            raise DocumentError(f"its text encodes to control tokens {sorted(forbidden)}")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens, and added tokens that the chat template writes.

    Not the unknown token: it stands for letters, and steers nothing.
    """
    template = str(tokenizer.chat_template or "")
    added = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in template
    }
    return frozenset(added.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__} has no tokenizer.json; save the model's fast tokenizer"
        )
    return backend


def _without(backend: Tokenizer, forbidden: frozenset[int]) -> Tokenizer:
    """A copy that cannot produce the forbidden ids from text.

    A forbidden piece keeps its place under a name that no text contains: ids are given by place.
    """
    content: dict[str, Any] = json.loads(backend.to_str())
    content.update(post_processor=None, truncation=None, padding=None)
    content["added_tokens"] = [
        {**token, "content": _unwritable(token["id"]), "special": False, "normalized": False}
        if token["id"] in forbidden
        else token
        for token in content["added_tokens"]
    ]
    model = content["model"]
    pieces = {backend.id_to_token(token_id) for token_id in forbidden}
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {
            _unwritable(token_id) if token_id in forbidden else piece: token_id
            for piece, token_id in model["vocab"].items()
        }
        if "merges" in model:
            model["merges"] = [m for m in model["merges"] if not _builds(m, pieces)]
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [
            [_unwritable(i) if i in forbidden else piece, score]
            for i, (piece, score) in enumerate(model["vocab"])
        ]
    return Tokenizer.from_str(json.dumps(content))


def _builds(merge: str | list[str], pieces: set[str | None]) -> bool:
    """Whether a merge makes one of the pieces, or needs one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return not pieces.isdisjoint((left, right, left + right))


def _unwritable(token_id: int) -> str:
    """A piece that no text contains: noncharacters are not valid in interchange."""
    return f"\ufdd0{token_id}\ufdd1"


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Render | None:
    """The tokenizer's chat template as a function, the same every day; None if it has none."""
    if not tokenizer.chat_template:
        return None

    def render(messages: Sequence[Message]) -> str:
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=_DATELESS + tokenizer.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string=_DATE,
            )
        except TemplateError as error:
            raise ModelError(f"the model's chat template refuses the prompt: {error}") from error
        assert isinstance(text, str), f"chat template gave {type(text).__name__}"
        return text

    return render


def tokenise_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptSpec, tasks: Sequence[TaskSpec]
) -> PromptTokens:
    """The spans around a document; SpecError where labels of a task cannot be told apart."""
    text = prompt_text(prompt, tasks, render=chat_template(tokenizer))
    questions = [_question(tokenizer, task, text) for task in tasks]
    collisions = [
        problem
        for place, (task, question) in enumerate(zip(tasks, questions, strict=True))
        for problem in _collisions(place, task, question, tokenizer)
    ]
    if collisions:
        raise SpecError(collisions)
    return PromptTokens(
        opening=(*_beginning(tokenizer, text), *_encode(tokenizer, text.opening)),
        questions=tuple(questions),
    )


def _question(tokenizer: PreTrainedTokenizerBase, task: TaskSpec, text: PromptText) -> Question:
    closing = text.closings[task.name]
    token_ids = tuple(_encode(tokenizer, closing))
    if task.readout is not None:  # its maps know the labels, in the card's order
        return Question(task.name, token_ids, dict.fromkeys(task.labels, ()))
    labels = {
        label: tuple(
            sorted(
                {
                    _first_token(tokenizer, closing, token_ids, text.answer_prefix + surface)
                    for surface in surfaces
                }
            )
        )
        for label, surfaces in task.labels.items()
    }
    return Question(task.name, token_ids, labels)


def _first_token(
    tokenizer: PreTrainedTokenizerBase, closing: str, token_ids: tuple[int, ...], answer: str
) -> int:
    """The token that begins `answer` right behind `closing`, as the tokenizer sees it there."""
    together = _encode(tokenizer, closing + answer)
    if tuple(together[: len(token_ids)]) == token_ids and len(together) > len(token_ids):
        return together[len(token_ids)]
    return _encode(tokenizer, answer)[0]


def _collisions(
    place: int, task: TaskSpec, question: Question, tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    owners: dict[int, list[str]] = {}
    for label, token_ids in question.labels.items():
        for token_id in token_ids:
            owners.setdefault(token_id, []).append(label)
    return [
        Problem(
            f"tasks.{place}.labels",
            f"labels {labels} of {task.name!r} begin with the same token "
            f"{tokenizer.decode([token_id])!r}; give them surface forms that begin differently",
            {label: list(task.labels[label]) for label in labels},
        )
        for token_id, labels in owners.items()
        if len(labels) > 1
    ]


def _beginning(tokenizer: PreTrainedTokenizerBase, text: PromptText) -> list[int]:
    """The token that begins every sequence, where the tokenizer adds one and no template does."""
    beginning = tokenizer.bos_token_id
    if beginning is None or tokenizer.chat_template:
        return []
    encoded = tokenizer("x")["input_ids"]
    return [beginning] if encoded[:1] == [beginning] else []


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)
