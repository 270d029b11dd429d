"""Label texts in this process, as in a notebook: no Ray, no files of documents, no output.

Knows how to put a spec's model and prompt together and lay the answers out in columns. Knows
nothing of shards, ledgers or clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cli import cache_dir as default_cache_dir
from pipeline.data.actor import check_room, job_model, local_model, memory_plan
from pipeline.data.commit import DOCUMENT_COLUMNS, label_table
from pipeline.data.devices import Placement, place, this_machine
from pipeline.data.documents import EMPTY, OK, TRUNCATED, RawRow, documents_from
from pipeline.data.job import describe
from pipeline.errors import DocumentError
from pipeline.inference.answers import Answers
from pipeline.inference.engine import LabelEngine
from pipeline.inference.fitting import fit_text
from pipeline.inference.loading import context_tokens, load_tokenizer
from pipeline.inference.quantisation import require_torchao
from pipeline.inference.tokens import DocumentTokenizer, tokenise_prompt
from pipeline.spec import JobSpec, TaskSpec, as_spec


class Labeller:
    """A spec's model with its questions read, ready to answer them about any text."""

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | JobSpec,
        *,
        cache_dir: Path | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.spec = as_spec(spec)
        require_torchao(self.spec.model.quantize)
        where = placement or place(self.spec.model, this_machine())
        job = describe(self.spec, where, cache_dir or default_cache_dir())
        folder = local_model(job)
        tokenizer = load_tokenizer(folder)
        prompt = tokenise_prompt(tokenizer, self.spec.prompt, self.spec.tasks)
        check_room(job, prompt, context_tokens(folder))
        model = job_model(job, folder)
        planned = memory_plan(model, prompt)
        self._encoder = DocumentTokenizer(tokenizer)
        self._engine = LabelEngine(model, prompt, max_batch_tokens=planned.max_batch_tokens)

    def label(self, texts: Iterable[str | None], ids: Iterable[object] | None = None) -> pa.Table:
        """A row for each text, in order: what a label file says of it, a struct for each task.

        A text that cannot be labelled has its reason in the struct's `status`, and no answer.
        """
        whole = list(texts)
        named = [None] * len(whole) if ids is None else list(ids)
        rows = (RawRow(text, id) for text, id in zip(whole, named, strict=True))
        documents = documents_from(rows)
        fitted = [
            self._fit(text, status)
            for text, status in zip(
                documents.column("text").to_pylist(),
                documents.column("status").to_pylist(),
                strict=True,
            )
        ]
        pieces = [document for document, _ in fitted]
        answers = Answers(pieces, self.spec.tasks)
        names = [task.name for task in self.spec.tasks]
        flat = [piece for document in pieces for piece in document]
        answers.take(0, pieces, self._engine.label(flat, tasks=names))
        status = answers.status([said for _, said in fitted])
        table = documents.select(DOCUMENT_COLUMNS)
        for task, log_probs in zip(self.spec.tasks, answers.by_task, strict=True):
            answered = _struct(documents.column("doc_id"), task, log_probs, pieces, status)
            table = table.append_column(task.name, answered)
        return table

    def _fit(self, text: str | None, status: str) -> tuple[Sequence[Sequence[int]], str]:
        """A document's pieces, and its status as far as labelling goes."""
        if status != OK or text is None:
            return [], status
        rules = self.spec.documents
        try:
            fitted = fit_text(
                self._encoder,
                text,
                max_tokens=rules.max_tokens,
                too_long=rules.too_long,
                overlap_tokens=rules.overlap_tokens,
            )
        except DocumentError as error:
            return [], f"error:{error}"
        if not fitted.tokens:
            return [], EMPTY
        return fitted.token_ids, TRUNCATED if fitted.truncated else OK


def _struct(
    doc_ids: pa.ChunkedArray,
    task: TaskSpec,
    log_probs: NDArray[np.float32],  # [docs, labels]
    pieces: Sequence[Sequence[Sequence[int]]],
    status: Sequence[str],
) -> pa.StructArray:
    """The rows of a label file without their ids, as one column."""
    docs, labels = log_probs.shape
    assert docs == len(pieces) and labels == len(task.labels), (log_probs.shape, task.name)
    with np.errstate(invalid="ignore"):  # NaN: no answer
        log_mass = np.logaddexp.reduce(log_probs, axis=1, keepdims=True)  # [docs, 1]
    table = label_table(
        doc_ids,
        p=np.exp(log_probs - log_mass),
        mass=np.minimum(np.exp(log_mass[:, 0]), 1),
        n_tokens=np.array([sum(map(len, document)) for document in pieces], np.int32),
        n_chunks=np.array([len(document) for document in pieces], np.int16),
        status=status,
        labels=list(task.labels),
    ).drop_columns(["doc_id"])
    columns = [_plain(column.combine_chunks()) for column in table.columns]
    return pa.StructArray.from_arrays(columns, names=table.column_names)


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
