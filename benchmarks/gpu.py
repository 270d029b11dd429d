"""Exactness and speed on a GPU: the engine, `assay run`, and vLLM.

    python -m benchmarks.gpu [--parts NAME ...] [--cpu-twin]

The models have the shapes of public ones and random weights: nothing is downloaded. The questions
are those of `jobs/specs/eight_questions.yaml`, the documents are synthetic. vLLM is measured where
it is installed. `--cpu-twin` measures a tiny model without a GPU.
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
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import cyclopts
import torch
import transformers
import yaml
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from benchmarks.methods import tree_flops
from benchmarks.timing import Turn, matmul_flops, take_turns
from pipeline.inference.engine import DocumentIds, Engine, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.vllm_engine import VllmOptions, load_vllm
from pipeline.options import RunOptions
from pipeline.runtime.assembly import memory_plan
from pipeline.runtime.progress import Progress
from pipeline.spec.parse import load_spec, spec_of
from pipeline.verbs.check import check
from pipeline.verbs.run import judged_run

SPEC = Path(__file__).parents[1] / "jobs" / "specs" / "eight_questions.yaml"
SHARDS, LIMIT = 16, RunOptions(max_hours=90 / 3600)  # of `assay run`
VOCABULARY = 2_000  # of the tokenizer, also where a model has more tokens


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is that is measured. The first model is also that of `assay run`."""

    device: str
    dtype: str
    models: Mapping[str, Mapping[str, Any]]  # the sizes by name, as transformers names them
    tokens: int  # of a document
    documents: int  # that one call of a method labels
    run_s: float  # of labelling in `assay run`


def qwen(
    family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int
) -> dict[str, Any]:
    """The sizes of a Qwen model, by the names of its configuration."""
    return {
        "model_type": family,
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": True,
        **more,
    }


QWEN = {
    "0.6B": qwen("qwen3", 1_024, 3_072, layers=28, heads=16, kv_heads=8),  # Qwen3-0.6B
    "1.5B": qwen("qwen2", 1_536, 8_960, layers=28, heads=12, kv_heads=2),  # Qwen2.5-1.5B
}
TINY = {"tiny": qwen("qwen3", 64, 128, 2, 4, 2, head_dim=32, vocab_size=VOCABULARY)}
GPU = Scale("cuda", "bfloat16", QWEN, tokens=1_000, documents=1_024, run_s=25)
TWIN = Scale("cpu", "float32", TINY, tokens=60, documents=3, run_s=0.2)


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
    names = [*scale.models, "run"]
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
    yield Row(part, "device", note=f"{device}, {os.cpu_count()} cores, torch {torch.__version__}")
    if part != "run":
        yield attempted(part, "exactness", partial(exactness_row, setup))
    yield (tree := attempted(part, "tree", partial(tree_row, setup)))
    if part == "run" and tree.documents_per_s is not None:
        yield attempted(part, "assay run", partial(run_row, setup, tree.documents_per_s))
    if part != "run" and find_spec("vllm"):
        yield attempted(part, "vllm", partial(vllm_row, setup))


def attempted(part: str, method: str, row: Callable[[], Row]) -> Row:
    """The row, or one with the error."""
    gc.collect()
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
    calls: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, scale: Scale, part: str) -> Setup:
        sizes = scale.models.get(part, next(iter(scale.models.values())))
        network, spec = random_network(scale, sizes), load_spec(SPEC)
        tokenizer = trained_tokenizer([f"{task.question} {task.labels}" for task in spec.tasks])
        encode = DocumentTokenizer(tokenizer).encode
        documents = [encode(t)[: scale.tokens] for t in texts(scale.tokens, scale.documents)]
        prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
        model = prepare(network)
        return cls(scale, part, model, tokenizer, prompt, documents, matmul_flops(model))

    def fresh(self) -> list[DocumentIds]:
        """The documents with another first token at each call, so that no cache has them."""
        first = next(self.calls)
        return [[first, *document[1:]] for document in self.documents]

    def row(self, method: str, documents_per_s: float, **more: Any) -> Row:
        """The row of a method at this speed."""
        flops = documents_per_s * tree_flops(self.model, self.prompt, self.scale.tokens)
        share = flops / self.product_flops
        return Row(self.part, method, documents_per_s, product_share=share, **more)


def exactness_row(setup: Setup) -> Row:
    """What `assay check` finds; ArithmeticError where rounding does not explain it."""
    with tempfile.TemporaryDirectory() as name:
        spec = spec_of(written_job(setup, Path(name), documents=SHARDS))
        proof = check(spec, cache_dir=Path(name, "cache"), documents=2).exactness
    assert proof is not None, "only a server's answers have no proof"
    note = f"p differs by {proof.max_abs_dp:.1e}, allowed {proof.allowed['max_abs_dp']:.1e}"
    if not proof.exact:
        raise ArithmeticError(note)
    return Row(setup.part, "exactness", note=note)


def tree_row(setup: Setup) -> Row:
    """The engine as a run uses it."""
    batch_tokens = memory_plan(setup.model, setup.prompt).max_batch_tokens
    engine = LabelEngine(setup.model, setup.prompt, max_batch_tokens=batch_tokens)
    note = f"batches of {batch_tokens:,}, fused kernel: {bool(setup.model.kernel)}"
    return replace(timed_row(setup, "tree", engine), note=note)


def timed_row(setup: Setup, method: str, engine: Engine) -> Row:
    """The median of three calls, which ask about all documents."""
    turn = Turn(lambda: engine.label(setup.fresh()), len(setup.documents), rounds=3, warm_up=True)
    timed = take_turns({method: turn})[method]
    return setup.row(method, 1 / timed.median, peak_bytes=timed.peak_bytes)


def vllm_row(setup: Setup) -> Row:
    """vLLM's answers to the same prompts; assay's model is outside the device's memory."""
    torch.nn.Module.to(setup.model.network, "cpu")
    options = VllmOptions(setup.scale.dtype, setup.scale.device, threads=os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as name:
        model = written_job(setup, Path(name), documents=SHARDS)["model"]["path"]
        engine = load_vllm(Path(model), setup.prompt, options, max_tokens=setup.scale.tokens)
        row = replace(timed_row(setup, "vllm", engine), note=engine.version, peak_bytes=None)
        engine.close()
    return row


def run_row(setup: Setup, tree_documents_per_s: float) -> Row:
    """`assay run` between its first and its last commit; RuntimeError if there are not two."""
    commits: list[tuple[float, int]] = []  # time in seconds, documents committed by then

    def announced(progress: Progress) -> None:
        if progress.committed > (commits[-1][1] if commits else 0):
            commits.append((time.monotonic(), progress.committed))

    with tempfile.TemporaryDirectory() as name:
        documents = SHARDS * max(2, int(tree_documents_per_s * setup.scale.run_s / SHARDS))
        content = written_job(setup, Path(name), documents=documents)
        torch.nn.Module.to(setup.model.network, "cpu")  # — the worker needs the device's memory
        cache = Path(name, "cache")
        judged_run(spec_of(content), cache_dir=cache, options=LIMIT, announce=announced)
    if len(commits) < 2:
        raise RuntimeError("fewer than two shards were labelled in time")
    (start_s, before), (end_s, documents) = commits[0], commits[-1]
    rate = (documents - before) / (end_s - start_s)
    return setup.row(
        "assay run", rate, note=f"{rate / tree_documents_per_s:.0%} of the tree's rate"
    )


def written_job(setup: Setup, folder: Path, *, documents: int) -> dict[str, Any]:
    """The content of a spec, whose model and corpus are written to the folder."""
    for part in (setup.model.network, setup.tokenizer):
        part.save_pretrained(folder / "model")
    scale, corpus_texts = setup.scale, texts(setup.scale.tokens, 64)
    rows = (
        {"id": str(i), "text": f"{i} {corpus_texts[i % len(corpus_texts)]}"}
        for i in range(documents)
    )
    lines = [json.dumps(row) + "\n" for row in rows]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(lines))
    return {
        **yaml.safe_load(SPEC.read_text()),
        "model": {"path": str(folder / "model"), "device": scale.device, "dtype": scale.dtype},
        "input": {"path": str(corpus), "id": "id", "shard_bytes": sum(map(len, lines)) // SHARDS},
        "output": str(folder / "out"),
        "documents": {"max_tokens": scale.tokens, "too_long": "head"},
    }


def random_network(scale: Scale, sizes: Mapping[str, Any]) -> Any:
    """The model with random weights, on the device."""
    torch.manual_seed(0)
    of_config: Any = transformers.AutoModelForCausalLM
    with torch.device(scale.device):  # — random numbers for 1.5B weights take minutes on a CPU
        config = transformers.AutoConfig.for_model(**sizes)
        return of_config.from_config(config, dtype=getattr(torch, scale.dtype))


def trained_tokenizer(prompts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer that writes the prompts' words as few tokens."""
    trained = ByteLevelBPETokenizer()
    lines = [*list(prompts) * 50, *texts(1_000, 10)]
    trained.train_from_iterator(lines, VOCABULARY, special_tokens=["<end>"], show_progress=False)
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=Tokenizer.from_str(trained.to_str()), eos_token="<end>")


def texts(words: int, number: int) -> list[str]:
    """Synthetic texts, each of this many words, so of at least as many tokens."""
    random_ = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    known = ["".join(random_.choices(syllables, k=random_.randint(1, 3))) for _ in range(2_000)]
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    return [" ".join(random_.choices(known, weights, k=words)) for _ in range(number)]


if __name__ == "__main__":
    cyclopts.run(main)
