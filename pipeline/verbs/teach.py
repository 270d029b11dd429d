"""Readouts of early layers, fitted to the whole model's answers about a sample: `teach`.

The document's states are read at a few layers and, where documents are long, also of their first
tokens alone. The cheapest place is that which saves the most, by the rule that the held-out answers
of the same rows would prove.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from pipeline.evaluation.promises import Bools, Judged
from pipeline.evaluation.readout_fitting import STRENGTHS, Choice, GoldStates, choose, refit
from pipeline.fitted.certificate import Certificate
from pipeline.fitted.readout import LinearMap, readout_file
from pipeline.gold.labels import Gold, GoldCounts
from pipeline.gold.values import GoldTask
from pipeline.hashes import sha256_hex
from pipeline.ledger.keys import fitted_key
from pipeline.runtime.job import in_format, make_job
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.weights import locate
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.fit import FORMAT, SUFFIX
from pipeline.verbs.gold_states import POOLINGS, ReadGold, read_as, read_gold_states
from pipeline.verbs.uniform_sample import Floats, Ints, Sample

logger = logging.getLogger(__name__)

LAYERS = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 1 / 2)  # of the decoder's depth
LAST = 1.0  # of a model that a larger one teaches
FIRST_TOKENS = 256
# If the median document has this number of tokens, readouts of the first tokens are tried, too.
LONG = 2 * FIRST_TOKENS


@dataclass(frozen=True)
class Texts:
    """The texts that readouts are fitted to: the first half of a sample. Their states are read
    once, for all tasks.
    """

    sample: Sample
    tokens: Ints  # [texts], that the whole model read; 0 without an answer
    placement: Placement  # of an engine
    has_teacher: bool = False  # whether another model than the spec's answers a task
    _read: dict[int | None, ReadGold] = field(default_factory=dict)  # by `max_tokens`

    @cached_property
    def texts(self) -> tuple[str, ...]:
        return self.sample.texts(self.tokens > 0)

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """How many tokens of a document a readout may read; None: as many as the spec says."""
        documents = self.sample.spec.documents
        if documents.too_long == "chunk":  # — a readout reads one chunk
            return (min(FIRST_TOKENS, documents.max_tokens),)
        is_long = np.median(self.tokens[self.tokens > 0]) >= LONG
        return (None, FIRST_TOKENS) if is_long else (None,)

    def states(self, max_tokens: int | None) -> ReadGold:
        """The states of the documents at these layers; its kinds are `POOLINGS`."""
        if max_tokens not in self._read:
            documents = f"{len(self.texts):,} documents"
            part = "" if max_tokens is None else f", the first {max_tokens} tokens"
            logger.info("reading %s of the sample at early layers%s", documents, part)
            reads, cache_dir = self.reading(max_tokens), self.sample.cache_dir
            layers = (*LAYERS, LAST) if self.has_teacher else LAYERS
            call = partial(_states, reads, self.placement.dtype, cache_dir, self.texts, layers)
            self._read[max_tokens] = self.sample.where_engines_run(call, self.placement)
        return self._read[max_tokens]

    def size_beside(self, task: CascadeTask) -> float:
        """The size of the spec's model, as a share of that of the model which answers the task.

        Beside a server it is 0: its price counts.
        """
        own, teacher = self.sample.spec.model, task.whole.model
        if teacher is None:
            return 1.0
        of_own, of_teacher = (locate(m, self.sample.cache_dir).size_bytes for m in (own, teacher))
        return of_own / of_teacher if of_teacher else 0.0

    def reading(self, max_tokens: int | None) -> JobSpec:
        """The spec, of a job that reads the documents alone."""
        documents = self.sample.spec.documents
        documents = documents if max_tokens is None else documents.part(max_tokens)
        task = QuestionTask(name="states", labels={"a": ("a",), "b": ("b",)})
        own = self.sample.spec.model_copy(update={"tasks": (task,), "documents": documents})
        return in_format(own, self.placement.dtype)


def _states(
    spec: JobSpec,
    dtype: str,
    cache_dir: Path,
    texts: tuple[str, ...],
    layers: Sequence[float],  # shares of the depth
) -> ReadGold:
    """The states of the texts, read by this machine."""
    [task], rows = spec.tasks, len(texts)
    counts = GoldCounts("the sample", "content_hash", rows)
    any_label = GoldTask(tuple(task.labels), np.zeros(rows, np.int64))
    return read_gold_states(
        make_job(spec, replace(place(spec.model, this_machine()), dtype=dtype), cache_dir),
        Gold(counts, tuple(map(str, range(rows))), {task.name: any_label}, texts),
        [task.name],
        layers=None,
        shares=layers,
    )


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
    texts: Texts, task: CascadeTask, whole: Floats, judged: Judged, unproved: Certificate
) -> Certificate:
    """Fits readouts and writes the best one to the output: the certificate that names it.

    It has a reason, and no readout, if none saves anything. `whole` has the answers to imitate,
    [texts, labels]: NaN without one.
    """
    answered: Bools = np.asarray(~np.isnan(whole).any(axis=1), np.bool_)
    places = [
        each
        for most in texts.lengths
        for each in _places(texts, task, whole, answered, judged, most)
    ]
    best = max(places, key=lambda own: own.saved)
    if best.saved > 0:
        return _written(texts, task, best, unproved)
    reason = "no readout of an early layer is certain enough to save anything"
    return replace(unproved, reason=reason)


def _parts(task: CascadeTask) -> tuple[TaskSpec, ...]:
    """The tasks that a readout each is fitted for: one, or one of each label that may apply."""
    labels = {label: (label,) for label in task.labels}
    return QuestionTask(name=task.name, kind=task.kind, labels=labels, question="?").parts


def _targets(task: CascadeTask, whole: Floats) -> Iterator[tuple[str, Floats]]:
    """By part: [docs, labels of the part] the probabilities that a readout is fitted to."""
    if task.kind != "multi":
        yield task.name, whole
        return
    for part, p in zip(_parts(task), whole.T, strict=True):
        yield part.name, np.stack([p, 1 - p], axis=1)


def _places(
    texts: Texts,
    task: CascadeTask,
    whole: Floats,
    answered: Bools,
    judged: Judged,
    max_tokens: int | None,
) -> Iterator[_Place]:
    """The layers at which the states of the documents were read."""
    read = texts.states(max_tokens)
    usable = np.flatnonzero(answered[read.rows])  # of what was read
    own = whole[read.rows[usable]]
    states = {
        name: GoldStates(read.states, targets, read.groups[usable], usable)
        for name, targets in _targets(task, own)
    }
    with threadpool_limits(1, user_api="blas"):
        choices = {name: choose(of, STRENGTHS) for name, of in states.items()}
    tokens = texts.tokens[answered]
    share = 1.0 if max_tokens is None else np.minimum(tokens, max_tokens).sum() / tokens.sum()
    share *= texts.size_beside(task)
    for number, layer in enumerate(read.layers):
        best = {
            name: min(enumerate(of[number]), key=lambda each: each[1].loss)
            for name, of in choices.items()
        }
        held_out = [choice.held_out for _, choice in best.values()]
        p = held_out[0] if task.kind != "multi" else np.stack([x[:, 0] for x in held_out], axis=1)
        proof = judged.proof(judged.rules(judged.curves(p, own)), p[None], own)
        cost = layer / read.all_layers * float(share)
        yield _Place(read, max_tokens, number, cost, proof.decided - cost, states, best)


def _written(texts: Texts, task: CascadeTask, best: _Place, unproved: Certificate) -> Certificate:
    """Fits at the best place to all rows, and writes the files, whose names are their hash."""
    # — no document is read here, so that this machine may lack what the model needs
    cpu, spec = Placement("cpu", texts.placement.dtype, actors=1, threads=1), texts.sample.spec
    job = make_job(texts.reading(best.max_tokens), cpu, texts.sample.cache_dir)
    layer = best.read.layers[best.layer]
    files: dict[str, bytes] = {}  # by label of the kind `multi`; of another kind by ""
    for part in _parts(task):
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
    for label, data in files.items():
        store.create(fitted_key(task.name, digest, label), data)
    key = fitted_key(task.name, digest)
    key = key.removesuffix(SUFFIX) if task.kind == "multi" else key
    most, cost = best.max_tokens, best.cost
    return replace(unproved, readout=key, max_tokens=most, layer=layer, cost=cost)
