"""Labels texts in this process, for example in a notebook. Entry point: `Labeller`.

Reads no input files and writes no output. Must not import Ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.errors import Problem, SpecError
from pipeline.inference.memory import disable_malloc_trim
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, overlaid
from pipeline.ledger.label_rows import unanswered_rows
from pipeline.runtime.imports import wait_passively
from pipeline.runtime.job import make_reader
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.progress import ignore
from pipeline.runtime.reading import readable
from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.parse import as_spec
from pipeline.spec.schema import JobSpec


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
        for key in ("cascade", "when"):
            if names := [
                task.name for task in self.spec.tasks if getattr(task, key, None) is not None
            ]:
                fix = f"a Labeller asks every question once; remove {key}, or use `assay run`"
                raise SpecError([Problem("tasks", fix, names)])
        if self.spec.input.image is not None:
            fix = "a Labeller reads texts; `assay run` labels images"
            raise SpecError([Problem("input.image", fix, self.spec.input.image)])
        wait_passively(os.environ)
        # — imports torch, which reads the environment
        from pipeline.runtime.readers import LoadedReader

        disable_malloc_trim()
        where = placement or place(self.spec.model, this_machine())
        cache = cache_dir or default_cache_dir()
        self._reader = LoadedReader(make_reader(self.spec, where, cache), ignore)
        if self.spec.model_tasks:
            self._reader.load()
            self._reader.load_tokenizer()

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
        asked = readable(documents, np.ones(documents.num_rows, np.bool_))
        status = documents.column("status").cast(pa.string()).to_pylist()
        answers: dict[str, pa.StructArray] = {}
        if self.spec.model_tasks and asked.any():
            chunks, tokenised = self._reader.tokenise(documents, asked)
            by_task = {task.name: asked for task in self.spec.model_tasks}
            answers, _, _ = self._reader.label(documents, chunks, tokenised, by_task)
        table = documents.select(DOCUMENTS_FILE_COLUMNS)
        for task in self.spec.tasks:
            own = answers.get(task.name)
            if task.classifier is not None:
                own = self._reader.classify(task, documents, asked)
            rows = unanswered_rows(status, task, self.spec.documents)
            table = table.append_column(task.name, overlaid(own, rows))
        return table
