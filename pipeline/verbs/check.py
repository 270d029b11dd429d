"""Tests a spec before a run: storage, model, prompts, labels, exactness.

Entry points: `check`, and `take_samples` for a few documents of a corpus, as the model reads them.
Everything runs in this process, without Ray.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import computed_field
from transformers import PreTrainedTokenizerBase

from pipeline.errors import Problem, RefusedError, SpecError, StorageError, option_error
from pipeline.inference.engine import DocumentIds
from pipeline.inference.images import as_document
from pipeline.inference.labels.label_tokens import is_fragment
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import context_tokens
from pipeline.inference.memory import MemoryPlan
from pipeline.runtime.assembly import DocumentReader, reader_prompt
from pipeline.runtime.fitted_files import load_readouts
from pipeline.runtime.job import Reader, make_job, make_reader
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import LISTING, Send, WorkerReport, ignore
from pipeline.sources.documents import OK, images_of
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.labels import SLOT, with_slot
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, Store, check_create_only, open_store
from pipeline.verbs.doubts import check_doubts
from pipeline.verbs.exactness import Difference, Exactness, Proof, prove

DEFAULT_DOCUMENTS = 4
READ_IDS = 10_000  # at least; fewer if the input has fewer rows


@dataclass(frozen=True, slots=True)
class SampledDocument:
    """A document as the model reads it; of a long document in chunks, the first."""

    doc_id: str
    token_ids: DocumentIds


@dataclass(frozen=True, slots=True)
class Prompt:
    """The canonical prompt of one document for one task, or for one label of the kind `multi`."""

    doc_id: str
    task: str  # `TASK.LABEL` of the kind `multi`
    text: str
    token_ids: tuple[int, ...]
    labels: dict[str, list[int]]  # first tokens
    verbalizers: dict[str, list[list[int]]] | None  # all tokens, if full labels are scored


@dataclass(frozen=True, slots=True)
class ReadoutFacts:
    """A trained readout, checked against its task."""

    path: str
    sha256: str
    kind: str
    pooling: str
    layer: int  # where it is read
    layers: tuple[int, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What the answers to one task are read from."""

    fragments: Mapping[str, str]  # label -> its first token, where that is ambiguous
    mass: float | None  # largest of the documents; None without documents, or a readout


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The model, and how it is computed."""

    name: str  # as the spec has it
    path: str  # folder
    engine: str
    dtype: str
    rounded_to: str | None  # int8 or fp8, in which its linear layers multiply
    kv: str
    device: str
    context_tokens: int
    chat_template: bool
    processor: Mapping[str, str]  # what computes products and attention; empty of vLLM


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a check, and the proof."""

    output: str
    documents: int
    model: CheckedModel
    label_tokens: dict[str, dict[str, list[str]]]  # part of a task -> label -> first tokens as text
    readouts: dict[str, ReadoutFacts]  # by part of a task, for those with a trained readout
    prompts: tuple[Prompt, ...]
    memory: MemoryPlan | None  # None: vLLM plans its own
    exactness: Exactness
    quantization: Difference | None  # against the model without quantisation; None if it has none
    answers: Mapping[str, AnswerFacts]  # by part of a task
    repeated_ids: int  # documents that share their id with another; of the first `ids_read`
    ids_read: int
    usual: Mapping[str, str]  # by task of kind `multi`: its question, if it does not have {label}

    @computed_field
    @property
    def warnings(self) -> tuple[str, ...]:
        """Each reason why ids or answers may be unreliable."""
        return tuple(check_doubts(self))


def check(
    spec: JobSpec, *, cache_dir: Path, documents: int | None, announce: Send = ignore
) -> Findings:
    """Try every part of the spec once; AssayError names the first part that cannot work.

    `announce` is called with the report of each phase.
    """
    if documents is not None and documents < 0:
        raise option_error("documents", "write a number, or 0 for none", documents)
    store = open_store(spec.output, spec.storage_options)
    _prove_create_only(store)
    announce(WorkerReport(LISTING))
    placement = place(spec.model, this_machine())
    planned = plan(make_job(spec, placement, cache_dir), store, keep=False)
    own = make_reader(spec, placement, cache_dir)
    folder, tokenizer, prompt = reader_prompt(own, send=announce)
    count = DEFAULT_DOCUMENTS if documents is None else documents
    reader = DocumentReader.of(own, folder, tokenizer)
    samples = take_samples(planned.shards, reader, spec, count)
    paths = {part.name: str(part.readout) for part in own.spec.parts}
    documents_ids = [sample.token_ids for sample in samples]
    repeated, ids_read = _repeated_ids(planned.shards, spec)
    label_tokens = _label_tokens(tokenizer, prompt)
    proof = prove(own, folder, prompt, documents_ids, announce)
    return Findings(
        output=store.url,
        documents=planned.rows,
        model=_checked_model(own, folder, tokenizer, proof),
        label_tokens=label_tokens,
        readouts={
            task: ReadoutFacts(
                path=paths[task],
                sha256=own.readouts[task],
                kind=readout.card.kind,
                pooling=readout.card.pooling,
                layer=readout.card.layer,
                layers=tuple(readout.layers),
                labels=readout.card.labels,
            )
            for task, readout in load_readouts(own.readouts, own.spec, cache_dir).items()
        },
        prompts=tuple(
            _prompt(tokenizer, prompt, sample, question)
            for sample in samples[:1]
            for question in prompt.questions
        ),
        memory=proof.memory,
        exactness=proof.exactness,
        quantization=proof.quantization,
        answers=_answer_facts(own.spec, prompt, proof, label_tokens),
        repeated_ids=repeated,
        ids_read=ids_read,
        usual=_usual_questions(own.spec),
    )


def _usual_questions(spec: JobSpec) -> dict[str, str]:
    """By task of kind `multi` its question as it is asked, if the spec's has no `{label}`."""
    several = ((t.name, t.question) for t in spec.model_tasks if t.kind == "multi" and t.question)
    return {name: with_slot(asked) for name, asked in several if SLOT not in asked}


def _checked_model(
    reader: Reader, folder: Path, tokenizer: PreTrainedTokenizerBase, proof: Proof
) -> CheckedModel:
    model = reader.spec.model
    return CheckedModel(
        name=model.name,
        path=str(folder),
        engine=model.engine,
        dtype=reader.placement.dtype,
        rounded_to=model.rounded_to,
        kv=model.kv,
        device=reader.placement.device,
        context_tokens=context_tokens(folder),
        chat_template=bool(tokenizer.chat_template),
        processor=proof.processor,
    )


def _repeated_ids(shards: Sequence[Shard], spec: JobSpec) -> tuple[int, int]:
    """How many of the first documents have the id of another one, and how many were read.

    Without a column of ids none is read: the id is then the hash of the text.
    """
    if spec.input.id is None:
        return 0, 0
    tables = (t for shard in shards for t in read_documents(shard, spec.input.storage_options))
    ids: list[str] = []
    for table in tables:
        ids += table.column("doc_id").to_pylist()
        if len(ids) >= READ_IDS:
            break
    return sum(count for count in Counter(ids).values() if count > 1), len(ids)


def _answer_facts(
    spec: JobSpec,
    prompt: PromptTokens,
    proof: Proof,
    label_tokens: Mapping[str, Mapping[str, Sequence[str]]],
) -> dict[str, AnswerFacts]:
    facts = {}
    for task, question, answers in zip(
        spec.model_parts, prompt.questions, proof.answers, strict=True
    ):
        tokens = label_tokens.get(task.name, {}) if question.scores_first_tokens else {}
        fragments = {
            label: first[0]
            for label, first in tokens.items()
            if all(is_fragment(token, task.labels[label]) for token in first)
        }
        by_document, mass = np.array([*answers]), None
        if len(by_document) and task.readout is None:
            mass = float(np.exp(by_document).sum(axis=1).max())
        facts[task.name] = AnswerFacts(fragments, mass)
    return facts


def _prove_create_only(store: Store) -> None:
    """As a run does, but with a key of its own. Deletes what it made, also new local folders."""
    made: list[Path] = []
    if isinstance(store, LocalStore):
        made = [folder for folder in (store.root, *store.root.parents) if not folder.exists()]
    key = f"{PROBE_KEY}-{uuid.uuid4().hex}"
    try:
        check_create_only(store, key=key)
        store.delete([key])
    except RefusedError:
        with suppress(StorageError):  # the first error is more specific
            store.delete([key])
        raise
    finally:
        for folder in made:
            with suppress(OSError):  # another process has put something there
                folder.rmdir()


def _label_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptTokens
) -> dict[str, dict[str, list[str]]]:
    return {
        question.name: {
            label: [str(tokenizer.decode([token_id])) for token_id in token_ids]
            for label, token_ids in question.first_tokens.items()
        }
        for question in prompt.questions
        if question.suffixes  # labels of a trained readout have no tokens
    }


def _prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: PromptTokens,
    sample: SampledDocument,
    question: Question,
) -> Prompt:
    token_ids = (*prompt.prefix, *sample.token_ids, *question.token_ids)
    text = str(tokenizer.decode(list(token_ids)))
    verbalizers = None
    if not question.scores_first_tokens:
        pairs = zip(question.labels, question.trie.verbalizers, strict=True)
        verbalizers = {label: [list(path) for path in paths] for label, paths in pairs}
    return Prompt(sample.doc_id, question.name, text, token_ids, question.first_tokens, verbalizers)


def take_samples(
    shards: Sequence[Shard], reader: DocumentReader, spec: JobSpec, count: int
) -> list[SampledDocument]:
    """Up to `count` readable documents, from shards at even distances over the corpus.

    Shards are opened until there are enough documents, and no more of a shard is read than is
    taken. SpecError if no document can be read.
    """
    step = max(1, len(shards) // max(1, count))
    spread = shards[::step]
    further_shards = [shard for number, shard in enumerate(shards) if number % step]
    samples: list[SampledDocument] = []
    for number, shard in enumerate([*spread, *further_shards]):
        if len(samples) >= count:
            break
        share = -(-(count - len(samples)) // max(1, len(spread) - number))
        samples += islice(_readable(shard, reader, spec), share)
    if count and not samples:
        documents = next(read_documents(shards[0], spec.input.storage_options))
        text, status = (documents.column(name)[0].as_py() for name in ("text", "status"))
        _, reason = reader.chunks(text, status, next(images_of(documents)))
        content, key, column = "readable text", "input.text", spec.input.text
        if spec.input.image is not None:
            content, key, column = "a readable image", "input.image", spec.input.image
        fix = f"no document has {content} in this column (the first row: "
        fix += f"{reason.removeprefix('error:')}); name another column, or correct the files"
        raise SpecError([Problem(key, fix, column)])
    return samples


def _readable(shard: Shard, reader: DocumentReader, spec: JobSpec) -> Iterator[SampledDocument]:
    for documents in read_documents(shard, spec.input.storage_options):
        columns = (documents.column(name) for name in ("doc_id", "text", "status"))
        for doc_id, text, status, image in zip(*columns, images_of(documents), strict=True):
            if status.as_py() != OK:
                continue
            pieces, _ = reader.chunks(text.as_py(), OK, image)
            if pieces:  # otherwise a run writes a row with the reason
                yield SampledDocument(doc_id.as_py(), as_document(pieces[0], image))
