"""Continuations of 100 answers by 40 tokens, beside `generate` in padded batches.

    python -m benchmarks.continuations models/smollm2-135m-instruct.gguf

Rounds are in turns, with one thread; ratios are of the same round. `generate` gets each whole
prompt, padded on the left, in the batch size that is the fastest of those given. Tokens must be
equal. In 8 bits, memory and probabilities are compared with those of the model's own format.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pipeline.cache import cache_dir
from pipeline.inference.continuations import Continuation, ContinuationEngine
from pipeline.inference.labels.prompt_tokens import answered_suffixes
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.inference.memory import CPU_BATCH_TOKENS
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.runtime.assembly import local_files
from pipeline.runtime.weights import locate
from pipeline.spec.model import KeptFormat, ModelSpec
from pipeline.spec.parse import spec_of

CORPUS = Path("jobs/corpus/train.jsonl")
ROWS, TOKENS = 100, 40
KINDS: tuple[KeptFormat, ...] = ("none", "int8", "fp8")
TASK = {"name": "toxic", "question": "Is the text toxic?", "labels": ["Yes", "No"]}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder or GGUF file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 25, 100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = local_files(locate(ModelSpec(path=options.model), cache_dir()), cache_dir(), {})
    model, tokenizer = load_model(folder, dtype="float32", device="cpu"), load_tokenizer(folder)
    content = {"name": "n", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
    spec = spec_of({**content, "tasks": [TASK]})
    prefix, suffixes = answered_suffixes(tokenizer, spec.prompt, spec.tasks)
    encode = DocumentTokenizer(tokenizer).encode
    lines = CORPUS.read_text(encoding="utf-8").strip().split("\n")[:ROWS]
    texts = [
        (*encode(json.loads(line)["text"])[:400], *suffixes["toxic"][("Yes", "No")[row % 2]])
        for row, line in enumerate(lines)
    ]
    lengths = sorted(map(len, texts))
    print(
        f"{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):.0f}"
    )
    stop = model.network.generation_config.eos_token_id
    engines: dict[str, ContinuationEngine] = {
        kind: ContinuationEngine(
            replace(model, kv=kind),
            prefix,
            stop_ids=[stop] if isinstance(stop, int) else stop or [],
            max_batch_tokens=CPU_BATCH_TOKENS,
            max_kept_bytes=4 << 30,
        )
        for kind in KINDS
    }
    seconds: dict[str, list[float]] = {}
    decoded: dict[str, list[Continuation | None]] = {}
    for _ in range(options.rounds):
        for kind, engine in engines.items():
            started = time.perf_counter()
            decoded[kind] = engine.decode(texts, TOKENS)
            seconds.setdefault(kind, []).append(time.perf_counter() - started)
        for size in options.batches:
            started = time.perf_counter()
            generated = _generate(model, [(*prefix, *text) for text in texts], size)
            seconds.setdefault(f"generate {size}", []).append(time.perf_counter() - started)
    own = [list(each.token_ids) if each else [] for each in decoded["none"]]
    print(f"{sum(a == b for a, b in zip(own, generated, strict=True))} of {ROWS} equal generate's")
    for name, measured in seconds.items():
        ratio = median(t / plain for t, plain in zip(measured, seconds["none"], strict=True))
        own_engine = engines.get(name)
        kept = f", {own_engine.peak_kept_bytes / 1e6:.1f} MB" if own_engine else ""
        shown = f"{median(measured):6.2f} s, ratio {ratio:.3f}{kept}{_moved(name, decoded)}"
        print(f"  {name:12} {shown}", flush=True)


def _moved(name: str, decoded: dict[str, list[Continuation | None]]) -> str:
    """How far the probabilities of the first token moved, and how many texts are other ones."""
    if name in ("none", *(each for each in decoded if each not in KINDS)) or name not in decoded:
        return ""
    pairs = [(a, b) for a, b in zip(decoded[name], decoded["none"], strict=True) if a and b]
    first = max(abs(a.p[0] - b.p[0]) for a, b in pairs)
    other = sum(a.token_ids != b.token_ids for a, b in pairs)
    return f", max |dp| of the first token {first:.4f}, {other} of {len(pairs)} texts differ"


def _generate(model: LoadedModel, prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The tokens that `generate` gives, in batches of prompts of nearly equal length."""
    network: Any = model.network
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, list[int]] = {}
    stop = network.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    with plain_attention(network, "sdpa"), torch.inference_mode():
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            width = max(len(prompts[i]) for i in batch)
            ids = torch.tensor([[0] * (width - len(prompts[i])) + [*prompts[i]] for i in batch])
            mask = torch.tensor(
                [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch]
            )
            output = network.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
            )
            for i, row in zip(batch, output[:, width:].tolist(), strict=True):
                ends = [n for n, token in enumerate(row) if token in stops]
                results[i] = row[: ends[0] + 1] if ends else row
    return [results[i] for i in range(len(prompts))]


if __name__ == "__main__":
    main()
