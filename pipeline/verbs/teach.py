"""Readouts of early layers, fitted to what the whole model answers about a sample: `teach`.

The document's states are read at a few layers and, where documents are long, also of their first
tokens alone. The cheapest place is that which saves the most, by the rule that the held-out answers
of the same rows would prove.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipeline.evaluation.cascade_rules import Judged, wrong_by_rule
from pipeline.evaluation.promises import prove
from pipeline.evaluation.readout_fitting import (
    STRENGTHS,
    Choice,
    GoldStates,
    choose,
    refit,
)
from pipeline.fitted.readout import LinearMap, readout_file
from pipeline.gold.labels import Gold, GoldCounts
from pipeline.gold.values import GoldTask
from pipeline.hashes import sha256_hex
from pipeline.ledger.keys import fitted_key
from pipeline.runtime.job import Job, in_format, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.labels import part_file
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask, QuestionTask
from pipeline.stores.store import open_store
from pipeline.verbs.fit import FORMAT, read_as
from pipeline.verbs.gold_states import POOLINGS, ReadGold, read_gold_states

LAYERS = (1 / 8, 1 / 4, 1 / 2)  # of the decoder's depth
FIRST_TOKENS = 256
# Documents of which half have so many tokens are also read by their first ones alone.
LONG = 2 * FIRST_TOKENS
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Taught:
    """A fitted readout, and what it costs."""

    readout: str  # key in the output; of several labels the folder
    max_tokens: int | None  # of a document, that it reads; None: as the spec says
    layer: int | None
    cost: float  # as a share of a whole reading


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of the states, and what is saved by a readout there."""

    read: ReadGold
    max_tokens: int | None
    layer: int  # index
    cost: float
    saved: float
    rows: Mapping[str, GoldStates]  # by part
    best: Mapping[str, tuple[int, Choice]]  # by part: pooling and choice


def teach(
    spec: JobSpec,
    task: CascadeTask,
    shards: Mapping[str, Shard],
    rows: pa.Table,  # sid, row, and the task's answers
    whole: Floats,  # [docs, labels]: these answers
    judged: Judged,
    *,
    dtype: str,
    cache_dir: Path,
) -> Taught | None:
    """Fits readouts and writes the best one to the output; None if none saves anything."""
    texts = _texts(spec, shards, rows)
    tokens = pc.struct_field(rows[task.name].combine_chunks(), "n_tokens").to_numpy()
    lengths = (None, FIRST_TOKENS) if np.median(tokens) >= LONG else (None,)
    places = [
        each
        for most in lengths
        for each in _places(spec, task, texts, whole, judged, most, tokens, dtype, cache_dir)
    ]
    best = max(places, key=lambda own: own.saved)
    return None if best.saved <= 0 else _written(spec, task, best, dtype, cache_dir)


def _texts(spec: JobSpec, shards: Mapping[str, Shard], rows: pa.Table) -> list[str]:
    """The texts of these rows."""
    texts: dict[tuple[str, int], str] = {}
    wanted: dict[str, set[int]] = {}
    pairs = [*zip(rows["sid"].to_pylist(), rows["row"].to_pylist(), strict=True)]
    for sid, row in pairs:
        wanted.setdefault(sid, set()).add(row)
    for sid, of_shard in wanted.items():
        start = 0
        for documents in read_documents(shards[sid], spec.input.storage_options):
            for row in of_shard & {*range(start, start + documents.num_rows)}:
                texts[sid, row] = documents["text"][row - start].as_py() or ""
            start += documents.num_rows
    return [texts[pair] for pair in pairs]


def _job(
    spec: JobSpec, task: CascadeTask, max_tokens: int | None, dtype: str, cache_dir: Path
) -> Job:
    """A job that asks the spec's model for the states of documents."""
    parts = _bare(task, "?").parts
    documents = spec.documents
    if max_tokens is not None:
        documents = documents.model_copy(update={"max_tokens": max_tokens})
    own = spec.model_copy(update={"tasks": parts, "documents": documents})
    where = replace(place(spec.model, this_machine()), dtype=dtype)
    job = make_job(in_format(own, dtype), where, cache_dir)
    bare = tuple(part.model_copy(update={"question": None}) for part in job.spec.tasks)
    return replace(job, spec=job.spec.model_copy(update={"tasks": bare}))


def _bare(task: CascadeTask, question: str | None) -> QuestionTask:
    labels = {label: (label,) for label in task.labels}
    return QuestionTask(name=task.name, kind=task.kind, labels=labels, question=question)


def _targets(task: CascadeTask, whole: Floats) -> Iterator[tuple[str, Floats]]:
    """By part: [docs, labels of the part] the probabilities that a readout is fitted to."""
    if task.kind != "multi":
        yield task.name, whole
        return
    for part, p in zip(_bare(task, "?").parts, whole.T, strict=True):
        yield part.name, np.stack([p, 1 - p], axis=1)


def _places(
    spec: JobSpec,
    task: CascadeTask,
    texts: list[str],
    whole: Floats,
    judged: Judged,
    max_tokens: int | None,
    tokens: NDArray[Any],
    dtype: str,
    cache_dir: Path,
) -> Iterator[_Place]:
    """The layers at which the states of the documents were read."""
    job = _job(spec, task, max_tokens, dtype, cache_dir)
    targets = dict(_targets(task, whole))
    gold = Gold(
        GoldCounts("the sample", "content_hash", len(texts)),
        tuple(map(str, range(len(texts)))),
        {
            part.name: GoldTask(
                tuple(part.labels), targets[part.name].argmax(axis=1), targets[part.name]
            )
            for part in job.spec.tasks
        },
        tuple(texts),
    )
    read = read_gold_states(
        job,
        gold,
        [*targets],
        layers=None,
        shares=LAYERS,
        announce=lambda _documents: lambda _done: None,
    )
    own = whole[read.rows]
    read_tokens = tokens if max_tokens is None else np.minimum(tokens, max_tokens)
    states = {
        name: GoldStates(read.states[:, :, slice(*_kinds(read, name))], of[read.rows], read.groups)
        for name, of in targets.items()
    }
    with threadpool_limits(1, user_api="blas"):
        choices = {name: choose(of, STRENGTHS) for name, of in states.items()}
    for number, layer in enumerate(read.layers):
        best = {
            name: min(enumerate(of[number]), key=lambda each: each[1].loss)
            for name, of in choices.items()
        }
        held_out = [choice.held_out for _, choice in best.values()]
        p = held_out[0] if task.kind != "multi" else np.stack([x[:, 0] for x in held_out], axis=1)
        rules = judged.rules(p, own)
        answers = [*wrong_by_rule(rules, judged, p[None], own)]
        proof = prove([wrong for _, wrong in answers], judged.promise, judged.positive(own))
        cost = layer / read.all_layers * float(read_tokens.sum() / tokens.sum())
        decided = float(answers[proof.rule][0].mean()) if proof.rule >= 0 else 0.0
        yield _Place(read, max_tokens, number, cost, decided - cost, states, best)


def _kinds(read: ReadGold, name: str) -> tuple[int, int]:
    """Where the states of the document are among the kinds: at its last token, and their mean."""
    last, mean = read.positions[name]["document"]
    return last, mean + 1


def _written(spec: JobSpec, task: CascadeTask, best: _Place, dtype: str, cache_dir: Path) -> Taught:
    """Fits at the best place to all rows, and writes the files, whose names are their hash."""
    job = _job(spec, task, best.max_tokens, dtype, cache_dir)
    layer = best.read.layers[best.layer]
    files: dict[str, bytes] = {}
    for part in job.spec.tasks:
        pooling, choice = best.best[part.name]
        fitted: LinearMap = refit(best.rows[part.name], best.layer, pooling, choice)
        card = {
            "format": FORMAT,
            "task": part.name,
            "labels": list(part.labels),
            "kind": "document",
            "question": None,
            "pooling": POOLINGS[pooling],
            "layer": layer,
            **read_as(job),
        }
        files[part.name.partition(".")[2]] = readout_file({layer: fitted}, card)
    digest = sha256_hex(b"".join(files.values()), 16)
    store = open_store(spec.output, spec.storage_options)
    folder = fitted_key(task.name, digest).removesuffix(".safetensors")
    for name, data in files.items():
        store.create(part_file(folder, name) if name else f"{folder}.safetensors", data)
    key = folder if task.kind == "multi" else f"{folder}.safetensors"
    return Taught(key, best.max_tokens, layer, best.cost)
