"""The tokens of a task's labels where the model answers, and whether they tell labels apart.

Knows tokenizers and verbalizers. Knows nothing of prompts, weights or scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from pipeline.errors import Problem
from pipeline.inference.labels.trie import Path
from pipeline.spec.schema import TaskSpec

# A tokenizer's own threads share out a batch; the suffix is repeated for every text of it.
_AT_ONCE = 1_024
_SHOWN = 10  # of problems that one mistake makes

Verbalizers = Mapping[str, Collection[Path]]  # each label's verbalizers, as tokens
_Tokens = TypeVar("_Tokens", int, Path)


def label_verbalizers(
    tokenizer: PreTrainedTokenizerBase, task: TaskSpec, suffix: str, answer_prefix: str
) -> Verbalizers:
    """Each label's verbalizers as the tokenizer sees them right behind `suffix`.

    A trained readout's labels have none: its maps know them.
    """
    if task.readout is not None:
        return dict.fromkeys(task.labels, ())
    texts = [text for of_label in task.labels.values() for text in of_label]
    paths = dict(
        zip(texts, _behind(tokenizer, suffix, [answer_prefix + t for t in texts]), strict=True)
    )
    return {label: {paths[text] for text in of_label} for label, of_label in task.labels.items()}


def first_tokens(verbalizers: Verbalizers) -> dict[str, tuple[int, ...]]:
    """By label, the tokens that an answer may begin with."""
    return {
        label: tuple(sorted({path[0] for path in paths})) for label, paths in verbalizers.items()
    }


def scores_whole_labels(task: TaskSpec, verbalizers: Verbalizers) -> bool:
    """Whether all tokens of a label are scored: as asked for, or where first ones are shared."""
    if task.scoring != "auto":
        return task.scoring == "full"
    asked_for = task.beam is not None or task.length_penalty > 0
    return asked_for or bool(_shared(first_tokens(verbalizers)))


def collisions(
    place: int, task: TaskSpec, verbalizers: Verbalizers, tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """Labels that cannot be told apart by what is scored of them."""
    if scores_whole_labels(task, verbalizers):
        shared, alike = _shared(verbalizers), "are the same tokens"
        if not shared and task.length_penalty == 0 and (inside := _beginnings(verbalizers)):
            return [_unreachable(place, task, *pair) for pair in inside[:_SHOWN]]
    else:
        first = {label: [(t,) for t in ids] for label, ids in first_tokens(verbalizers).items()}
        shared, alike = _shared(first), "begin with the same token"
    return [
        Problem(
            f"tasks.{place}.labels",
            f"labels {labels} of {task.name!r} {alike} {tokenizer.decode(list(path))!r}; give "
            f"them verbalizers that {'differ' if len(path) > 1 else 'begin differently'}",
            {label: list(task.labels[label]) for label in labels},
        )
        for path, labels in shared.items()
    ]


def _beginnings(verbalizers: Verbalizers) -> list[tuple[str, str]]:
    """Labels of which a form begins another label's form: the likelier one, always."""
    owner = {path: label for label, paths in verbalizers.items() for path in paths}
    pairs = {
        (owner[path[:length]], label)
        for path, label in owner.items()
        for length in range(1, len(path))
        if owner.get(path[:length], label) != label
    }
    return sorted(pairs)


def _unreachable(place: int, task: TaskSpec, short: str, long: str) -> Problem:
    fix = (
        f"label {short!r} of {task.name!r} begins label {long!r}, so {long!r} could never be the "
        f"likelier: give {short!r} a verbalizer that does not, as in {short}: ['just {short}'], "
        f"or divide by lengths: length_penalty: 1"
    )
    return Problem(f"tasks.{place}.labels", fix, {n: list(task.labels[n]) for n in (short, long)})


def _shared(tokens: Mapping[str, Iterable[_Tokens]]) -> dict[_Tokens, list[str]]:
    """What several labels have, and which labels those are."""
    owners: dict[_Tokens, list[str]] = {}
    for label, of_label in tokens.items():
        for each in of_label:
            owners.setdefault(each, []).append(label)
    return {each: labels for each, labels in owners.items() if len(labels) > 1}


def _behind(
    tokenizer: PreTrainedTokenizerBase, suffix: str, answers: Sequence[str]
) -> Iterator[Path]:
    """The tokens of each answer; one never takes back a token of the suffix."""
    before = encode(tokenizer, suffix)
    for start in range(0, len(answers), _AT_ONCE):
        part = answers[start : start + _AT_ONCE]
        together = tokenizer([suffix + a for a in part], add_special_tokens=False)["input_ids"]
        for answer, ids in zip(part, together, strict=True):
            goes_on = ids[: len(before)] == before and len(ids) > len(before)
            yield tuple(ids[len(before) :] if goes_on else encode(tokenizer, answer))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text's tokens alone, without any that begin or end a sequence."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)
