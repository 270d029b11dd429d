"""What a model would say about documents, in place of the labels. Entry point: `continuations`.

The models of the spec are loaded in this process, without Ray. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from pipeline.filters.excerpts import Excerpt
from pipeline.inference.images import as_document
from pipeline.inference.model.alone import PromptAlone, greedy_alone
from pipeline.inference.model.loaded import plain_attention
from pipeline.ledger.columns import STAGE
from pipeline.runtime.assembly import DocumentReader, reader_model, reader_prompt
from pipeline.runtime.job import Job, Step, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.progress import LOADING, Send, WorkerReport
from pipeline.sources.documents import OK, TRUNCATED
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.verbs.exactness import by_own_engine
from pipeline.verbs.export import Continuation, Token

MOST_TOKENS = 12  # of a continuation


def continuations(
    spec: JobSpec,
    rows: pa.RecordBatch,  # with the columns of the tasks
    documents: Sequence[Excerpt],  # [rows]: whole texts
    *,
    cache_dir: Path,
    announce: Send,
) -> tuple[tuple[Continuation, ...], ...]:  # [rows]
    """The greedy continuation of each question to a language model, from the first chunk of a text.

    The questions are those of the spec now. AssayError if a model cannot be loaded.
    """
    job = make_job(spec, place(spec.model, this_machine()), cache_dir)
    by_task: dict[tuple[int, str], list[Continuation]] = {}
    asked: dict[int, list[tuple[int, Step]]] = {}  # by reader: which rows, in which steps
    for row, answers in enumerate(rows.to_pylist()):
        for task in spec.tasks:
            step = _deciding(job.steps, task.name, answers[task.name].get(STAGE))
            if reason := _unasked(step.asked, answers[task.name]["status"]):
                by_task[row, task.name] = [Continuation(task.name, (), reason)]
            else:
                asked.setdefault(step.reader, []).append((row, step))
    for number, of_reader in asked.items():
        for row, step, own in _of_reader(job, number, of_reader, documents, announce):
            by_task.setdefault((row, step.task), []).append(own)
    return tuple(
        tuple(own for task in spec.tasks for own in by_task[row, task.name])
        for row in range(rows.num_rows)
    )


def _deciding(steps: Sequence[Step], task: str, stage: int | None) -> Step:
    """The step that gave an answer; of a cascade the last one, where none is named."""
    own = [step for step in steps if step.task == task]
    return own[(stage or len(own)) - 1]


def _unasked(asked: TaskSpec, status: str) -> str | None:
    """Why no language model was asked; None if one was."""
    if status not in (OK, TRUNCATED):
        return f"no answer: {status}"
    if asked.readout is not None:
        return "a readout answers from a state of the model, and no words are read"
    return "a classifier answers, which has no words" if asked.question is None else None


def _of_reader(
    job: Job,
    number: int,
    asked: Sequence[tuple[int, Step]],
    documents: Sequence[Excerpt],
    announce: Send,
) -> Iterator[tuple[int, Step, Continuation]]:
    """The continuations of one model, which is loaded once."""
    reader = by_own_engine(job.readers[number])
    steps = {step.task: step for _, step in asked}
    parts = [part for step in steps.values() for part in step.asked.parts]
    folder, tokenizer, prompt = reader_prompt(reader, parts, send=announce)
    announce(WorkerReport(LOADING))
    model = reader_model(reader, folder, kv="none")
    tokenise = DocumentReader.of(reader, folder, tokenizer).chunks
    questions = {question.name: question for question in prompt.questions}
    for row, step in asked:
        document = documents[row]
        chunks, status = tokenise(document.text, OK, document.image)
        for part in step.asked.parts:
            if not chunks:
                yield row, step, Continuation(part.name, (), f"no answer: {status}")
                continue
            own = as_document(chunks[0], document.image)
            alone = PromptAlone(prompt.prefix, own, questions[part.name].token_ids)
            with plain_attention(model.network):
                tokens = greedy_alone(model, alone, most=MOST_TOKENS)
            texts = ((str(tokenizer.decode([token])), p) for token, p in tokens)
            yield row, step, Continuation(part.name, tuple(Token(*each) for each in texts), None)
