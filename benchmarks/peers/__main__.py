"""assay beside vLLM, llama.cpp and OpenVINO GenAI, on the workloads of `benchmarks.bench`.

    python -m benchmarks.peers [SPEC] [--peers NAMES] [--workloads NAMES] [--rounds N] [--isa avx2]
        [--to FILE]

Each engine has an environment of its own, made on first use, and a process of its own with a thread
for each core. assay has the processes and threads of a run with work for all cores. Processes are
stopped while another engine is measured. All read the same token ids and the same weights. Ends
with exit code 1 if a peer has no figures, or other answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import cyclopts

from benchmarks.bench import (
    STANDARD,
    Workload,
    as_questions,
    shaped,
)
from benchmarks.peers.environments import PeerError, Worker, Workers
from benchmarks.peers.serve import Asked, Documents, Setup
from benchmarks.peers.turns import Row, measure
from benchmarks.timing import processor
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.runtime.assembly import DocumentReader, reader_prompt
from pipeline.runtime.job import make_job
from pipeline.runtime.limits import usable_cores
from pipeline.runtime.placement import EngineBytes, place, spread, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.model import ModelSpec
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store
from pipeline.verbs.check import take_samples

REFERENCE = "assay:float32"
PEERS = (
    REFERENCE, "assay:bfloat16", "assay:int8", "vllm:float32", "vllm:bfloat16",
    "llama_cpp:float32", "llama_cpp:q8_0", "openvino:float32", "openvino:int8",
)  # fmt: skip
# Variables that hold torch, oneDNN (of torch and of OpenVINO), MKL and the kernels of assay to an
# instruction set, for figures of older processors. llama.cpp is built for the processor it is on.
HELD = {
    "avx2": {
        "ASSAY_KERNELS": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
_MUCH_WORK = 1_000_000  # shards
CACHE = Path.home() / ".cache" / "assay-peers"


def main(
    spec: str = "jobs/specs/eight_questions.yaml",
    *,
    peers: tuple[str, ...] = (),
    workloads: tuple[str, ...] = (),
    rounds: int = 3,
    documents: int | None = None,
    isa: Literal["avx2"] | None = None,
    cache: Path = CACHE,
    to: Path | None = None,
) -> int:
    """Measure the peers in turns, and print one row for each workload and peer.

    Parameters
    ----------
    spec
        The spec of the questions, the corpus and the model.
    peers
        Engines with a number format, as `vllm:float32` (default: all that the processor has).
    workloads
        As `1000x8`: tokens of a document x questions (default: those of `benchmarks.bench`).
    rounds
        Number of rounds. A ratio is the median of the rounds, with the least and the greatest.
    documents
        Documents of a round (default: those of `benchmarks.bench`).
    isa
        Instruction set that every engine is held to; only float32 is measured, without llama.cpp.
    cache
        Folder for the environments and the engines' own forms of the weights.
    to
        File for all measurements, as JSON.
    """
    cache.mkdir(parents=True, exist_ok=True)
    setup, prompt, stream = _read(spec, cache)
    processes, _ = _of_a_run(setup)
    standard = {_name(workload, len(prompt.questions)): workload for workload in STANDARD}
    if unknown := set(workloads) - set(standard):
        sys.exit(f"--workloads: write some of {', '.join(standard)} (got {', '.join(unknown)})")
    dtype = place(ModelSpec(path=setup.folder, device="cpu"), this_machine()).dtype
    native = [peer for peer in PEERS if dtype == "bfloat16" or "bfloat16" not in peer]
    if isa is not None:
        os.environ |= HELD[isa]  # — which the engines' processes inherit
        native = [peer for peer in PEERS if "float32" in peer and "llama_cpp" not in peer]
    rows: list[Row] = []
    with ExitStack() as stack:
        started, failed, versions = {}, {}, {}
        for name in dict.fromkeys([REFERENCE, *(peers or native)]):
            engine, _, number_format = name.partition(":")
            try:
                workers = start(engine, replace(setup, number_format=number_format), cache, stack)
            except PeerError as error:
                failed[name] = str(error)
                continue
            started[name], versions[engine] = workers, workers.version
        machine = {
            "processor": processor(),
            "held to": isa or "nothing",
            "cores": usable_cores(),
            "processes of assay": processes,
            "versions": versions,
        }
        print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
        print(f"{'workload':14}{'peer':20}{'s/document':>10}  x assay [interval]  largest |dp|")
        text = cycle(stream)
        for name in workloads or standard:
            failed_rows = [Row(name, peer, failure=reason) for peer, reason in failed.items()]
            workload = standard[name]
            asked = _asked(prompt, workload, stream)
            count = documents or workload.documents
            count += -count % processes  # as many for each process
            of_rounds = next_rounds(text, workload.tokens, count, rounds + 1)
            measured = measure(started, name, asked, of_rounds)
            print(*measured, *failed_rows, sep="\n", flush=True)
            rows += [*measured, *failed_rows]
    if to:
        to.write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))
    failures = [f"{row.workload} {row.peer}: {row.failure}" for row in rows if row.failure]
    print(*failures, sep="\n")
    return int(bool(failures))


def _read(spec_file: str, cache: Path) -> tuple[Setup, PromptTokens, list[int]]:
    """What engines are loaded with, the spec's prompt, and the tokens of its corpus."""
    spec = load_spec(spec_file)
    job = make_job(spec, place(spec.model, this_machine()), cache)
    folder, tokenizer, prompt = reader_prompt(job.readers[0], as_questions(spec.tasks))
    shards = plan(job, open_store(spec.output, spec.storage_options), keep=False).shards
    samples = take_samples(shards, DocumentReader.of(job.readers[0], folder, tokenizer), spec, 256)
    gguf = job.readers[0].files.location if job.readers[0].files.kind == "gguf" else None
    made = cache / f"{folder.name}-files"
    made.mkdir(exist_ok=True)
    setup = Setup(str(folder), gguf, "float32", threads=usable_cores(), cache=str(made))
    return setup, prompt, [token for sample in samples for token in sample.token_ids]


def start(engine: str, setup: Setup, cache: Path, stack: ExitStack) -> Workers:
    """The processes of an engine, which end with the stack; PeerError where one cannot start."""
    processes, threads = _of_a_run(setup) if engine == "assay" else (1, setup.threads)
    workers = []
    for _ in range(processes):
        workers.append(Worker(engine, replace(setup, threads=threads), cache))
        stack.callback(workers[-1].close)
    return Workers(workers)


def _of_a_run(setup: Setup) -> tuple[int, int]:
    """The engines that a run with work for all cores places here, and the threads of each."""
    machine = this_machine()
    is_int8 = setup.number_format.startswith("int8")
    model = ModelSpec(path=setup.folder, device="cpu")  # — int8 is measured where a run refuses it
    weights = sum(file.stat().st_size for file in Path(setup.folder).glob("*.safetensors"))
    needs = EngineBytes(weights, 1024**3, 0, shares_weights=not is_int8)
    placed = spread(place(model, machine), model, machine, work_items=_MUCH_WORK, needs=[needs])
    return placed.actors, placed.threads


def _name(workload: Workload, questions: int) -> str:
    examples = f"+{workload.prefix}" * bool(workload.prefix)
    return f"{workload.tokens}x{workload.questions or questions}{examples}"


def _asked(prompt: PromptTokens, workload: Workload, stream: Sequence[int]) -> Asked:
    """The workload's questions, with the first tokens of all labels."""
    made = shaped(prompt, workload, stream)
    tokens = [sorted({t for own in q.first_tokens.values() for t in own}) for q in made.questions]
    return Asked(list(made.prefix), [list(q.token_ids) for q in made.questions], tokens)


def next_rounds(text: Iterator[int], tokens: int, documents: int, rounds: int) -> list[Documents]:
    """Documents of equal length: the next pieces of one endless text.

    A later workload goes on where the one before ended: engines with a prefix cache would have the
    documents that they have read.
    """
    return [[list(islice(text, tokens)) for _ in range(documents)] for _ in range(rounds)]


if __name__ == "__main__":
    app = cyclopts.App(help=__doc__)
    app.default(main)
    sys.exit(app())
