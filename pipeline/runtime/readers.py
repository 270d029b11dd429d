"""The models and classifiers that answer the tasks of a job, in memory.

Entry point: `LoadedReader`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.hashes import canonical_json
from pipeline.inference.chunking import chunk_spans
from pipeline.inference.classifiers import Classifier, label_log_probs
from pipeline.inference.engine import Engine, LabelEngine
from pipeline.inference.images import as_document
from pipeline.inference.openai_engine import OpenAIEngine
from pipeline.inference.schedules.batching import Usage
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.inference.vllm_engine import VllmEngine
from pipeline.ledger.columns import Bools, only
from pipeline.ledger.label_rows import answer_rows
from pipeline.ledger.reuse import text_identities
from pipeline.runtime.assembly import DocumentReader, Models, reader_engine, server_engine
from pipeline.runtime.fitted_files import read_classifier
from pipeline.runtime.job import Reader, Run
from pipeline.runtime.progress import Send
from pipeline.sources.documents import OK
from pipeline.spec.tasks import TaskSpec

# Texts that a classifier reads in one call.
_CLASSIFIED_TEXTS = 256

Chunks = Sequence[Sequence[Any]]  # [docs] chunks of token ids: arrays, or with an image


class LoadedReader:
    """The model and the classifiers of one reader, which answer its tasks.

    Each is loaded when it is needed first. Several threads may call its methods. `send` takes
    reports of the progress. Readers in one process share `working`, which is held while a model is
    loaded or reads, and the loaded `models`. `run` is None for a session of a person.
    """

    def __init__(
        self,
        reader: Reader,
        send: Send,
        working: Lock | None = None,
        models: Models | None = None,
        run: Run | None = None,
    ) -> None:
        self.reader, self._run = reader, run
        self._send, self._models = send, Models() if models is None else models
        self._working, self._classifying = working or Lock(), Lock()
        self._classifiers: dict[str, Classifier] = {}  # by task, once they are loaded

    def load(self) -> None:
        self._load("_engine")

    def load_tokenizer(self) -> None:
        self._load("document_reader")

    def _load(self, name: str) -> None:
        # — loading waits for no other shard: one is tokenised while another is labelled
        if name not in vars(self):
            with self._working:
                getattr(self, name)

    def load_classifier(self, task: TaskSpec) -> None:
        with self._classifying:
            self._classifier(task)

    def _classifier(self, task: TaskSpec) -> Classifier:
        if task.name not in self._classifiers:
            own, cache_dir = self.reader, Path(self.reader.cache_dir)
            self._classifiers[task.name] = read_classifier(
                own.spec, task, cache_dir, own.classifiers[task.name], own.places[task.name]
            )
        return self._classifiers[task.name]

    @cached_property
    def _engine(self) -> Engine:
        if self.reader.spec.model.engine == "openai":
            return server_engine(self.reader, self._run, self._models)
        return reader_engine(self.reader, self._send, self._models)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a label file about the computation, beside the job's own."""
        engine = vars(self).get("_engine")  # — once a document was asked about
        if isinstance(engine, OpenAIEngine):
            return engine.metadata
        if isinstance(engine, VllmEngine):
            return {"engine": f"vllm {engine.version}"}
        if isinstance(engine, LabelEngine):
            return {"processor": canonical_json(engine.model.processor).decode()}
        return {}

    def begin_shard(self) -> None:
        """Begins a shard; answers that were paid for the shard before may be used again."""
        if isinstance(engine := vars(self).get("_engine"), OpenAIEngine):
            engine.begin_shard()

    def end_shard(self) -> None:
        """The answers of the shard are committed."""
        if isinstance(engine := vars(self).get("_engine"), OpenAIEngine):
            engine.end_shard()

    @cached_property
    def document_reader(self) -> DocumentReader:
        """Turns documents into what the model reads."""
        return DocumentReader.loaded(self.reader, self._send)

    def tokenise(self, documents: pa.Table, asked: Bools) -> tuple[Chunks, list[str]]:
        """The chunks of the documents that are asked about, and the status of each document.

        A document that cannot be labelled has no chunks; its status has the reason.
        """
        chunks: list[list[Any]] = [[] for _ in asked]
        status = documents.column("status").cast(pa.string()).to_pylist()
        rows = np.flatnonzero(asked).tolist()
        if not rows:
            return chunks, status
        texts = documents.column("text").take(pa.array(rows)).to_pylist()
        read, images = self.document_reader.text_chunks(texts), [None] * len(rows)
        if "image" in documents.column_names:
            images = documents.column("image").take(pa.array(rows)).to_pylist()
            pairs = zip(texts, images, strict=True)
            read = (self.document_reader.chunks(text, OK, image) for text, image in pairs)
        for row, image, (token_ids, status[row]) in zip(rows, images, read, strict=True):
            # — as arrays: Python integers would take ten times the memory
            pieces: list[Any] = [np.array(chunk, np.int32) for chunk in token_ids]
            chunks[row] = [as_document(piece, image) for piece in pieces]
        return chunks, status

    def classify(
        self,
        task: TaskSpec,
        documents: pa.Table,
        asked: Bools,
        on_batch: Callable[[], None] = lambda: None,
    ) -> pa.StructArray:
        """[docs] the rows of the task's label file from its classifier, or null."""
        rows = np.flatnonzero(asked)
        # — documents of which none is asked about may be without their texts
        texts = documents.column("text").take(pa.array(rows)).to_pylist() if len(rows) else []
        log_probs = np.full((documents.num_rows, len(task.labels)), np.nan, np.float32)
        with self._classifying:
            classifier = self._classifier(task)
            for start in range(0, len(rows), _CLASSIFIED_TEXTS):
                batch = slice(start, start + _CLASSIFIED_TEXTS)
                p = classifier.probabilities(texts[batch])
                log_probs[rows[batch]] = label_log_probs(p, classifier.classes, task.labels)
                on_batch()
        answers = ShardAnswers([()] * documents.num_rows, [task])
        answers.by_task[0].add_rows(rows, log_probs, rows, rows + 1)
        status = documents.column("status").cast(pa.string()).to_pylist()
        return only(answer_rows(answers, task, status), asked)

    def label(
        self,
        documents: pa.Table,
        chunks: Chunks,
        status: Sequence[str],  # [docs]: of tokenising
        asked: Mapping[str, Bools],  # [docs] by task
        on_rows: Callable[[int, float], None] = lambda _rows, _share: None,
    ) -> tuple[dict[str, pa.StructArray], int, Usage]:
        """By task [docs] the rows of its label file, null where it was not asked about.

        Also how many documents the model read, and the tokens. The tasks that are asked about one
        document are answered in one reading. `on_rows` is that of `ShardAnswers.label_rows`.
        """
        tasks = [task for task in self.reader.spec.tasks if task.name in asked]
        identities = text_identities(documents).to_pylist()
        rules, texts = self.reader.spec.documents, documents.column("text")

        @cache  # — the same for each task
        def spans(row: int) -> list[tuple[int, int]]:
            return chunk_spans(self.document_reader.tokenizer, texts[row].as_py(), rules)

        answers: dict[str, list[pa.StructArray]] = {task.name: [] for task in tasks}
        read, usage = 0, Usage()
        masks = np.stack([asked[task.name] for task in tasks])  # [tasks, docs]
        for of_tasks in np.unique(masks, axis=1).T:  # [tasks]: asked about the same documents
            rows = (masks == of_tasks[:, None]).all(axis=0)
            own = [task for task, is_asked in zip(tasks, of_tasks, strict=True) if is_asked]
            if not own:
                continue
            of_rows = [
                pieces if is_asked else () for pieces, is_asked in zip(chunks, rows, strict=True)
            ]
            parts = [part for task in own for part in task.parts]
            shard = ShardAnswers(of_rows, parts, identities)
            if shard.asked_rows:
                with self._working:
                    shard.label_rows(self._engine, on_rows)
            read, usage = read + shard.asked_rows, usage + shard.usage
            for task in own:
                own_rows = answer_rows(shard, task, status, rules, spans)
                answers[task.name].append(only(own_rows, rows))
        return {task: pc.coalesce(*parts) for task, parts in answers.items() if parts}, read, usage
