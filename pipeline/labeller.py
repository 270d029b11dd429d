"""Labels texts in this process, for example in a notebook. Entry point: `Labeller`.

Reads no input files and writes no output. Must not import Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.errors import Problem, SpecError
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.blocks import LabelledDocuments
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.label_rows import answer_rows, with_calibrated
from pipeline.ledger.reuse import text_identities
from pipeline.runtime.assembly import DocumentReader, job_engine, labelled_documents
from pipeline.runtime.classifier_files import TextClassifiers
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.sources.documents import OK, RawRow, documents_from
from pipeline.spec.parse import as_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec


class Labeller:
    """A spec's model in memory, which answers the spec's tasks about any text.

    Args:
        spec: A spec, its YAML file, or a dictionary, which may omit `name`, `input` and `output`.
        cache_dir: Folder of models (default: `$ASSAY_CACHE`, or `~/.cache/assay`).
        placement: Device and number format (default: chosen from the spec and this machine).

    Raises:
        SpecError: The spec is wrong, names missing files, or does not fit the machine or the model.
        ModelError: The model cannot be loaded, or is not supported exactly.
        StorageError: A model or a fitted file cannot be read from its store.
    """

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | JobSpec,
        *,
        cache_dir: Path | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.spec = as_spec(spec)
        """The valid spec."""
        if self.spec.in_stages:
            fix = "a Labeller answers in one stage; `assay run` has cascades and continuations"
            names = [task.name for task in self.spec.in_stages]
            raise SpecError([Problem("tasks", fix, names)])
        if self.spec.input.image is not None:
            fix = "a Labeller reads texts; `assay run` labels images"
            raise SpecError([Problem("input.image", fix, self.spec.input.image)])
        where = placement or place(self.spec.model, this_machine())
        cache = cache_dir or default_cache_dir()
        job = make_job(self.spec, where, cache, resumes=False)
        self._lock = Lock()  # an engine counts the tokens that it reads: one call at a time
        self._classifiers = TextClassifiers(self.spec, job.classifiers, cache)
        self._calibrations = job.calibrations
        if self.spec.model_tasks:
            self._engine, tokenizer = job_engine(job)
            self._reader = DocumentReader(DocumentTokenizer(tokenizer), self.spec.documents)

    def label(self, texts: Iterable[str | None], ids: Iterable[object] | None = None) -> pa.Table:
        """A row for each text, in order, with a struct of answers for each task.

        Args:
            texts: The texts. None has the status `error:no text`.
            ids: An id for each text (default: the hash of the text).

        Returns:
            [texts] rows: the columns of a documents file, then a struct for each task with the
                columns of its label file. A text without an answer has the reason as its `status`.

        Raises:
            TypeError: `texts` is one text; write a list.
            ValueError: `ids` and `texts` differ in length.

        Examples:
            >>> Labeller("my.yaml").label(["What a day!"])["toxic"].to_pylist()
            [{'label': ..., 'p': {'toxic': 0..., 'clean': 0...}, 'mass': ..., 'status': 'ok'}]
        """
        if isinstance(texts, str | bytes):
            raise TypeError("label() takes a list of texts; write label([text])")
        whole = list(texts)
        named = [None] * len(whole) if ids is None else list(ids)
        rows = (RawRow(text, id) for text, id in zip(whole, named, strict=True))
        documents = documents_from(rows)
        classified = self._classified(documents)
        asked = self._asked(documents) if self.spec.model_tasks else classified
        table = documents.select(DOCUMENTS_FILE_COLUMNS)
        for task in self.spec.tasks:
            labelled = asked if task.classifier is None else classified
            table = table.append_column(task.name, self._struct(labelled, task))
        return table

    def _asked(self, documents: pa.Table) -> LabelledDocuments:
        """The documents with the model's answers."""
        fitted = [
            self._reader.chunks(text, status)
            for text, status in zip(
                documents.column("text").to_pylist(),
                documents.column("status").to_pylist(),
                strict=True,
            )
        ]
        chunks = [document for document, _ in fitted]
        answers = ShardAnswers(
            chunks, self.spec.model_tasks, text_identities(documents).to_pylist()
        )
        with self._lock:
            answers.label_rows(self._engine, 0, len(chunks))
        return labelled_documents(answers, [status for _, status in fitted])

    def _classified(self, documents: pa.Table) -> LabelledDocuments:
        """The documents with the classifiers' answers."""
        tasks = [task for task in self.spec.tasks if task.classifier is not None]
        answers = ShardAnswers([()] * documents.num_rows, tasks)
        status = documents.column("status").to_pylist()
        rows = [row for row, each in enumerate(status) if each == OK]
        names = [task.name for task in tasks]
        answers.add_classified(self._classifiers.answers(names, documents, rows), rows)
        return labelled_documents(answers, status)

    def _struct(self, labelled: LabelledDocuments, task: TaskSpec) -> pa.StructArray:
        """The rows of a label file without their ids, as one column."""
        rows = answer_rows(labelled, task)
        if task.name in self._calibrations:
            rows = with_calibrated(rows, self._calibrations[task.name].calibration)
        return rows
