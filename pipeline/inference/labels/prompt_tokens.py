"""The prompt as token ids: a prefix, and for each task what follows the document.

Entry point: `tokenise_prompt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from pipeline.errors import Problem, SpecError
from pipeline.inference.labels.label_tokens import (
    Verbalizers,
    collisions,
    label_verbalizers,
    scored_paths,
)
from pipeline.inference.labels.tokenizer import (
    begun_answer,
    chat_template,
    control_texts,
    encode,
)
from pipeline.inference.labels.trie import LabelTrie
from pipeline.spec.labels import ANSWER, task_of
from pipeline.spec.prompts import prompt_text
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

# A trie with more inner nodes is searched level by level: all of its rows in one forward would
# take as much memory for one document as many documents do.
MAX_NODES_AT_ONCE = 1_024


@dataclass(frozen=True)
class Question:
    """One task as the model reads it: what follows the document, and the tokens of its labels."""

    name: str
    token_ids: tuple[int, ...]
    # The tokens of each verbalizer that are scored; no verbalizers where a trained readout answers.
    labels: Verbalizers
    beam: int | None = None  # paths of the trie that are followed at once; None: all
    length_penalty: float = 0.0

    @cached_property
    def trie(self) -> LabelTrie:
        """The tokens that are scored; of depth 1 for first tokens."""
        return LabelTrie.of(list(self.labels.values()), length_penalty=self.length_penalty)

    @property
    def suffixes(self) -> list[tuple[int, ...]]:
        """The token sequences that are read below a document to score every label."""
        return [(*self.token_ids, *self.trie.path(node)) for node in self.trie.inner]

    @property
    def first_tokens(self) -> dict[str, list[int]]:
        """By label, the tokens that an answer may begin with."""
        return {label: sorted({path[0] for path in paths}) for label, paths in self.labels.items()}

    @property
    def scores_first_tokens(self) -> bool:
        """Whether no label has a second token that is scored."""
        return max(self.trie.depths) <= 1

    @property
    def searched(self) -> bool:
        """Whether its trie is too large to be read at once, or has a beam."""
        return self.beam is not None or len(self.trie.inner) > MAX_NODES_AT_ONCE

    def only(self, kept: Sequence[int]) -> Question:
        """The question with these of its labels, by number."""
        labels = dict(each for i, each in enumerate(self.labels.items()) if i in kept)
        return replace(self, labels=labels)

    @property
    def longest_suffix(self) -> int:
        """The most tokens below the document in a prompt that scores one of the labels."""
        label_tokens = max(1, max(self.trie.depths))
        return len(self.token_ids) + label_tokens - 1  # a label's last token is not read


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The canonical prompt: the token ids of `prefix + document + question`."""

    prefix: tuple[int, ...]
    questions: tuple[Question, ...]

    def room(self, context_tokens: int) -> int:
        """How many tokens of a context are left for the document, with the longest question."""
        longest = max(question.longest_suffix for question in self.questions)
        return context_tokens - len(self.prefix) - longest


def tokenise_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: PromptSpec,
    tasks: Sequence[TaskSpec],
    *,
    of: Sequence[TaskSpec] = (),
) -> PromptTokens:
    """The spans around a document. Errors name the places of the tasks among all, `of`.

    SpecError if labels of a task have the same tokens, or if a text of the spec writes a control
    token elsewhere than after `{answer}`.
    """
    # — a task of the spec may be several here, named `TASK.LABEL`
    in_spec = [*dict.fromkeys(task_of(task.name) for task in (*of, *tasks))]
    places = [in_spec.index(task_of(task.name)) for task in tasks]
    problems = _written_controls(tokenizer, prompt, zip(places, tasks, strict=True))
    render = chat_template(tokenizer)
    text = prompt_text(prompt, tasks, render=render)
    begun = begun_answer(tokenizer, render) if render else ""
    questions = []
    for place, task in zip(places, tasks, strict=True):
        suffix = text.suffixes[task.name]
        verbalizers = label_verbalizers(tokenizer, task, suffix, text.before_labels[task.name])
        asked, at = task.question or ANSWER, f"tasks.{place}.question"
        if begun and task.readout is None and ANSWER not in asked:
            fix = f"the model answers behind {begun!r}; end the question in {ANSWER}{begun}Answer:"
            if all(problem.place != at for problem in problems):
                problems.append(Problem(at, fix, task.question))
        scored = scored_paths(task, verbalizers)
        problems += collisions(place, task, scored, tokenizer)
        token_ids = tuple(encode(tokenizer, suffix))
        questions.append(Question(task.name, token_ids, scored, task.beam, task.length_penalty))
    if problems:
        raise SpecError(problems)
    return PromptTokens(_prefix(tokenizer, text.prefix), tuple(questions))


def _written_controls(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptSpec, tasks: Iterable[tuple[int, TaskSpec]]
) -> list[Problem]:
    """Each text of a spec that would become a control token."""
    keys = ("system", "instruction", "document")
    texts = [(f"prompt.{key}", getattr(prompt, key) or "") for key in keys]
    for number, example in enumerate(prompt.examples):
        turns = example.model_dump().items()
        texts += [(f"prompt.examples.{number}.{key}", turn) for key, turn in turns]
    for place, task in tasks:
        texts.append((f"tasks.{place}.question", (task.question or "").partition(ANSWER)[0]))
        labels = "\0".join(text for of_label in task.labels.values() for text in of_label)
        texts.append((f"tasks.{place}.labels", labels))
    controls = control_texts(tokenizer)
    written = [(at, next((each for each in controls if each in text), None)) for at, text in texts]
    fix = f"a control token is not text; write it in another way, or after {ANSWER} in a question"
    return [Problem(place, fix, control) for place, control in dict.fromkeys(written) if control]


def _prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    prefix = encode(tokenizer, text)
    # The token that begins every sequence, if the tokenizer adds it and no chat template does.
    first = tokenizer.bos_token_id
    if not tokenizer.chat_template and encode(tokenizer, "x", special=True)[:1] == [first]:
        prefix = [first, *prefix]
    return tuple(prefix)
