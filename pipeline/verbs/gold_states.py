"""The hidden states of gold documents, read as a run reads them. Entry: `read_gold_states`.

prefix  ──  document        ──┬── suffix 0   the state at each suffix's last token: of a question,
            its own tokens'   └── suffix 1   or of an empty one
            mean
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import ModelError, option_error
from pipeline.gold.fitted_texts import is_held_out
from pipeline.gold.labels import Gold
from pipeline.gold.values import UNLABELLED
from pipeline.hashes import short_hash
from pipeline.inference.engine import DocumentIds
from pipeline.inference.images import as_document
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.batching import pack
from pipeline.inference.schedules.forward import ReadPoint
from pipeline.runtime.assembly import DocumentReader, memory_plan, reader_model, reader_prompt
from pipeline.runtime.job import Job
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import READING, Progress, ignore
from pipeline.sources.documents import RawRow, documents_from, images_of
from pipeline.sources.id_text import spellings
from pipeline.sources.source import read_documents
from pipeline.stores.store import open_store

NO_LABEL = "no label for a task that is fitted"
NO_TEXT = "not in the corpus, and the gold has no text"
CHUNKED = "read in several chunks, for which the gold has no labels"
HELD_OUT = "held out for assay eval"
OVERFLOWN = "error:its hidden states are infinite or NaN"
POOLINGS = ("last", "mean")  # of the document; after a question there is the last token alone
Position = Literal["document", "question"]
# The default layers, as shares of the decoder's depth.
_SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)

_Content = tuple[str, str, bytes | None, str]  # text, status, image, content hash


@dataclass(frozen=True, slots=True)
class ReadGold:
    """The states of the gold rows that can be read, and why others cannot."""

    rows: NDArray[np.int64]  # [docs]: indices into the gold
    groups: NDArray[np.int64]  # [docs]: equal for equal tokens
    states: NDArray[np.float32]  # [docs, layers, kinds, hidden], in a file
    # Task -> where its states are, among the kinds: POOLINGS of the document, then the question's.
    positions: Mapping[str, Mapping[Position, tuple[int, ...]]]
    layers: tuple[int, ...]
    all_layers: int  # of the decoder
    hashes: tuple[str, ...]  # [docs]: of the contents
    left_out: Mapping[str, int]  # gold rows, by reason


def read_gold_states(
    job: Job,
    gold: Gold,
    names: Collection[str],  # of tasks of the job
    *,
    layers: str | None,
    shares: Sequence[float] = _SHARES,
    hold_out: float = 0.0,
    announce: Callable[[Progress], None] = ignore,
) -> ReadGold:
    """The states of every labelled gold document for all tasks; each is read once.

    They are those of the document itself and, for a task with a question, those after it.
    `layers` is that of `--layers`; without it, they are at `shares` of the depth. A share
    `hold_out` of the texts is not read. SpecError if no document can be read, or a layer is wrong.
    """
    tasks = [task for task in job.spec.tasks if task.name in names]
    # — as tasks with a readout, which needs no label tokens; the last one has no question
    fitted = {"labels": {}, "readout": "of this fit"}
    asked = [task.model_copy(update=fitted) for task in tasks if task.question is not None]
    bare = [*asked, tasks[0].model_copy(update={**fitted, "name": "", "question": None})]
    [own] = job.readers
    folder, tokenizer, prompt = reader_prompt(own, bare)
    reader = DocumentReader.of(own, folder, tokenizer)
    contents = _contents(job, gold)
    documents, left_out = _documents(contents, gold, names, reader, hold_out)
    disable_malloc_trim()
    model = reader_model(own, folder)
    read_layers = chosen_layers(layers, model.layers, shares)
    suffixes = list(dict.fromkeys(question.token_ids for question in prompt.questions))
    token_ids = list(documents.values())

    def show(done: int) -> None:
        announce(Progress(READING, documents=len(token_ids), answered=done, work_done=done))

    show(0)
    states = document_states(
        model,
        prompt.prefix,
        suffixes,
        token_ids,
        layers=read_layers,
        max_batch_tokens=memory_plan(model, prompt).max_batch_tokens,
        folder=Path(job.cache_dir),
        on_documents=show,
    )
    finite = _finite_first(states)
    if not finite.all():
        left_out[OVERFLOWN] = int((~finite).sum())
    rows = np.array(list(documents), np.int64)[finite]
    return ReadGold(
        rows=rows,
        groups=_groups(token_ids)[finite],
        states=states[: finite.sum()],
        positions={task.name: _positions(task.name, prompt, suffixes) for task in tasks},
        layers=read_layers,
        all_layers=model.layers,
        hashes=tuple(contents[row][-1] for row in rows),
        left_out=dict(left_out),
    )


def _positions(
    task: str, prompt: PromptTokens, suffixes: Sequence[Sequence[int]]
) -> dict[Position, tuple[int, ...]]:
    """Where the states of a task are among the kinds, which are the suffixes and the mean."""
    at = {question.name: suffixes.index(question.token_ids) for question in prompt.questions}
    document: dict[Position, tuple[int, ...]] = {"document": (at[""], len(suffixes))}
    return {**document, "question": (at[task],)} if task in at else document


def _groups(documents: Sequence[DocumentIds]) -> NDArray[np.int64]:  # [docs]
    """Equal numbers for equal tokens: of long texts that differ only after `max_tokens`, too."""
    hashes = [
        short_hash(np.array(ids, np.int64).tobytes() + getattr(ids, "image", b""))
        for ids in documents
    ]
    return np.unique(hashes, return_inverse=True)[1].astype(np.int64)


def _finite_first(states: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[docs] which documents have finite states alone; their states become the first ones."""
    places = list(np.ndindex(states.shape[1:3]))  # — one at a time: all may not fit into memory
    finite = np.all([np.isfinite(states[:, i, j]).all(axis=1) for i, j in places], axis=0)
    for i, j in () if finite.all() else places:
        states[: finite.sum(), i, j] = states[finite, i, j]
    return np.asarray(finite, np.bool_)


def chosen_layers(
    written: str | None, layers: int, shares: Sequence[float] = _SHARES
) -> tuple[int, ...]:
    """The layers that `--layers` names, rising; by default those at these shares of the depth."""
    if written is None:
        return tuple(sorted({max(1, round(layers * share)) for share in shares}))
    if written == "all":
        return tuple(range(1, layers + 1))
    numbers = [part.strip() for part in written.split(",")]
    known = {str(layer): layer for layer in range(1, layers + 1)}
    if wrong := [number for number in numbers if number not in known]:
        fix = f"write all, or numbers from 1 to {layers} as in 1,{layers}; not {', '.join(wrong)}"
        raise option_error("layers", fix, written)
    return tuple(sorted({known[number] for number in numbers}))


def _documents(
    contents: Sequence[_Content],  # [rows]
    gold: Gold,
    tasks: Collection[str],
    reader: DocumentReader,
    hold_out: float,
) -> tuple[dict[int, DocumentIds], Counter[str]]:
    """The tokens of each gold row that is read, and the number of other rows by reason.

    A row without a label for any of the tasks is not read.
    """
    documents: dict[int, DocumentIds] = {}
    left_out: Counter[str] = Counter()
    labelled = np.any([gold.tasks[task].truth != UNLABELLED for task in tasks], axis=0)
    for row, (text, status, image, content_hash) in enumerate(contents):
        if not labelled[row]:
            left_out[NO_LABEL] += 1
            continue
        if content_hash and is_held_out(content_hash, hold_out):
            left_out[HELD_OUT] += 1
            continue
        chunks, chunk_status = reader.chunks(text, status, image)
        if len(chunks) == 1:
            documents[row] = as_document(chunks[0], image)
        else:
            left_out[CHUNKED if chunks else chunk_status] += 1
    if not documents:
        fix = f"no document of the gold can be read: {dict(left_out)}"
        raise option_error("gold", fix, gold.source)
    return documents, left_out


def _contents(job: Job, gold: Gold) -> list[_Content]:  # [rows]
    """The content of every row, with the status that a run would give it.

    The corpus is read where the gold has no text, and as far as needed.
    """
    gold_texts = gold.texts or [None] * gold.rows
    own = documents_from(RawRow(text) for text in gold_texts)
    read = (own[name].to_pylist() for name in ("text", "status", "content_hash"))
    texts: dict[str, _Content] = {
        key: (text or "", status, None, content_hash)
        for key, text, status, content_hash, of_gold in zip(
            gold.keys, *read, gold_texts, strict=True
        )
        if of_gold is not None
    }
    if missing := set(gold.keys) - set(texts):
        texts |= _corpus_texts(job, missing, gold.counts.joined_by)
    return [texts.get(key, ("", NO_TEXT, None, "")) for key in gold.keys]


def _corpus_texts(job: Job, keys: set[str], by: str) -> dict[str, _Content]:
    """The first document of each key in the corpus."""
    spec, key_of = job.spec, spellings(keys)
    texts: dict[str, _Content] = {}
    for shard in plan(job, open_store(spec.output, spec.storage_options), keep=False).shards:
        if len(texts) == len(keys):
            break
        for documents in read_documents(shard, spec.input.storage_options):
            pairs = zip(documents.column(by).to_pylist(), images_of(documents), strict=True)
            for row, (spelled, image) in enumerate(pairs):
                key = key_of.get(spelled)
                if key is not None and key not in texts:
                    text, status, content_hash = (
                        documents.column(name)[row].as_py()
                        for name in ("text", "status", "content_hash")
                    )
                    texts[key] = text or "", status, image, content_hash
    return texts


def read_as(job: Job) -> dict[str, Any]:
    """The part of a card about how the documents of its fit were read."""
    spec = job.spec
    return {
        "model": {
            "weights": dict(job.readers[0].files.hashes),
            "dtype": job.placement.dtype,
            "int8": spec.model.dtype == "int8",
            "fp8": spec.model.dtype == "fp8",
            "kv": spec.model.kv,
        },
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": spec.documents.model_dump(mode="json", include={"max_tokens", "too_long"}),
    }


def _in_file(folder: Path, shape: tuple[int, int, int, int]) -> NDArray[np.float32]:
    """An array of zeros in a new file; SpecError if the disk has no room for it."""
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = 4 * prod(shape), shutil.disk_usage(folder).free
    if needed > free:
        fix = (
            f"the states of {shape[2]:,} documents after {shape[0]} layers take "
            f"{needed / 1e9:,.1f} GB, and {folder} has {free / 1e9:,.1f} GB free; name fewer "
            "layers, or another folder in ASSAY_CACHE"
        )
        raise option_error("layers", fix, shape[0])
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def document_states(
    model: LoadedModel,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],  # of one token at least
    documents: Sequence[Sequence[int]],  # of one token at least
    *,
    layers: Sequence[int],  # rising, from 1 to all
    max_batch_tokens: int,
    folder: Path,
    on_documents: Callable[[int], None] = ignore,
) -> NDArray[np.float32]:  # [docs, layers, kinds, hidden]
    """The states of every document; kinds are the suffixes' last tokens, then the mean.

    They are in a file without a name in the folder, which the system deletes with the array.

    State N is the `hidden_states[N]` of transformers: the residual stream after N layers, and
    after the last one also normalised. Layers above the highest of `layers` are not run.
    `on_documents` gets the number of documents that are done. ModelError if the decoder does not
    list its layers.
    """
    if not model.layers:
        raise ModelError(
            f"{type(model.decoder).__name__} does not list its layers; use another model"
        )
    points = [ReadPoint(layer, tuple(map(tuple, suffixes)), mean=True) for layer in layers]
    reader = read_prefix(model, prefix).reader(points)
    lengths = [len(document) + reader.question_tokens for document in documents]
    hidden = model.network.config.get_text_config().hidden_size
    states = _in_file(folder, (len(layers), len(suffixes) + 1, len(documents), hidden))
    states, done = states.transpose(2, 0, 1, 3), 0
    for batch in pack(lengths, max_tokens=max_batch_tokens):
        by_layer = reader.read(model.with_images([documents[i] for i in batch]))
        for number, of_layer in enumerate(by_layer):
            assert of_layer.mean is not None, layers[number]
            kinds = torch.cat([of_layer.at_suffixes.float(), of_layer.mean.unsqueeze(0)])
            states[batch, number] = kinds.transpose(0, 1).numpy(force=True)
        done += len(batch)
        on_documents(done)
    return states
