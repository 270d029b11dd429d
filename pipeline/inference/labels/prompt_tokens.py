"""Text to token ids, so that a document can never become a control token.

Knows tokenizers, prompts as text and label verbalizers. Knows nothing of weights or attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from pipeline.errors import SpecError
from pipeline.inference.labels.label_tokens import (
    Verbalizers,
    collisions,
    encode,
    first_tokens,
    label_verbalizers,
    scores_whole_labels,
)
from pipeline.inference.labels.tokenizer import chat_template
from pipeline.inference.labels.trie import LabelTrie
from pipeline.spec.prompts import PromptText, prompt_text
from pipeline.spec.schema import PromptSpec, TaskSpec

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
    def suffixes(self) -> list[tuple[int, ...]]:
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
        verbalizers = [paths for i, paths in enumerate(self.trie.verbalizers) if i in kept]
        trie = LabelTrie.of(verbalizers, length_penalty=self.trie.length_penalty)
        return replace(self, labels=labels, trie=trie)

    @property
    def suffix_lengths(self) -> list[int]:
        """The tokens below a document of each prompt that would ask for this without a tree."""
        if self.trie is None:
            return [len(self.token_ids)]
        return [len(self.token_ids) + self.trie.depths[end] - 1 for end, _ in self.trie.ends]

    @property
    def longest_suffix(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.token_ids) + (self.trie.deepest if self.trie else 0)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The canonical prompt: `prefix + document + question`, concatenated token ids."""

    prefix: tuple[int, ...]
    questions: tuple[Question, ...]

    def room(self, context_tokens: int) -> int:
        """What a context leaves for a document beside the prefix and the longest question."""
        longest = max(question.longest_suffix for question in self.questions)
        return context_tokens - len(self.prefix) - longest


def tokenise_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptSpec, tasks: Sequence[TaskSpec]
) -> PromptTokens:
    """The spans around a document; SpecError where labels of a task cannot be told apart."""
    text = prompt_text(prompt, tasks, render=chat_template(tokenizer))
    verbalizers = [
        label_verbalizers(tokenizer, t, text.suffixes[t.name], text.answer_prefix) for t in tasks
    ]
    found = (
        collisions(place, task, of_task, tokenizer)
        for place, (task, of_task) in enumerate(zip(tasks, verbalizers, strict=True))
    )
    if problems := [problem for of_task in found for problem in of_task]:
        raise SpecError(problems)
    questions = [
        _question(task, encode(tokenizer, text.suffixes[task.name]), of_task)
        for task, of_task in zip(tasks, verbalizers, strict=True)
    ]
    return PromptTokens(
        prefix=(*_beginning(tokenizer, text), *encode(tokenizer, text.prefix)),
        questions=tuple(questions),
    )


def _question(task: TaskSpec, token_ids: Sequence[int], verbalizers: Verbalizers) -> Question:
    first = first_tokens(verbalizers)
    if not scores_whole_labels(task, verbalizers):
        return Question(task.name, tuple(token_ids), first)
    trie = LabelTrie.of(list(verbalizers.values()), length_penalty=task.length_penalty)
    return Question(task.name, tuple(token_ids), first, trie, task.beam)


def _beginning(tokenizer: PreTrainedTokenizerBase, text: PromptText) -> list[int]:
    """The token that begins every sequence, where the tokenizer adds one and no template does."""
    beginning = tokenizer.bos_token_id
    if beginning is None or tokenizer.chat_template:
        return []
    encoded = tokenizer("x")["input_ids"]
    return [beginning] if encoded[:1] == [beginning] else []
