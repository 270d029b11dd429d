"""Measure the tree against what people do without one, in one process and in turns.

Knows how to time whole documents, count arithmetic and read the process's peak memory. Knows
nothing of how figures are shown. Ratios hold on a noisy machine because the methods take turns.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from pipeline.data.actor import batch_tokens, check_room, local_model
from pipeline.data.devices import place, this_machine
from pipeline.data.job import describe, plan
from pipeline.data.storage import open_store
from pipeline.inference.baselines import expand, per_label, per_question
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.flops import tree_flops
from pipeline.inference.loading import context_tokens, load_model, load_tokenizer
from pipeline.inference.model import LoadedModel
from pipeline.inference.tokens import PromptTokens, tokenise_prompt
from pipeline.samples import take_samples
from pipeline.spec import JobSpec

DEFAULT_ROUNDS = 3
DEFAULT_TOKENS = 1_000
# Documents a round: the slow methods' time for one document varies little, and is minutes.
DOCUMENTS = {"tree": 4, "expand": 4, "per_question": 1, "per_label": 1}
SLOW = ("per_question", "per_label")  # run in the first round only

Method = Callable[[Sequence[DocumentIds]], object]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    processor: str
    threads: int
    device: str
    dtype: str
    torch: str


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one workload."""

    workload: str
    method: str
    seconds_per_document: float  # the median of the rounds
    peak_bytes: int  # above what the process held before
    matmul_share: float  # the tree's arithmetic in this time, of the machine's own rate

    @property
    def docs_per_s(self) -> float:
        return 1 / self.seconds_per_document


@dataclass(frozen=True, slots=True)
class Bench:
    """All rows of one run of the bench."""

    machine: Machine
    matmul_flops: float  # a second
    rows: tuple[Row, ...]
    ratios: dict[str, float]  # seconds of a method / seconds of the tree, median of paired rounds


def bench(spec: JobSpec, *, cache_dir: Path, rounds: int | None, tokens: int | None) -> Bench:
    """The spec's model and questions on documents of its corpus, made equally long."""
    placement = place(spec.model, this_machine())
    job = describe(spec, placement, cache_dir)
    folder = local_model(job)
    tokenizer = load_tokenizer(folder)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    check_room(job, prompt, context_tokens(folder))
    shards = plan(job, open_store(spec.output, spec.storage_options)).shards
    length = DEFAULT_TOKENS if tokens is None else tokens
    samples = take_samples(shards, tokenizer, spec, 64)
    documents = equally_long([s.token_ids for s in samples], length, max(DOCUMENTS.values()))
    torch.set_num_threads(placement.threads)
    model = load_model(folder, dtype=placement.dtype, device=placement.device)
    engine = LabelEngine(model, prompt, max_batch_tokens=batch_tokens(placement.device))
    methods: dict[str, Method] = {
        "tree": engine.label,
        "expand": lambda batch: expand(model, prompt, batch),
        "per_question": lambda batch: per_question(model, prompt, batch),
        "per_label": lambda batch: per_label(model, prompt, batch),
    }
    seconds, peaks = _take_turns(methods, documents, DEFAULT_ROUNDS if rounds is None else rounds)
    rate = matmul_flops(model)
    needed = tree_flops(model, prompt, length)
    name = f"{length:,} tokens x {len(prompt.questions)} questions, {_labels(prompt)} labels"
    rows = tuple(
        Row(name, method, median, peaks[method], needed / median / rate)
        for method, median in ((m, statistics.median(s)) for m, s in seconds.items())
    )
    machine = Machine(
        _processor(), torch.get_num_threads(), placement.device, placement.dtype, torch.__version__
    )
    return Bench(machine, rate, rows, _ratios(seconds))


def equally_long(samples: Sequence[DocumentIds], tokens: int, wanted: int) -> list[list[int]]:
    """`wanted` documents of exactly `tokens` tokens, made of the corpus's own in order."""
    stream = [token for sample in samples for token in sample]
    repeats = -(-tokens * wanted // len(stream))
    stream *= repeats
    return [stream[i * tokens : (i + 1) * tokens] for i in range(wanted)]


def _take_turns(
    methods: dict[str, Method], documents: Sequence[DocumentIds], rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds a document in every round, and each method's highest memory."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    peaks = dict.fromkeys(methods, 0)
    for name in ("tree", "expand"):
        methods[name](documents[:1])  # warm-up
    for round_number in range(rounds):
        for name, method in methods.items():
            if round_number and name in SLOW:
                continue
            batch = documents[: DOCUMENTS[name]]
            with _peak_memory() as peak:
                started = time.perf_counter()
                method(batch)
                _synchronise()
                seconds[name].append((time.perf_counter() - started) / len(batch))
            peaks[name] = max(peaks[name], peak())
    return seconds, peaks


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {
        name: statistics.median(
            other / tree for other, tree in zip(of_method, seconds["tree"], strict=False)
        )
        for name, of_method in seconds.items()
        if name != "tree"
    }


def matmul_flops(model: LoadedModel) -> float:
    """The best rate of plain matrix products of the model's own shapes, in FLOP a second."""
    hidden = int(model.network.config.get_text_config().hidden_size)
    rows, inner = 4_096, 4 * hidden
    left = torch.randn(rows, hidden, device=model.device, dtype=model.network.dtype)
    right = torch.randn(hidden, inner, device=model.device, dtype=model.network.dtype)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        torch.mm(left, right)
        _synchronise()
        best = min(best, time.perf_counter() - started)
    return 2 * rows * hidden * inner / best


def _labels(prompt: PromptTokens) -> int:
    return sum(len(question.labels) for question in prompt.questions)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that tells how far memory rose inside the block, in bytes."""
    gc.collect()
    _release_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - held
        return
    process = psutil.Process()
    held = highest = process.memory_info().rss
    stopped = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stopped.wait(0.005):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: highest - held
    finally:
        stopped.set()
        watcher.join()


def _release_freed_memory() -> None:
    """Give freed memory back to the system, or the next method would seem to need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    lines = cpuinfo.read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
