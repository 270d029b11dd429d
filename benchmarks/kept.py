"""Kept keys and values in 8 bits: memory, time and answers, beside those in the model's own format.

    python -m benchmarks.kept models/smollm2-135m-instruct.gguf

Two workloads: an instruction with examples of 1,500 tokens above short documents, and documents of
4,000 tokens above a beam over 1,000 labels. Rounds are in turns; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from pipeline.cache import cache_dir
from pipeline.inference.attention.hook import PrefixKV
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.forward import prefill
from pipeline.runtime.assembly import local_files
from pipeline.runtime.weights import locate
from pipeline.spec.model import KeptFormat, ModelSpec
from pipeline.spec.parse import spec_of
from pipeline.verbs.exactness import difference

CORPUS = Path("jobs/corpus/train.jsonl")
KINDS: tuple[KeptFormat, ...] = ("none", "int8", "fp8")
TASK = {"name": "topic", "question": "What is it about?", "labels": ["sports", "politics", "work"]}
TOXIC = {"name": "toxic", "question": "Is the text toxic?", "labels": ["yes", "no"]}


def main() -> None:
    """Prints a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder or GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = local_files(locate(ModelSpec(path=options.model), cache_dir()), cache_dir(), {})
    model = load_model(folder, dtype="float32", device="cpu")
    tokenizer = load_tokenizer(folder)
    documents = DocumentTokenizer(tokenizer)
    texts = list(_texts())
    answers = ["yes", "no"]
    examples = [
        {"document": text[:600], "question": TOXIC["question"], "answer": answers[i % 2]}
        for i, text in enumerate(texts[:12])
    ]
    words = {"instruction": "Read the text, then answer the question.", "examples": examples}
    many = [f"topic {a}, {b}." for a in range(40) for b in range(25)]
    beam = {"name": "many", "question": "Which topic?", "labels": many, "beam": 16, "top_k": 10}
    for name, tasks, prompt_words, read in (
        ("examples above short documents", [TASK, TOXIC], words, texts[20:40]),
        ("a beam below long documents", [beam], {}, [" ".join(texts * 5)]),
    ):
        content = {"name": "n", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
        spec = spec_of({**content, "tasks": tasks, "prompt": prompt_words})
        prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
        ids = [documents.encode(text)[:4_000] for text in read]
        kept = prompt.prefix if prompt_words else (*prompt.prefix, *ids[0])
        print(f"{name}: {len(kept):,} tokens are kept")
        _compare(model, prompt, ids, kept, options.rounds)


def _compare(
    model: LoadedModel,
    prompt: PromptTokens,
    documents: Sequence[Sequence[int]],
    kept: Sequence[int],
    rounds: int,
) -> None:
    engines = {
        kind: LabelEngine(replace(model, kv=kind), prompt, max_batch_tokens=1_280) for kind in KINDS
    }
    answers = {kind: engine.label(documents).log_probs for kind, engine in engines.items()}
    seconds: dict[KeptFormat, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, engine in engines.items():
            started = time.perf_counter()
            engine.label(documents)
            seconds[kind].append(time.perf_counter() - started)
    for kind in KINDS:
        prefix = prefill(replace(model, kv=kind), kept)
        assert prefix is not None, kept
        pairs = zip(seconds[kind], seconds["none"], strict=True)
        ratio = median(own / plain for own, plain in pairs)
        rounding = difference(answers[kind], answers["none"])
        print(
            f"  {kind:5} {_bytes(prefix) / 1e6:7.1f} MB, {median(seconds[kind]):6.2f} s, "
            f"ratio {ratio:.3f}, max |dp| {rounding.max_abs_dp:.4f}, mean "
            f"{rounding.mean_abs_dp:.5f}, {rounding.argmax_flips} of {rounding.answers} flipped"
        )


def _bytes(prefix: PrefixKV) -> int:
    return sum(kv.nbytes for kv in prefix.layers.values())


def _texts() -> Iterator[str]:
    for line in CORPUS.read_text(encoding="utf-8").strip().split("\n"):
        yield json.loads(line)["text"]


if __name__ == "__main__":
    main()
