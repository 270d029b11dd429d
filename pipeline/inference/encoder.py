"""Sequence classifiers of the encoder kind, such as BERT, DeBERTa, XLM-R and ModernBERT.

Entry points: `load_encoder`, and `EncoderEngine.label`, which stands in for `LabelEngine`. Must not
import Ray or read files other than the model's. Code that a model folder carries is never run.
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
from pipeline.inference.loading import read_config, read_network
from pipeline.inference.model.linear import use_onednn
from pipeline.inference.schedules.batching import Usage, pad

# Before the name of a class, in a head whose classes do not exclude each other: its opposite.
NOT = "not "


class EncoderEngine:
    """An encoder with its head, which gives each of its classes a probability.

    A head of the kind `multi_label_classification` has two classes for each of its outputs: its
    name, and `not ` before it. ModelError if the head lacks a class of a label.
    """

    def __init__(
        self,
        network: PreTrainedModel,  # on its device
        tokenizer: PreTrainedTokenizerBase,
        labels: Mapping[str, Mapping[str, Sequence[str]]],  # by task, the classes of each label
        *,
        max_batch_tokens: int,  # with those that fill a batch's shorter documents
    ) -> None:
        self._network = network
        self._labels = labels
        self._max_batch_tokens = max_batch_tokens
        self._before, self._after = _special_tokens(tokenizer)
        config: Any = network.config
        self._fill = config.pad_token_id or 0
        self._excludes = config.problem_type != "multi_label_classification"
        names = [str(config.id2label[number]) for number in range(config.num_labels)]
        self.classes = tuple(names) if self._excludes else (*names, *(NOT + name for name in names))
        if len(names) < 2 and self._excludes:
            raise ModelError(
                "its head has one output: a score, and no probability of a class; use a head with "
                "two classes or more, or of the kind multi_label_classification"
            )
        nothing = np.zeros((1, len(self.classes)), np.float32)
        for task, of_task in labels.items():
            try:
                label_log_probs(nothing, self.classes, of_task)
            except ModelError as error:
                raise ModelError(f"task {task!r}: its head {error}") from error

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """As `LabelEngine.label`: [docs, labels] log-probabilities for each task."""
        names = [name for name in self._labels if tasks is None or name in tasks]
        p = np.full((len(documents), len(self.classes)), np.nan, np.float32)
        too_large: set[int] = set()
        around = len(self._before) + len(self._after)
        lengths = [len(document) + around for document in documents]

        def read(batch: Sequence[int], _max_tokens: int) -> NDArray[np.float32]:  # [docs, classes]
            return self._probabilities([documents[i] for i in batch])

        for batch, answers in read_in_batches(
            lengths, read, max_tokens=self._max_batch_tokens, padded=True
        ):
            if answers is None:
                too_large.update(batch)
            else:
                p[batch] = answers
                on_batch(batch)
        by_task = (label_log_probs(p, self.classes, self._labels[name]) for name in names)
        return Labelled(tuple(by_task), Usage(sum(lengths)), frozenset(too_large))

    @torch.inference_mode()
    def _probabilities(
        self, documents: Sequence[DocumentIds]
    ) -> NDArray[np.float32]:  # [docs, classes]
        whole = [[*self._before, *document, *self._after] for document in documents]
        ids, mask = pad(whole, fill=self._fill)
        device = self._network.device
        output = self._network(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
        )
        logits = output.logits.float()
        if self._excludes:
            p = logits.softmax(dim=1)
        else:
            p = torch.cat([logits.sigmoid(), (-logits).sigmoid()], dim=1)
        answers: NDArray[np.float32] = p.numpy(force=True)
        return answers


def load_encoder(folder: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """The sequence classifier in a folder; ModelError names what makes it unusable."""
    fix = "use a model with a trained classification head"
    kind = AutoModelForSequenceClassification
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
    except ValueError as error:
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


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    own, whole = encode(tokenizer, "a"), encode(tokenizer, "a", special=True)
    for start in range(len(whole) - len(own) + 1):
        if whole[start : start + len(own)] == own:
            return whole[:start], whole[start + len(own) :]
    raise ModelError(f"{type(tokenizer).__name__} changes a text between its special tokens")
