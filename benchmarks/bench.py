"""Measure the tree against other ways to ask the same questions, on this machine.

    python -m benchmarks.bench SPEC --json

Entry point: `bench`. All methods run in one process and take turns (`timing`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, groupby, islice
from pathlib import Path

import torch
from pydantic import computed_field

from benchmarks.methods import expand, per_label, tree_flops
from benchmarks.timing import Turn, matmul_flops, processor, take_turns
from pipeline.cache import cache_dir
from pipeline.cli.app import call, new_app, print_result, spec_in
from pipeline.cli.parameters import AsJson, SpecFile, with_flags
from pipeline.errors import Problem, SpecError, option_error, require_positive
from pipeline.inference.alternatives import per_question
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.model.loaded import LoadedModel
from pipeline.report.console import Grid, Part, printed
from pipeline.runtime.assembly import (
    DocumentReader,
    label_engine,
    memory_plan,
    reader_model,
    reader_prompt,
)
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.check import take_samples

BATCH = 8  # documents that the batched baseline expands in one forward
FEW_SHOT_TOKENS = 1_500


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The size of a bench."""

    rounds: int | None = None
    """Number of paired rounds (default: 3; 2 for the longest documents)."""
    tokens: int | None = None
    """Measure one workload with documents of this many tokens (default: the standard five)."""

    def __post_init__(self) -> None:
        require_positive(self, "rounds", "tokens")


@dataclass(frozen=True, slots=True)
class Workload:
    """Documents of one length, the number of questions, and the least length of the prefix."""

    tokens: int
    questions: int | None = None  # this many; None: the spec's own
    prefix: int = 0
    documents: int = 4
    rounds: int = 3
    methods: tuple[str, ...] = ("tree", "expand")


ALL_METHODS = ("tree", "expand", "per_question", "per_label")
STANDARD = (
    Workload(1_000, methods=ALL_METHODS),
    Workload(1_000, questions=16, methods=("tree",)),
    Workload(200, documents=16, methods=("tree", "expand", "expand_batched")),
    Workload(4_000, questions=32, documents=1, rounds=2),
    Workload(1_000, prefix=FEW_SHOT_TOKENS, documents=2),
)


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """The machine and the number format of the measurements."""

    processor: str
    threads: int
    device: str
    dtype: str
    rounded_to: str | None
    torch: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One method on one workload."""

    workload: str
    method: str
    document_tokens: int
    seconds_per_document: float  # the median of the rounds
    times_tree: float  # ratio to the tree's seconds: the median of paired rounds
    peak_bytes: int  # above the memory of the process before
    matmul_share: float  # rate of the tree's FLOP in this time, over the machine's own rate

    @computed_field
    @property
    def docs_per_s(self) -> float:
        return 1 / self.seconds_per_document

    @computed_field
    @property
    def tokens_per_s(self) -> float:
        """Tokens of the documents themselves, without prompts and repeated reads."""
        return self.document_tokens / self.seconds_per_document


@dataclass(frozen=True, slots=True)
class Bench:
    """All measurements of one bench."""

    machine: MeasuredMachine
    matmul_flops: float  # FLOP a second, the best of all workloads
    rows: tuple[Measurement, ...]


def bench(spec: JobSpec, options: BenchOptions, *, cache_dir: Path) -> Bench:
    """Measure the spec's model and questions on documents of its corpus, cut to equal length.

    With `options.tokens`, one workload of that length replaces the standard ones. Tasks with a
    readout are also asked as questions, if they have one; the method `readouts` is the spec itself.
    """
    if spec.input.image is not None:
        fix = "bench cuts texts to equal length, which images have not"
        raise SpecError([Problem("input.image", fix, spec.input.image)])
    tokens = options.tokens
    placement = place(spec.model, this_machine())
    job = make_job(spec, placement, cache_dir)
    folder, tokenizer, prompt = reader_prompt(job.readers[0], as_questions(spec.model_parts))
    store = open_store(spec.output, spec.storage_options)
    shards = plan(job, store, keep=False).shards
    samples = take_samples(shards, DocumentReader.of(job.readers[0], folder, tokenizer), spec, 64)
    disable_malloc_trim()
    model = reader_model(job.readers[0], folder)
    trained = None
    if job.readers[0].readouts:
        whole = tokenise_prompt(tokenizer, spec.prompt, spec.model_parts)
        trained = label_engine(job.readers[0], model, whole)
    workloads = STANDARD if tokens is None else (Workload(tokens, methods=ALL_METHODS),)
    possible = [workload for workload in workloads if fits(workload, prompt, model.context_tokens)]
    if not possible:
        room = max(prompt.room(model.context_tokens) - 1, 0)
        fix = f"the model's context has {room:,} beside the questions; write at most that"
        raise option_error("tokens", fix, tokens)
    if options.rounds is not None:
        possible = [replace(workload, rounds=options.rounds) for workload in possible]
    stream = [token for sample in samples for token in sample.token_ids]
    measured = [_measure(model, prompt, stream, workload, trained) for workload in possible]
    machine = MeasuredMachine(
        processor=processor(),
        threads=torch.get_num_threads(),
        device=placement.device,
        dtype=placement.dtype,
        rounded_to=spec.model.rounded_to,
        torch=torch.__version__,
    )
    rates, rows = zip(*measured, strict=True)
    return Bench(machine, max(rates), tuple(row for of_workload in rows for row in of_workload))


def as_questions(tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """The tasks as the model's own words answer them; SpecError where none has a question."""
    asked: list[TaskSpec] = [
        task.model_copy(update={"readout": None}) for task in tasks if task.question
    ]
    if not asked:
        fix = "the bench compares ways to ask questions; give at least one task a question"
        raise SpecError([Problem("tasks", fix, [task.name for task in tasks])])
    return asked


def fits(workload: Workload, prompt: PromptTokens, context: int) -> bool:
    """Whether the model reads a document of the workload with its prefix and any question."""
    prefix = max(len(prompt.prefix), workload.prefix)
    room = prompt.room(context) + len(prompt.prefix) - prefix - 1  # 1: it makes repeats differ
    return workload.tokens <= room


def _measure(
    model: LoadedModel,
    prompt: PromptTokens,
    stream: Sequence[int],
    workload: Workload,
    trained: LabelEngine | None,
) -> tuple[float, list[Measurement]]:
    """The machine's rate while it was measured, and one row a method."""
    asked = shaped(prompt, workload, stream)
    documents = equally_long(stream, workload.tokens, workload.documents)
    before = matmul_flops(model)
    turns = _turns(model, asked, documents, workload)
    if trained is not None and workload.questions is None and not workload.prefix:
        label = partial(trained.label, documents)
        turns["readouts"] = Turn(label, len(documents), workload.rounds, warm_up=True)
    timed = take_turns(turns)
    rate = max(before, matmul_flops(model))
    labels = sum(len(question.labels) for question in asked.questions)
    floor_seconds = tree_flops(model, asked, workload.tokens) / rate
    rows = [
        Measurement(
            workload=f"{workload.tokens:,} tokens x {len(asked.questions)} questions, {labels} "
            f"labels, {len(asked.prefix):,} before",
            method=method,
            document_tokens=workload.tokens,
            seconds_per_document=figures.median,
            times_tree=figures.times(timed["tree"]),
            peak_bytes=figures.peak_bytes,
            matmul_share=floor_seconds / figures.median,
        )
        for method, figures in timed.items()
    ]
    return rate, rows


def _turns(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds], workload: Workload
) -> dict[str, Turn]:
    planned = memory_plan(model, prompt)
    engine = LabelEngine(model, prompt, max_batch_tokens=planned.max_batch_tokens)
    # The slow methods' time for one document varies little, and is minutes.
    fast = partial(Turn, documents=len(documents), rounds=workload.rounds, warm_up=True)
    slow = partial(Turn, documents=1, rounds=1, warm_up=False)
    turns = {
        "tree": fast(partial(engine.label, documents)),
        "expand": fast(partial(expand, model, prompt, documents)),
        "expand_batched": fast(partial(expand, model, prompt, documents, batch=BATCH)),
        "per_question": slow(partial(per_question, model, prompt, documents[:1])),
        "per_label": slow(partial(per_label, model, prompt, documents[:1])),
    }
    return {method: turns[method] for method in workload.methods}


def shaped(prompt: PromptTokens, workload: Workload, stream: Sequence[int]) -> PromptTokens:
    """The prompt with the workload's number of questions and length of the prefix.

    Questions beyond the spec's repeat its own, each after a token that marks the repeat; a longer
    prefix continues with text of the corpus, like examples.
    """
    questions = []
    for i in range(workload.questions or len(prompt.questions)):
        repeat, place = divmod(i, len(prompt.questions))
        question = prompt.questions[place]
        mark = (stream[repeat % len(stream)],) * bool(repeat)
        token_ids = (*mark, *question.token_ids)
        questions.append(replace(question, name=f"q{i}", token_ids=token_ids))
    missing = max(0, workload.prefix - len(prompt.prefix))
    more = equally_long(stream, missing, 1)[0] if missing else []
    return PromptTokens((*prompt.prefix, *more), tuple(questions))


def equally_long(stream: Sequence[int], tokens: int, count: int) -> list[list[int]]:
    """`count` documents of exactly `tokens` tokens, made of the corpus's own in order."""
    endless = cycle(stream)
    return [list(islice(endless, tokens)) for _ in range(count)]


_COLUMNS: dict[str, Callable[[Measurement], str]] = {
    "method": lambda row: row.method,
    "s / document": lambda row: f"{row.seconds_per_document:.2f}",
    "docs / s": lambda row: f"{row.docs_per_s:.3f}",
    "tokens / s": lambda row: f"{row.tokens_per_s:,.0f}",
    "times assay": lambda row: f"{row.times_tree:.2f}",
    "peak MB": lambda row: f"{row.peak_bytes / 1e6:,.0f}",
    "share": lambda row: f"{row.matmul_share:.0%}",
}


@printed
def show_bench(bench: Bench) -> Iterator[Part]:
    """The machine, a table for each workload, and what the columns mean."""
    machine = bench.machine
    weights = f" with {machine.rounded_to} products" if machine.rounded_to else ""
    yield (
        f"{machine.processor}, {machine.threads} threads, {machine.dtype}{weights} on "
        f"{machine.device}, torch {machine.torch}"
    )
    for name, rows in groupby(bench.rows, key=lambda row: row.workload):
        yield Grid(name, tuple(_COLUMNS), [[f(row) for f in _COLUMNS.values()] for row in rows])
    yield (
        "tokens: those of the documents; times assay: median ratio of paired rounds; share: useful "
        "FLOP/s, as % of this machine's matmul peak, "
        f"{bench.matmul_flops / 1e9:,.0f} GFLOP/s"
    )


app = new_app("benchmarks.bench", "Measure the speed on this machine against other ways to ask.")


@app.default
@with_flags
def main(
    spec_file: SpecFile, /, *, options: BenchOptions = BenchOptions(), as_json: AsJson = False
) -> int:
    """Measure the speed on this machine against other ways to ask the same questions.

    The methods take turns, so that a noisy machine disturbs all of them alike.
    """
    with spec_in(spec_file) as spec:
        measured = bench(spec, options, cache_dir=cache_dir())
    return print_result(measured, show_bench, as_json=as_json)


if __name__ == "__main__":
    sys.exit(call(app))
