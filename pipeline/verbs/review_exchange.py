"""Documents and people's labels to and from other annotation tools.

Entry points: `export_review` and `import_review`, beside a gold file (`gold.people`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.gold.files import read_gold_rows
from pipeline.gold.people import GoldFile, GoldLine
from pipeline.hashes import parse_json
from pipeline.ledger.columns import RAW, probabilities
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.keys import spec_key
from pipeline.ledger.snapshots import contents, last_snapshot
from pipeline.review import argilla, label_studio, tables
from pipeline.review.exchange import PLACE, Lines, Origin, Record, new_lines
from pipeline.review.options import ExchangeOptions, ReviewOptions, ReviewTool
from pipeline.runtime.fitted_files import options_for
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.named_files import Target, new_file
from pipeline.stores.store import Store, open_store
from pipeline.verbs.review_documents import documents_with, drawn_documents, of_another_corpus

logger = logging.getLogger(__name__)

_P_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ExportedReview:
    """What an export wrote. Also its JSON form."""

    file: str
    settings: str | None  # the file with the tool's labelling interface or settings
    tool: ReviewTool
    task: str
    documents: int
    answers: int  # of people
    predictions: int  # documents with an answer of the model


@dataclass(frozen=True, slots=True)
class ImportedReview:
    """What an import added to the gold file. Also its JSON form."""

    to: str
    tool: ReviewTool
    task: str
    added: int
    known: int  # answers that the gold file had
    people: Mapping[str, int]  # the added answers of each


def export_review(
    spec: JobSpec, review: ReviewOptions, options: ExchangeOptions, *, cache_dir: Path
) -> ExportedReview:
    """Writes documents without an answer in the gold file, or without `documents` those with one.

    The same options on the same corpus, gold file and snapshot give the same bytes.

    Raises:
        SpecError: A file exists, an option is wrong, or the gold file is of another corpus.
        StorageError: The input or the output cannot be read, or the file cannot be written.
    """
    task, store = _task(spec, review), open_store(spec.output, spec.storage_options)
    if spec.input.image is not None:
        fix = "only texts are exported, and the documents of this spec are images"
        raise SpecError([Problem("input.image", fix, spec.input.image)])
    tool = options.tool
    target, settings = _targets(spec, options, tool)
    with _gold_file(review.to, task) as gold:
        answers = _by_document(gold.answers.values(), with_flags=tool in ("jsonl", "csv"))
        known = {line.content_hash for line in gold.answers.values()}
    if options.documents is None:
        documents = documents_with(spec, answers.keys(), seed=review.seed, cache_dir=cache_dir)
        if missing := sorted(answers.keys() - documents.keys()):
            raise option_error("to", of_another_corpus(len(missing), len(answers)), review.to)
        chosen = [documents[text_hash] for text_hash in answers]
    else:
        chosen = drawn_documents(
            spec, options.documents, without=known, seed=review.seed, cache_dir=cache_dir
        )
        answers = {}
    if not chosen:
        fix = "no document has an answer; add --documents N to export documents to answer"
        fix = "every document has an answer already" if options.documents else fix
        raise option_error("to", fix, review.to)
    p = _predictions(spec, store, task, [document.hash for document in chosen])
    wording = task.question, tuple(task.labels)
    records = []
    for document in chosen:
        fp, own_p = p.get(document.hash, (None, None))
        lines = tuple(answers.get(document.hash, ()))
        own = document.doc_id, document.hash, task.name, *wording
        records.append(Record(Origin(*own, fp, own_p, lines), document.text))
    if settings is not None:
        interface = tool == "label-studio"
        make = label_studio.interface_xml if interface else argilla.settings_json
        settings.write(make(task))
    target.write(_file(records, task, tool))
    return ExportedReview(
        file=target.url,
        settings=None if settings is None else settings.url,
        tool=tool,
        task=task.name,
        documents=len(records),
        answers=sum(map(len, answers.values())),
        predictions=len(p),
    )


def import_review(
    spec: JobSpec, review: ReviewOptions, options: ExchangeOptions, *, cache_dir: Path
) -> ImportedReview:
    """Appends the answers in a file of another tool to the gold file, each once.

    Raises:
        SpecError: The file is of another task, corpus or wording, has a label that the task does
            not have, or two answers of one person for a document. Nothing is written.
        StorageError: A file cannot be read or written.
    """
    task, tool = _task(spec, review), options.tool
    lines = list(_lines(spec, options, task))
    with _gold_file(review.to, task) as gold:
        added = new_lines(lines, gold, task)
        documents = documents_with(spec, added.keys(), seed=review.seed, cache_dir=cache_dir)
        missing = [text_hash for text_hash in added if text_hash not in documents]
        if missing:
            place, _ = added[missing[0]]
            raise SpecError([Problem(place, of_another_corpus(len(missing), len(added)))])
        new = [line for _, of_document in added.values() for line in of_document]
        for line in new:
            gold.append(line)
    people = dict(Counter(line.by for line in new))
    return ImportedReview(review.to, tool, task.name, len(new), len(lines) - len(new), people)


def _task(spec: JobSpec, review: ReviewOptions) -> TaskSpec:
    """The task; SpecError if the spec does not have it, or an option is for the page."""
    usual = ReviewOptions(review.task, review.to, seed=review.seed)
    for field in fields(review):
        if (value := getattr(review, field.name)) != getattr(usual, field.name):
            fix = "is an option of the page; leave it out with --export and --import"
            raise option_error(field.name, fix, value)
    own = next((task for task in spec.tasks if task.name == review.task), None)
    if own is None:
        fix = f"the spec has no such task; it has {', '.join(task.name for task in spec.tasks)}"
        raise option_error("task", fix, review.task)
    return own


@contextmanager
def _gold_file(path: str, task: TaskSpec) -> Iterator[GoldFile]:
    """The gold file, which after an error does not exist if it did not exist before."""
    is_new = not Path(path).exists()
    with GoldFile.open(path, task) as gold:
        try:
            yield gold
        finally:
            if is_new and not gold.lines:
                Path(path).unlink()


def _targets(
    spec: JobSpec, options: ExchangeOptions, tool: ReviewTool
) -> tuple[Target, Target | None]:
    """The file to write, and the file with the tool's settings if it has such a file."""
    assert options.export is not None, options
    ending = {"label-studio": ".interface.xml", "argilla": ".settings.json"}.get(tool)
    names = [options.export]
    if ending is not None:
        names.append(options.export.removesuffix(".json") + ending)
    try:
        target, *others = (
            new_file(name, options_for(name, spec), overwrite=options.overwrite) for name in names
        )
    except SpecError as error:
        raise SpecError([replace(p, place=Option("export")) for p in error.problems]) from error
    return target, others[0] if others else None


def _file(records: Iterable[Record], task: TaskSpec, tool: ReviewTool) -> bytes:
    match tool:
        case "label-studio":
            return label_studio.tasks_json(records, task)
        case "argilla":
            return argilla.records_json(records, task)
        case _:
            return tables.table(records, task, tool)


def _lines(spec: JobSpec, options: ExchangeOptions, task: TaskSpec) -> Lines:
    """The answers in the file of an import."""
    path, now = options.import_file or "", datetime.now(UTC).isoformat(timespec="seconds")
    if options.tool in ("jsonl", "csv"):
        storage = options_for(path, spec)
        rows = read_gold_rows(path, options.tool, storage, option=PLACE)
        return tables.read_table(rows, task, now, options.person)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise option_error(PLACE, f"cannot be read: {error.strerror}", path) from error
    if options.tool == "argilla":
        return argilla.read_records(data, path, task, now)
    return label_studio.read_tasks(data, path, task)


def _by_document(answers: Iterable[GoldLine], *, with_flags: bool) -> dict[str, list[GoldLine]]:
    """The answers of each document; without flags for a tool that has none."""
    of_document: dict[str, list[GoldLine]] = {}
    for line in answers:
        if with_flags or line.action != "flag":
            of_document.setdefault(line.content_hash, []).append(line)
    return of_document


def _predictions(
    spec: JobSpec, store: Store, task: TaskSpec, hashes: list[str]
) -> dict[str, tuple[str, dict[str, float]]]:
    """The last snapshot's answers to these texts, by content hash: fingerprint and probabilities.

    None if the snapshot has no answers to the question and the labels as they are now.
    """
    number = last_snapshot(store, spec.name)
    snapshot = None if number is None else contents(store, number)
    answered = None if snapshot is None else snapshot.tasks.get(task.name)
    if snapshot is None or answered is None or answered.labels != tuple(task.labels):
        return {}
    asked = parse_json(store.read(spec_key(task.name, answered.fp))).get("task")
    if isinstance(asked, dict) and asked.get("question", task.question) != task.question:
        return {}
    known: dict[str, tuple[str, dict[str, float]]] = {}
    texts = pa.array(hashes, pa.string())
    dataset = LabelDataset(store, snapshot, (task.name,))
    for batch in dataset.to_batches(columns=["content_hash", task.name]):
        rows = batch.filter(pc.is_in(batch.column("content_hash"), value_set=texts))
        p = probabilities(rows.column(task.name), RAW, tuple(task.labels))
        for text_hash, own in zip(rows.column("content_hash").to_pylist(), p, strict=True):
            if not np.isnan(own).any():
                values = (round(value, _P_DIGITS) for value in own.tolist())
                known[text_hash] = answered.fp, dict(zip(task.labels, values, strict=True))
    return known
