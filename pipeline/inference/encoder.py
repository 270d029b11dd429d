"""Sequence classifiers of the encoder kind, such as BERT, DeBERTa, XLM-R and ModernBERT.

Entry points: `load_encoder`, and `EncoderEngine.label`, which replaces that of `LabelEngine`.
Must not import Ray or read files other than the model's. Code of a model folder is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.errors import ModelError, one_line
from pipeline.inference.classifiers import label_log_probs
from pipeline.inference.engine import DocumentIds, Labelled, read_in_batches
from pipeline.inference.labels.tokenizer import encode
from pipeline.inference.loading import UNREADABLE, read_config, read_network
from pipeline.inference.model.linear import use_onednn
from pipeline.inference.out_of_memory import naming_lack_of_memory
from pipeline.inference.schedules.batching import Usage, pad
from pipeline.spec.labels import NOT, task_of


class EncoderEngine:
    """An encoder with its head, which gives each of its classes a probability, or a score.

    A head of the kind `multi_label_classification` has two classes for each of its outputs: its
    name, and `not ` before it. A head with one output has no classes: its value is a score. The
    probabilities of the two labels beside it have it as their mean; a value beyond the labels is
    the first or the last. ModelError if the head lacks a class of a label, or has another form than
    a task.
    """

    def __init__(
        self,
        network: PreTrainedModel,  # on its device
        tokenizer: PreTrainedTokenizerBase,
        labels: Mapping[str, Mapping[str, Sequence[str]]],  # by task, the classes of each label
        scores: Mapping[str, Sequence[float]] = {},  # by task of kind score, the rising labels
        *,
        max_batch_tokens: int,  # with those that fill a batch's shorter documents
    ) -> None:
        self._network = network
        self._labels = labels
        self._max_batch_tokens = max_batch_tokens
        self._before, self._after = _special_tokens(tokenizer)
        config: Any = network.config
        if config.pad_token_id is None:
            config.pad_token_id = _padding(tokenizer, self._after)
        self._fill = config.pad_token_id
        self._excludes = config.problem_type != "multi_label_classification"
        names = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
        self.classes = tuple(names) if self._excludes else (*names, *(NOT + name for name in names))
        used = {name for own in labels.values() for classes in own.values() for name in classes}
        if repeated := [name for name in sorted(used) if self.classes.count(name) > 1]:
            raise ModelError(f"config.json: several classes of id2label are {repeated[0]!r}")
        self._scores = scores if len(names) == 1 and self._excludes else None
        if config.problem_type == "regression" and len(names) > 1:
            raise ModelError(f"its head has {len(names)} scores; use one with a single output")
        nothing = np.zeros((1, len(self.classes)), np.float32)
        for task in labels:
            try:
                self._log_probs(task, nothing)
            except ModelError as error:
                needs = ""
                if self._excludes and task_of(task) != task:
                    needs = "; kind: multi needs a head of the kind multi_label_classification"
                raise ModelError(f"task {task!r}: its head {error}{needs}") from error

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """As `LabelEngine.label`: [docs, labels] log-probabilities for each task."""
        names = [name for name in self._labels if tasks is None or name in tasks]
        outputs = np.full((len(documents), len(self.classes)), np.nan, np.float32)
        too_large: set[int] = set()
        around = len(self._before) + len(self._after)
        lengths = [len(document) + around for document in documents]

        def read(batch: Sequence[int], _max_tokens: int) -> NDArray[np.float32]:  # [docs, classes]
            return self._outputs([documents[i] for i in batch])

        for batch, answers in read_in_batches(
            lengths, read, max_tokens=self._max_batch_tokens, padded=True
        ):
            if answers is None:
                too_large.update(batch)
            else:
                outputs[batch] = answers
                on_batch(batch)
        by_task = tuple(self._log_probs(name, outputs) for name in names)
        return Labelled(by_task, Usage(sum(lengths)), frozenset(too_large))

    def _log_probs(
        self,
        task: str,
        outputs: NDArray[np.float32],  # [docs, classes]
    ) -> NDArray[np.float32]:  # [docs, labels]
        if self._scores is None:
            return label_log_probs(outputs, self.classes, self._labels[task])
        if task not in self._scores:
            raise ModelError("has one output, a score; write kind: score and its numbers as labels")
        return score_log_probs(outputs[:, 0], self._scores[task])

    @torch.inference_mode()
    def _outputs(self, documents: Sequence[DocumentIds]) -> NDArray[np.float32]:  # [docs, classes]
        whole = [[*self._before, *document, *self._after] for document in documents]
        ids, mask = pad(whole, fill=self._fill)
        device = self._network.device
        output = self._network(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
        )
        logits = output.logits.float()
        if not self._excludes:
            logits = torch.cat([logits.sigmoid(), (-logits).sigmoid()], dim=1)
        elif self._scores is None:
            logits = logits.softmax(dim=1)
        answers: NDArray[np.float32] = logits.numpy(force=True)
        return answers


def score_log_probs(
    scores: NDArray[np.float32],  # [docs]; NaN of one that was not read
    labels: Sequence[float],  # rising
) -> NDArray[np.float32]:  # [docs, labels]
    """Log-probabilities of the two labels beside a score, whose mean is the score."""
    shares = [np.interp(scores, labels, of_label) for of_label in np.eye(len(labels))]
    with np.errstate(divide="ignore"):  # — all other labels have none
        return np.log(np.stack(shares, axis=1)).astype(np.float32)


def load_encoder(folder: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """The sequence classifier in a folder; ModelError names what makes it unusable."""
    fix = "use a model with a trained classification head"
    kind = AutoModelForSequenceClassification
    with naming_lack_of_memory(str(folder), "load it"):
        network: Any = read_network(folder, kind, read_config, dtype=dtype, fix=fix)
        prepared: PreTrainedModel = network.eval().requires_grad_(False).to(device)
        use_onednn(prepared)
    return prepared


def encoder_context(folder: Path, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens of a document that the encoder in a folder reads; ModelError if unknown."""
    config = read_config(folder)
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ModelError(f"{folder}: config.json states no max_position_embeddings; add it")
    kind: Any = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):  # — without memory for its weights
            network = kind.from_config(config)
    except UNREADABLE as error:
        raise ModelError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    # — RoBERTa and its relatives count positions from the number of the padding token plus one
    unused = [
        module.padding_idx + 1
        for name, module in network.named_modules()
        if name.endswith(".position_embeddings")
        and getattr(module, "padding_idx", None) is not None
    ]
    before, after = _special_tokens(tokenizer)
    return positions - max(unused, default=0) - len(before) - len(after)


def _padding(tokenizer: PreTrainedTokenizerBase, after: Sequence[int]) -> int:
    """A token that no document ends with: a head on a decoder reads the last one that is another.

    ModelError if the tokenizer has none.
    """
    for token in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        if token is not None and token not in after[-1:]:
            return int(token)
    raise ModelError(
        "config.json states no pad_token_id, and the tokenizer has no control token in its place; "
        "add the one that the model was trained with"
    )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    own, whole = encode(tokenizer, "a"), encode(tokenizer, "a", special=True)
    for start in range(len(whole) - len(own) + 1):
        if whole[start : start + len(own)] == own:
            return whole[:start], whole[start + len(own) :]
    raise ModelError(f"{type(tokenizer).__name__} changes a text between its special tokens")
