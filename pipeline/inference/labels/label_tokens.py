"""The tokens of a task's labels at the answer position, and the labels that share them.

Entry points: `label_verbalizers`, `scored_paths` and `collisions`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from pipeline.errors import Problem
from pipeline.inference.labels.tokenizer import encode
from pipeline.inference.labels.trie import Path
from pipeline.spec.tasks import TaskSpec

# Texts that are tokenised in one call, by the tokenizer's own threads. Each repeats the suffix.
_BATCH = 1_024
_MAX_SHOWN = 10  # problems that one mistake makes
FRAGMENT_CHARS = 2  # a longer beginning of a word is shared by few other words

Verbalizers = Mapping[str, Collection[Path]]  # each label's verbalizers, as tokens


def label_verbalizers(
    tokenizer: PreTrainedTokenizerBase, task: TaskSpec, suffix: str, space: str
) -> Verbalizers:
    """Each label's verbalizers as the tokenizer splits them directly after `suffix`.

    The labels of a trained readout have none: the readout has a row for each label.
    """
    if task.readout is not None:
        return dict.fromkeys(task.labels, ())
    texts = [text for of_label in task.labels.values() for text in of_label]
    tokens = tokens_after(tokenizer, suffix, [space + text for text in texts])
    path_of = dict(zip(texts, tokens, strict=True))
    return {label: {path_of[text] for text in own} for label, own in task.labels.items()}


def scored_paths(task: TaskSpec, verbalizers: Verbalizers) -> Verbalizers:
    """The tokens of each verbalizer that are scored: the first, or all if two labels share it.

    With a beam or a length penalty, all are scored.
    """
    first = {label: {path[:1] for path in paths} for label, paths in verbalizers.items()}
    needs_paths = task.beam is not None or task.length_penalty > 0
    return verbalizers if needs_paths or _shared(first) else first


def collisions(
    place: int, task: TaskSpec, scored: Verbalizers, tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """Labels whose scored tokens are the same, or begin those of another label.

    `place` is the task's index in the spec.
    """
    shared = _shared(scored)
    if not shared and task.length_penalty == 0:
        return [
            Problem(
                f"tasks.{place}.labels",
                f"label {short!r} of {task.name!r} begins label {long!r}, so {long!r} could "
                f"never be the likelier: give {short!r} a text that does not, as in "
                f"{short}: ['just {short}'], or divide by lengths: length_penalty: 1",
                {label: list(task.labels[label]) for label in (short, long)},
            )
            for short, long in _beginnings(scored)[:_MAX_SHOWN]
        ]
    return [
        Problem(
            f"tasks.{place}.labels",
            f"labels {labels} of {task.name!r} are the same tokens "
            f"{tokenizer.decode(list(path))!r}; give them texts that differ",
            {label: list(task.labels[label]) for label in labels},
        )
        for path, labels in shared.items()
    ]


def is_fragment(token: str, verbalizers: Iterable[str]) -> bool:
    """Whether a label's first token is ambiguous: one or two characters that end inside a word.

    Args:
        token: The token as text.
        verbalizers: The texts of the label.

    Examples:
        >>> is_fragment(" s", ["sports"]), is_fragment(" no", ["No", "no"])
        (True, False)
    """
    text = token.strip()
    ends = [each.strip()[len(text) :] for each in verbalizers if each.strip().startswith(text)]
    inside_words = bool(ends) and all(end[:1].isalnum() for end in ends)
    # — in other scripts, a word may have one character
    return text.isascii() and len(text) <= FRAGMENT_CHARS and inside_words


def _beginnings(verbalizers: Verbalizers) -> list[tuple[str, str]]:
    """Pairs of labels where a path of the first begins a path of the second."""
    owner = {path: label for label, paths in verbalizers.items() for path in paths}
    pairs = {
        (owner[path[:length]], label)
        for path, label in owner.items()
        for length in range(1, len(path))
        if owner.get(path[:length], label) != label
    }
    return sorted(pairs)


def _shared(verbalizers: Verbalizers) -> dict[Path, list[str]]:
    """The paths of several labels, with these labels."""
    owners: dict[Path, list[str]] = {}
    for label, paths in verbalizers.items():
        for path in paths:
            owners.setdefault(path, []).append(label)
    return {path: labels for path, labels in owners.items() if len(labels) > 1}


def tokens_after(
    tokenizer: PreTrainedTokenizerBase, suffix: str, answers: Sequence[str]
) -> Iterator[Path]:
    """The tokens of each answer after the suffix, whose own tokens it must not change."""
    before = encode(tokenizer, suffix)
    for start in range(0, len(answers), _BATCH):
        batch = answers[start : start + _BATCH]
        together = tokenizer([suffix + a for a in batch], add_special_tokens=False)["input_ids"]
        for answer, ids in zip(batch, together, strict=True):
            continues = ids[: len(before)] == before and len(ids) > len(before)
            yield tuple(ids[len(before) :] if continues else encode(tokenizer, answer))
