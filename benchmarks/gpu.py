"""Speed on a GPU: models of three sizes, and `assay run` beside its engine.

    python -m benchmarks.gpu [--parts NAME ...] [--cpu-twin]

The models have the shapes of public ones and random weights: nothing is downloaded. The questions
are those of `jobs/specs/eight_questions.yaml`, the documents are synthetic. `--cpu-twin` measures a
tiny model without a GPU.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
import torch
import transformers
import yaml
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from pipeline.inference.alternatives import expand, tree_flops
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.options import RunOptions
from pipeline.runtime.assembly import memory_plan
from pipeline.runtime.progress import Progress
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec, spec_of
from pipeline.verbs.bench import Turn, matmul_flops, take_turns

SPEC = Path(__file__).parents[1] / "jobs" / "specs" / "eight_questions.yaml"
SHARDS, RUN_LIMIT_S = 16, 90  # of `assay run`
VOCABULARY = 2_000  # of the tokenizer, also where a model knows more tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is that is measured. The first model is also that of `assay run`."""

    device: str
    dtype: str
    models: Mapping[str, Mapping[str, Any]]  # the sizes by name, as transformers names them
    tokens: int  # of a document
    documents: int  # that one call of a method labels
    run_s: float  # of labelling in `assay run`
    batching: Mapping[str, int] = field(default_factory=dict)  # limits of continuous batching


def qwen(
    family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int
) -> dict[str, Any]:
    """The sizes of a Qwen model, in the words of its configuration."""
    return {
        "model_type": family,
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        **more,
    }


QWEN = {
    "0.6B": qwen("qwen3", 1_024, 3_072, layers=28, heads=16, kv_heads=8),  # Qwen3-0.6B
    "1.5B": qwen("qwen2", 1_536, 8_960, layers=28, heads=12, kv_heads=2),  # Qwen2.5-1.5B
    "4B": qwen("qwen3", 2_560, 9_728, layers=36, heads=32, kv_heads=8),  # Qwen3-4B
}
TINY = {"tiny": qwen("qwen3", 64, 128, 2, 4, 2, head_dim=16, vocab_size=VOCABULARY)}
GPU = Scale("cuda", "bfloat16", QWEN, tokens=1_000, documents=256, run_s=25)
LIMITS = {"num_blocks": 32, "max_batch_tokens": 256}
TWIN = Scale("cpu", "float32", TINY, tokens=60, documents=3, run_s=0.2, batching=LIMITS)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; None for what does not apply or cannot be measured here."""

    part: str
    method: str
    documents_per_s: float | None = None
    product_share: float | None = None  # the tree's arithmetic, over the best rate of products
    peak_bytes: int | None = None  # above the weights
    note: str = ""
    error: str = ""  # why it was not measured


def main(*, parts: tuple[str, ...] = (), cpu_twin: bool = False) -> int:
    """Print each measurement on one GPU as a line of JSON; exit code 1 if one failed.

    Parameters
    ----------
    parts
        The parts to measure: the size of a model, or `run` (default: all).
    cpu_twin
        Measure a tiny model on the CPU, to try the script itself.
    """
    scale = TWIN if cpu_twin else GPU
    if not cpu_twin and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; --cpu-twin needs none", file=sys.stderr)
        return 2
    first, *others = scale.models
    names = [first, "run", *others]
    if unknown := set(parts) - set(names):
        print(f"--parts: there is no {sorted(unknown)}; choose from {names}", file=sys.stderr)
        return 2
    # — with the package `kernels`, transformers would look for flash attention on the Hub
    os.environ.update({"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    failed = False
    for row in (row for part in parts or names for row in measure(scale, part)):
        print(json.dumps(asdict(row)), flush=True)
        failed |= bool(row.error)
    return int(failed)


def measure(scale: Scale, part: str) -> Iterator[Row]:
    """The measurements of one part. What cannot be measured has its error, and the others go on."""
    setup = Setup.of(scale, part)
    device = torch.cuda.get_device_name() if scale.device == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    yield Row(part, "device", note=f"{device}, {os.cpu_count()} cores, {versions}")
    tree = attempted(part, "tree", partial(tree_row, setup))
    yield tree
    if part == "run":
        if tree.documents_per_s is not None:
            yield attempted(part, "assay run", partial(run_row, setup, tree.documents_per_s))
        return
    some = setup.documents[:64]
    for batch in (8, 32):
        method = f"expand, {batch} at once"
        ask = partial(expand, setup.model, setup.prompt, some, batch=batch)
        yield attempted(part, method, partial(timed_row, setup, method, ask, len(some)))
    yield attempted(part, "continuous batching", partial(batching_row, setup))


def attempted(part: str, method: str, row: Callable[[], Row]) -> Row:
    """The row, or one with the error."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return row()
    except Exception as error:  # the other methods are still measured
        traceback.print_exc()
        return Row(part, method, error=f"{type(error).__name__}: {error}".partition("\n")[0])


@dataclass(frozen=True, slots=True)
class Setup:
    """A model with random weights on the device, and what it is measured with."""

    scale: Scale
    part: str
    model: LoadedModel
    tokenizer: Any
    prompt: PromptTokens
    documents: Sequence[DocumentIds]
    product_flops: float  # the best rate of plain products, FLOP a second

    @classmethod
    def of(cls, scale: Scale, part: str) -> Setup:
        sizes = scale.models.get(part, next(iter(scale.models.values())))
        network, spec = random_network(scale, sizes), load_spec(SPEC)
        asked = [task.question or "" for task in spec.tasks]
        answers = [text for task in spec.tasks for texts in task.labels.values() for text in texts]
        tokenizer = trained_tokenizer([*asked, *answers])
        encode = DocumentTokenizer(tokenizer).encode
        documents = [encode(t)[: scale.tokens] for t in texts(scale.tokens, scale.documents)]
        prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
        model = prepare(network)
        return cls(scale, part, model, tokenizer, prompt, documents, matmul_flops(model))

    def row(self, method: str, documents_per_s: float, **more: Any) -> Row:
        """The row of a method at this speed."""
        flops = documents_per_s * tree_flops(self.model, self.prompt, self.scale.tokens)
        share = flops / self.product_flops
        return Row(self.part, method, documents_per_s, product_share=share, **more)


def tree_row(setup: Setup) -> Row:
    """The engine as a run uses it; ArithmeticError if an answer is not a number."""
    batch_tokens = memory_plan(setup.model, setup.prompt).max_batch_tokens
    engine = LabelEngine(setup.model, setup.prompt, max_batch_tokens=batch_tokens)
    labelled = engine.label(setup.documents)
    if not all(np.isfinite(log_probs).all() for log_probs in labelled.log_probs):
        raise ArithmeticError("an answer is not a number")
    row = timed_row(setup, "tree", partial(engine.label, setup.documents), len(setup.documents))
    kernel = "fused kernel" if setup.model.kernel else "no fused kernel"
    return replace(row, note=f"{batch_tokens:,} tokens a batch, {kernel}")


def timed_row(setup: Setup, method: str, ask: Callable[[], object], documents: int) -> Row:
    """The median of three calls, which ask about this many documents each."""
    timed = take_turns({method: Turn(ask, documents, rounds=3, warm_up=True)})[method]
    return setup.row(method, 1 / timed.median, peak_bytes=timed.peak_bytes)


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
    new_token: Any = transformers.GenerationConfig
    limits: Any = transformers.ContinuousBatchingConfig
    started = network.continuous_batching_context_manager(
        new_token(max_new_tokens=1, do_sample=False, eos_token_id=-1),
        timeout=30,
        continuous_batching_config=limits(**setup.scale.batching),
    )
    with plain_attention(network, "sdpa"), started as manager:
        attention = network.config._attn_implementation
        generate(manager, prompts[:half])
        start_s = time.monotonic()
        generate(manager, prompts[half:])
        end_s = time.monotonic()
    note = f"attention {attention}; its cache takes the free memory"
    return setup.row("continuous batching", documents / (end_s - start_s), note=note)


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


def run_row(setup: Setup, tree_documents_per_s: float) -> Row:
    """`assay run` between its first and its last commit; RuntimeError if there are not two."""
    commits: list[tuple[float, int]] = []  # time in seconds, documents committed by then

    def announced(progress: Progress) -> None:
        if progress.committed > (commits[-1][1] if commits else 0):
            commits.append((time.monotonic(), progress.committed))

    with tempfile.TemporaryDirectory() as name:
        content = written_job(setup, Path(name), tree_documents_per_s)
        torch.nn.Module.to(setup.model.network, "cpu")  # — the worker needs the device's memory
        limit = RunOptions(max_hours=RUN_LIMIT_S / 3600)
        run(spec_of(content), cache_dir=Path(name, "cache"), options=limit, announce=announced)
    if len(commits) < 2:
        raise RuntimeError(f"fewer than two shards were labelled in {RUN_LIMIT_S} s")
    (start_s, before), (end_s, documents) = commits[0], commits[-1]
    rate = (documents - before) / (end_s - start_s)
    note = f"{rate / tree_documents_per_s:.0%} of the tree's documents/s"
    return setup.row("assay run", rate, note=note)


def written_job(setup: Setup, folder: Path, documents_per_s: float) -> dict[str, Any]:
    """The content of a spec, whose model and corpus are written to the folder."""
    setup.model.network.save_pretrained(folder / "model")
    setup.tokenizer.save_pretrained(folder / "model")
    scale, some = setup.scale, texts(setup.scale.tokens, 64)
    count = SHARDS * max(2, int(documents_per_s * scale.run_s / SHARDS))
    rows = ({"id": str(i), "text": f"{i} {some[i % len(some)]}"} for i in range(count))
    lines = [json.dumps(row) + "\n" for row in rows]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(lines))
    shard_bytes = sum(map(len, lines)) // SHARDS
    return {
        **yaml.safe_load(SPEC.read_text()),
        "model": {"path": str(folder / "model"), "device": scale.device, "dtype": scale.dtype},
        "input": {"path": str(corpus), "id": "id", "shard_bytes": shard_bytes},
        "output": str(folder / "out"),
        "documents": {"max_tokens": scale.tokens, "too_long": "head"},
    }


def random_network(scale: Scale, sizes: Mapping[str, Any]) -> Any:
    """The model with random weights, on the device."""
    torch.manual_seed(0)
    of_config: Any = transformers.AutoModelForCausalLM
    with torch.device(scale.device):  # — random numbers for 4B weights take minutes on a CPU
        config = transformers.AutoConfig.for_model(**sizes)
        return of_config.from_config(config, dtype=getattr(torch, scale.dtype))


def trained_tokenizer(prompts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer that writes the prompts' words as few tokens."""
    trained = ByteLevelBPETokenizer()
    lines = [*list(prompts) * 50, *texts(1_000, 10)]
    trained.train_from_iterator(
        lines, VOCABULARY, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    made = fast(tokenizer_object=Tokenizer.from_str(trained.to_str()), eos_token="<|im_end|>")
    made.chat_template = CHAT_TEMPLATE
    return made


def texts(words: int, count: int) -> list[str]:
    """Synthetic texts, each of this many words, so of at least as many tokens."""
    random_ = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    known = ["".join(random_.choices(syllables, k=random_.randint(1, 3))) for _ in range(2_000)]
    # — few words are frequent, as in a language
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    return [" ".join(random_.choices(known, weights, k=words)) for _ in range(count)]


if __name__ == "__main__":
    cyclopts.run(main)
