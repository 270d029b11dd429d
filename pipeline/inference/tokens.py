"""Text to token ids, so that a document can never become a control token.

Knows tokenizers, prompts as text and label surfaces. Knows nothing of weights or attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, ModelError, SpecError
from pipeline.inference.label_tokens import (
    Forms,
    collisions,
    encode,
    first_tokens,
    label_forms,
    scores_whole_labels,
)
from pipeline.inference.label_trie import LabelTrie
from pipeline.prompts import Message, PromptText, Render, prompt_text
from pipeline.spec import PromptSpec, TaskSpec

# A template that prints today's date would make the prompt change overnight. It gets this one,
# by name or through the function that transformers offers, which the macro hides.
_DATE = "1 January 2025"
_DATELESS = f"{{%- macro strftime_now(format) -%}}{_DATE}{{%- endmacro -%}}"
# Turns that show what a chat template writes; their text is a private-use character, no token.
_PROBES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user",),
)
_TURN = "\ue0d2"
# A trie with more nodes is followed level by level: with all its rows at once, one document
# would take the memory of many.
MOST_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True)
class Question:
    """One task as the model sees it: what follows the document, and each label's first tokens."""

    name: str
    token_ids: tuple[int, ...]
    labels: Mapping[str, tuple[int, ...]]
    trie: LabelTrie | None = None  # where whole labels are scored, and not their first tokens
    beam: int | None = None  # paths of the trie that are followed at once; None: all

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """What is read below a document to score every label."""
        if self.trie is None:
            return [self.token_ids]
        return [(*self.token_ids, *self.trie.path(node)) for node in self.trie.inner]

    @property
    def searched(self) -> bool:
        """Whether its labels are too many to be read at once, or not all are asked for."""
        return self.trie is not None and (
            self.beam is not None or len(self.trie.inner) > MOST_AT_ONCE
        )

    def only(self, kept: Sequence[int]) -> Question:
        """The question with these of its labels, by their numbers."""
        labels = dict(each for i, each in enumerate(self.labels.items()) if i in kept)
        if self.trie is None:
            return replace(self, labels=labels)
        forms = [paths for i, paths in enumerate(self.trie.forms) if i in kept]
        trie = LabelTrie.of(forms, length_penalty=self.trie.length_penalty)
        return replace(self, labels=labels, trie=trie)

    @property
    def alone(self) -> list[int]:
        """The tokens below a document of each prompt that would ask for this without a tree."""
        if self.trie is None:
            return [len(self.token_ids)]
        return [len(self.token_ids) + self.trie.depths[end] - 1 for end, _ in self.trie.ends]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.token_ids) + (self.trie.deepest if self.trie else 0)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The canonical prompt: `opening + document + question`, concatenated token ids."""

    opening: tuple[int, ...]
    questions: tuple[Question, ...]

    def room(self, context_tokens: int) -> int:
        """What a context leaves for a document beside the opening and the longest question."""
        longest = max(question.longest for question in self.questions)
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
    """Special tokens, and added tokens that the chat template writes or the tokenizer declares.

    Not the unknown token: it stands for letters, and steers nothing. Nor whitespace that is not
    special, as Gemma's runs of line breaks: templates write it as the text that it is.
    """
    written = _written(tokenizer)
    # — only newer versions of transformers know of it
    declared = getattr(tokenizer, "chat_control_tokens", None) or ()
    added = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or token.content in declared
        or (token.content in written and not token.content.isspace())
    }
    return frozenset(added.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


def _written(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that the chat template may write around a turn: its source, and what it renders.

    Some build a marker of pieces, `'<|' + message['role'] + '|>'`, and no source holds it. Some
    refuse a role, or write a system turn only where there is none.
    """
    render = chat_template(tokenizer)
    if render is None:
        return ""
    found = [tokenizer.chat_template]
    if isinstance(found[0], dict):  # also of the others: the model knows their markers
        found = list(found[0].values())
    for roles in _PROBES:
        with suppress(ModelError):
            found.append(render([{"role": role, "content": _TURN} for role in roles]))
    return "\0".join(found)


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
    template = _template(tokenizer)
    if template is None:
        return None

    def render(messages: Sequence[Message]) -> str:
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=_DATELESS + template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string=_DATE,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"the model's chat template refuses the prompt: {error}") from error
        assert isinstance(text, str), f"chat template gave {type(text).__name__}"
        return text

    return render


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template's source; of several the default, and ModelError where none is."""
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        names = sorted(tokenizer.chat_template)
        raise ModelError(
            f"the model's tokenizer has chat templates {names} and no default; name one 'default'"
        ) from error


def tokenise_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptSpec, tasks: Sequence[TaskSpec]
) -> PromptTokens:
    """The spans around a document; SpecError where labels of a task cannot be told apart."""
    text = prompt_text(prompt, tasks, render=chat_template(tokenizer))
    forms = [label_forms(tokenizer, t, text.closings[t.name], text.answer_prefix) for t in tasks]
    found = (
        collisions(place, task, of_task, tokenizer)
        for place, (task, of_task) in enumerate(zip(tasks, forms, strict=True))
    )
    if problems := [problem for of_task in found for problem in of_task]:
        raise SpecError(problems)
    questions = [
        _question(task, encode(tokenizer, text.closings[task.name]), of_task)
        for task, of_task in zip(tasks, forms, strict=True)
    ]
    return PromptTokens(
        opening=(*_beginning(tokenizer, text), *encode(tokenizer, text.opening)),
        questions=tuple(questions),
    )


def _question(task: TaskSpec, token_ids: Sequence[int], forms: Forms) -> Question:
    first = first_tokens(forms)
    if not scores_whole_labels(task, forms):
        return Question(task.name, tuple(token_ids), first)
    trie = LabelTrie.of(list(forms.values()), length_penalty=task.length_penalty)
    return Question(task.name, tuple(token_ids), first, trie, task.beam)


def _beginning(tokenizer: PreTrainedTokenizerBase, text: PromptText) -> list[int]:
    """The token that begins every sequence, where the tokenizer adds one and no template does."""
    beginning = tokenizer.bos_token_id
    if beginning is None or tokenizer.chat_template:
        return []
    encoded = tokenizer("x")["input_ids"]
    return [beginning] if encoded[:1] == [beginning] else []
