"""Speed on a GPU: the tests that need one, three sizes of model, and `assay run` beside its engine.

    python -m benchmarks.gpu [--to FILE] [--seconds S] [--parts NAME ...] [--cpu-twin]

The models have the shapes of public ones and random weights: nothing is downloaded. The questions
are those of `jobs/specs/eight_questions.yaml`, the documents are synthetic. The GPU's busy share
needs the package nvidia-ml-py. Each part is a process of its own. Without a GPU, `--cpu-twin` takes
the same path with a tiny model.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
import psutil
import torch
import transformers
import yaml
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from benchmarks.busy import busy_samples, busy_while, mean_between
from benchmarks.parts import Ended, in_process, in_turn, named
from benchmarks.synthetic import GPU, TWIN, Scale, random_network, texts, trained_tokenizer
from pipeline.inference.alternatives import expand, tree_flops
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.options import RunOptions
from pipeline.runtime.assembly import memory_plan
from pipeline.runtime.progress import Progress
from pipeline.spec.parse import load_spec, spec_of
from pipeline.verbs.bench import Turn, matmul_flops, take_turns

REPOSITORY = Path(__file__).parents[1]
SPEC = REPOSITORY / "jobs" / "specs" / "eight_questions.yaml"
SHARDS, RUN_LIMIT_S = 16, 90  # of `assay run`
# What an H200 is to reach, by part and method.
TARGETS = {
    ("0.6B", "tree"): "370 documents/s",
    ("1.5B", "tree"): "55 % of products",
    ("run", "assay run"): "busy 95 %",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; None for what does not apply or cannot be measured here."""

    part: str
    method: str
    documents_per_s: float | None = None
    tokens_per_s: float | None = None  # of the documents, each counted once
    product_flops: float | None = None  # the best rate of plain products, FLOP a second
    product_share: float | None = None  # the tree's arithmetic in this time, over that rate
    busy: float | None = None  # share of the time in which the device (or processor) works
    peak_bytes: int | None = None  # above the weights
    note: str = ""


def main(
    *,
    to: Path | None = None,
    seconds: float = 525,
    parts: tuple[str, ...] = (),
    cpu_twin: bool = False,
) -> int:
    """Measure everything on one GPU and print one table; the exit code is 1 if a part ended early.

    Parameters
    ----------
    to
        A JSON file for the table.
    seconds
        Time for all parts together. Parts for which too little is left are named.
    parts
        The parts to measure (default: all).
    cpu_twin
        Measure a tiny model on the CPU, to try the script itself.
    """
    scale = TWIN if cpu_twin else GPU
    if not cpu_twin and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; --cpu-twin needs none", file=sys.stderr)
        return 2
    names = [part.name for part in scale.parts]
    if unknown := set(parts) - set(names):
        print(f"--parts: there is no {sorted(unknown)}; choose from {names}", file=sys.stderr)
        return 2
    # — with the package `kernels`, transformers would look for flash attention on the Hub
    os.environ.update({"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    chosen = [part for part in scale.parts if not parts or part.name in parts]
    run_part = partial(in_process, partial(measure, scale))
    results: list[Any] = []  # of Row and Ended
    for result in in_turn(chosen, run_part, budget_s=seconds):
        print(result, file=sys.stderr, flush=True)
        results.append(result)
        if to is not None:  # — each time: whoever ends the script keeps what there is
            to.write_text(json.dumps([asdict(each) for each in results], indent=1))
    print(table(results))
    return int(any(isinstance(result, Ended) for result in results))


def table(results: Sequence[Row | Ended]) -> str:
    """One line for each measurement, with its target, then what ended early."""
    head = "part", "method", "docs/s", "tokens/s", "products", "busy", "peak GB", "target", "note"
    lines = [head]
    for row in (each for each in results if isinstance(each, Row)):
        figures = (
            _text(row.documents_per_s, ",.2f"),
            _text(row.tokens_per_s, ",.0f"),
            _text(row.product_share, ".1%"),
            _text(row.busy, ".1%"),
            _text(row.peak_bytes and row.peak_bytes / 1e9, ",.2f"),
        )
        target = TARGETS.get((row.part, row.method), "")
        lines.append((row.part, row.method, *figures, target, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    ended = [f"{each.part}: {each.reason}" for each in results if isinstance(each, Ended)]
    return "\n".join([*text, *ended])


def _text(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)


def measure(scale: Scale, part: str) -> Iterator[Row | Ended]:
    """The measurements of one part."""
    if part == "tests":
        yield tests_row(scale)
        return
    setup = set_up(scale, part)
    yield Row(part, "device", note=device_note(scale))
    if part == "run":
        yield from run_rows(setup)
        return
    yield attempted(part, "tree", partial(tree_row, setup))
    some = setup.documents[:64]
    for batch in (8, 32):
        method = f"expand, {batch} at once"
        ask = partial(expand, setup.model, setup.prompt, some, batch=batch)
        yield attempted(part, method, partial(timed_row, setup, method, ask, len(some)))
    yield attempted(part, "continuous batching", partial(batching_row, setup))


def attempted(part: str, method: str, row: Callable[[], Row]) -> Row | Ended:
    """The row; if it cannot be measured, the error: the other methods are still measured."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return row()
    except Exception as error:
        traceback.print_exc()
        return Ended(f"{part}, {method}", named(error))


def tests_row(scale: Scale) -> Row:
    """The outcome of the tests that need a GPU; RuntimeError if one fails or none ran."""
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, *scale.tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    *_, summary = ["no output", *done.stdout.strip().splitlines()]
    if done.returncode or (scale.device == "cuda" and not re.search(r"\d+ passed", summary)):
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: {summary}")
    return Row("tests", "pytest -m gpu", note=summary)


def device_note(scale: Scale) -> str:
    """What is measured on, and with which libraries."""
    name = f"{psutil.cpu_count()} cores"
    if scale.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = (
            f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {name}"
        )
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on the device, and the workload that it is measured with."""

    scale: Scale
    part: str
    model: LoadedModel
    tokenizer: PreTrainedTokenizerFast
    prompt: PromptTokens
    documents: Sequence[DocumentIds]

    def engine(self) -> LabelEngine:
        """An engine with the batch size of a run."""
        batch_tokens = memory_plan(self.model, self.prompt).max_batch_tokens
        return LabelEngine(self.model, self.prompt, max_batch_tokens=batch_tokens)

    def product_flops(self) -> float:
        hidden = int(self.model.network.config.hidden_size)
        return matmul_flops(hidden, self.model.device, self.model.network.dtype)

    def row(self, method: str, documents_per_s: float, product_flops: float, **more: Any) -> Row:
        floor_s = tree_flops(self.model, self.prompt, self.scale.tokens) / product_flops
        return Row(
            self.part,
            method,
            documents_per_s=documents_per_s,
            tokens_per_s=documents_per_s * self.scale.tokens,
            product_flops=product_flops,
            product_share=documents_per_s * floor_s,
            **more,
        )


def set_up(scale: Scale, part: str) -> Setup:
    """The part's model, the questions of the spec, and synthetic documents."""
    network = random_network(scale, scale.run_model if part == "run" else part)
    spec = load_spec(SPEC)
    asked = [task.question or "" for task in spec.tasks]
    answers = [text for task in spec.tasks for texts in task.labels.values() for text in texts]
    tokenizer = trained_tokenizer([*asked, *answers])
    encode = DocumentTokenizer(tokenizer).encode
    documents = [encode(text)[: scale.tokens] for text in texts(scale.tokens, scale.documents)]
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    return Setup(scale, part, prepare(network), tokenizer, prompt, documents)


def tree_row(setup: Setup) -> Row:
    """The engine as a run uses it; ArithmeticError if an answer is not a number."""
    engine = setup.engine()
    labelled = engine.label(setup.documents)
    if not all(np.isfinite(log_probs).all() for log_probs in labelled.log_probs):
        raise ArithmeticError("an answer is not a number")
    row = timed_row(setup, "tree", partial(engine.label, setup.documents), len(setup.documents))
    kernel = "fused kernel" if setup.model.kernel else "no fused kernel"
    rate = f"products {(row.product_flops or 0) / 1e12:,.2f} TFLOP/s"
    return replace(row, note=f"{rate}, {engine.max_batch_tokens:,} tokens a batch, {kernel}")


def timed_row(setup: Setup, method: str, ask: Callable[[], object], documents: int) -> Row:
    """The median of three calls, which ask about this many documents each."""
    before = setup.product_flops()
    timed = take_turns({method: Turn(ask, documents, rounds=3, warm_up=True)})[method]
    busy = busy_while(ask, setup.scale.device, setup.scale.window_s, setup.scale.settle_s)
    rate = max(before, setup.product_flops())
    return setup.row(method, 1 / timed.median, rate, busy=busy, peak_bytes=timed.peak_bytes)


def batching_row(setup: Setup) -> Row:
    """transformers' continuous batching: one new token for each document and question."""
    network: Any = setup.model.network
    documents = min(32, len(setup.documents) // 2)  # in each of two calls: the first warms it up
    prompts = [
        [*setup.prompt.prefix, *document, *question.token_ids]
        for document in setup.documents[: 2 * documents]
        for question in setup.prompt.questions
    ]
    half = len(prompts) // 2
    rate = setup.product_flops()  # — before the cache takes the memory
    on_gpu = setup.scale.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    weights_bytes = torch.cuda.memory_allocated()  # 0 without a GPU
    new_token: Any = GenerationConfig
    limits: Any = ContinuousBatchingConfig
    started = network.continuous_batching_context_manager(
        new_token(max_new_tokens=1, do_sample=False, eos_token_id=-1),
        timeout=30,
        continuous_batching_config=limits(**setup.scale.batching),
    )
    with plain_attention(network, "sdpa"), started as manager:
        attention = network.config._attn_implementation
        generate(manager, prompts[:half])
        with busy_samples(setup.scale.device) as samples:
            start_s = time.monotonic()
            generate(manager, prompts[half:])
            end_s = time.monotonic()
    return setup.row(
        "continuous batching",
        documents / (end_s - start_s),
        rate,
        busy=mean_between(samples, start_s, end_s),
        peak_bytes=torch.cuda.max_memory_allocated() - weights_bytes if on_gpu else None,
        note=f"attention {attention}; its cache takes the free memory",
    )


def generate(manager: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Generates one token below each prompt; RuntimeError if one of them has none."""
    manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=1)
    left = len(prompts)
    while left:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended; its error is above")
        if result is not None and result.is_finished():
            if result.error is not None or len(result.generated_tokens) != 1:
                raise RuntimeError(f"a prompt has no answer: {result.error}")
            left -= 1


def run_rows(setup: Setup) -> Iterator[Row | Ended]:
    """The bare engine, then `assay run` on a folder with the same model and questions."""
    with tempfile.TemporaryDirectory() as folder:
        setup.model.network.save_pretrained(f"{folder}/model")
        setup.tokenizer.save_pretrained(f"{folder}/model")
        bare = attempted("run", "tree", partial(tree_row, setup))
        yield bare
        if isinstance(bare, Row):
            torch.nn.Module.to(setup.model.network, "cpu")  # — the worker needs the device's memory
            yield attempted("run", "assay run", partial(run_row, setup, Path(folder), bare))


def run_row(setup: Setup, folder: Path, bare: Row) -> Row:
    """`assay run` between its first and its last commit; RuntimeError if there are not two."""
    from pipeline.runtime.run import run  # — the other parts do not need Ray

    scale = setup.scale
    in_shard = max(2, int((bare.documents_per_s or 0) * scale.run_s / SHARDS))
    some = texts(scale.tokens, 64)
    lines = [
        json.dumps({"id": str(i), "text": f"{i} {some[i % len(some)]}"}) + "\n"
        for i in range(in_shard * SHARDS)
    ]
    (folder / "corpus.jsonl").write_text("".join(lines))
    content = {
        **yaml.safe_load(SPEC.read_text()),
        "model": {"path": f"{folder}/model", "device": scale.device, "dtype": scale.dtype},
        "input": {
            "path": f"{folder}/corpus.jsonl",
            "id": "id",
            "shard_bytes": sum(map(len, lines)) // SHARDS,
        },
        "output": f"{folder}/out",
        "documents": {"max_tokens": scale.tokens, "too_long": "head"},
    }
    commits: list[tuple[float, int]] = []  # time in seconds, documents committed by then

    def announced(progress: Progress) -> None:
        print(f"{progress.phase}: {progress.committed} documents committed", file=sys.stderr)
        if progress.committed > (commits[-1][1] if commits else 0):
            commits.append((time.monotonic(), progress.committed))

    with busy_samples(scale.device) as samples:
        outcome = run(
            spec_of(content),
            cache_dir=folder / "cache",
            options=RunOptions(max_hours=RUN_LIMIT_S / 3600),
            announce=announced,
        )
    if len(commits) < 2:
        raise RuntimeError(f"fewer than two shards were labelled in {RUN_LIMIT_S} s: {outcome}")
    (start_s, before), (end_s, documents) = commits[0], commits[-1]
    rate = (documents - before) / (end_s - start_s)
    assert bare.documents_per_s and bare.product_flops, bare
    return setup.row(
        "assay run",
        rate,
        bare.product_flops,
        busy=mean_between(samples, start_s, end_s),
        note=f"{rate / bare.documents_per_s:.0%} of the tree's documents/s; {documents:,} "
        f"documents in {outcome.seconds:.0f} s with the start",
    )


if __name__ == "__main__":
    cyclopts.run(main)
