"""vLLM in place of assay's own engine: `model.engine: vllm`.

Entry points: `check_vllm` before anything is computed, `load_vllm`, and `VllmEngine.label`, which
replaces that of `LabelEngine`. Must not import Ray. vLLM is imported where it is used: it is
an extra.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from pipeline.cache import cache_dir
from pipeline.errors import ModelError
from pipeline.inference.engine import DocumentIds, Labelled
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.schedules.batching import Usage

# Prompts that vLLM gets at once, on a CPU and on GPUs, which are idle at the end of each call.
_PROMPTS_AT_ONCE = {"cpu": 512, "cuda": 4_096}
GENERATED_TOKENS = 1
_MOST_TOKENS = 128  # whose log-probabilities it gives for one prompt
_CPU_BLOCK_TOKENS = 32  # of its cache: a prompt shares whole blocks; its own choice for CPUs is 128
_CPU_CACHE_GIB = "2"
Item = TypeVar("Item")
_Ask = tuple[tuple[int, ...], list[int]]  # what follows the document; the tokens scored there


class VllmEngine:
    """A model that vLLM runs.

    Each inner node of the trie of a question's labels is a prompt of its own: the prefix, the
    document, the question and the node's tokens. Its answer is the log-probability of each token
    below the node, out of the whole vocabulary. Prompts share the keys and values of their
    beginnings as far as vLLM's cache holds them.

    Args:
        llm: A `vllm.LLM` with prefix caching.
        prompt: The questions, which `check_vllm` allows.
        version: Of vLLM.
        device: cpu or cuda.
    """

    def __init__(self, llm: Any, prompt: PromptTokens, *, version: str, device: str) -> None:
        self._llm, self.prompt, self.version = llm, prompt, version
        self._at_once = _PROMPTS_AT_ONCE[device]

    def close(self) -> None:
        """Frees the device's memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """As `LabelEngine.label`: [docs, labels] log-probabilities for each question."""
        asked = [q for q in self.prompt.questions if tasks is None or q.name in tasks]
        log_probs = [np.full((len(documents), len(q.labels)), np.nan, np.float32) for q in asked]
        usage = Usage()
        asks = [ask for question in asked for ask in _asks(question)]
        scorer = LabelScorer([question.trie for question in asked], torch.device("cpu"))
        step = max(1, self._at_once // max(1, len(asks)))
        for start in range(0, len(documents) if asked else 0, step):
            batch = list(range(start, min(start + step, len(documents))))
            edges, computed = self._edges(asks, [documents[i] for i in batch])
            for of_all, of_batch in zip(log_probs, scorer.of_edges(edges), strict=True):
                of_all[batch] = of_batch.numpy()
            usage += computed
            on_batch(batch)
        return Labelled(tuple(log_probs), usage)

    def _edges(
        self, asks: Sequence[_Ask], documents: Sequence[DocumentIds]
    ) -> tuple[Tensor, Usage]:  # [edges, docs]
        """The log-probabilities of the edges of all tries."""
        from vllm import SamplingParams, TokensPrompt

        sampling = [
            SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=tokens)
            for _, tokens in asks
        ]
        above = [[*self.prompt.prefix, *map(int, document)] for document in documents]
        prompts = [
            TokensPrompt(prompt_token_ids=[*tokens, *suffix])
            for tokens in above
            for suffix, _ in asks
        ]
        outputs = self._llm.generate(prompts, sampling * len(documents), use_tqdm=False)
        rows = [
            [
                output.outputs[0].logprobs[0][token].logprob
                for output, (_, tokens) in zip(of_document, asks, strict=True)
                for token in tokens
            ]
            for of_document in _parts(outputs, len(asks))
        ]
        read = sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs)
        of_documents = sum(map(len, documents))
        usage = Usage(min(read, of_documents), max(0, read - of_documents))
        return torch.tensor(rows, dtype=torch.float32).T, usage


def _asks(question: Question) -> Iterator[_Ask]:
    """What follows the document, and the tokens that are scored there, in the order of the edges.

    A node of many tokens is asked about several times.
    """
    for node, suffix in zip(question.trie.inner, question.suffixes, strict=True):
        for tokens in _parts(question.trie.tokens_after(node), _MOST_TOKENS):
            yield suffix, list(tokens)


def _parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    return [items[start : start + count] for start in range(0, len(items), count)]


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM runs a model."""

    dtype: str  # name of a torch dtype
    device: str  # cpu or cuda
    threads: int  # on a CPU
    tensor_parallel: int = 1  # GPUs that share each layer


def check_vllm(prompt: PromptTokens) -> None:
    """ModelError unless vLLM is installed, and all labels of the questions can be read at once."""
    for question in prompt.questions:
        if question.searched:
            raise ModelError(
                f"task {question.name!r}: its labels are searched (beam, or too many tokens), "
                "which vLLM does not do; write engine: assay, or leave out beam"
            )
    if find_spec("vllm") is None:
        raise ModelError("model.engine: vllm needs vLLM here: pip install 'corpus-assay[vllm]'")


def load_vllm(
    folder: Path, prompt: PromptTokens, run: VllmOptions, *, max_tokens: int
) -> VllmEngine:
    """vLLM with the model in a folder, for documents of at most `max_tokens` tokens.

    ModelError where it is not installed, or refuses the model.
    """
    check_vllm(prompt)
    # — 0 keeps the engine in this process; a second one would poll
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0" if run.tensor_parallel == 1 else "1"
    )
    options: dict[str, Any] = {}
    if run.tensor_parallel > 1:
        options = {"distributed_executor_backend": "mp"}  # — Ray has given this actor its GPUs
    if run.device == "cpu":
        # — compiling takes a minute at each start; a document then takes .8 of the time
        options = {"block_size": _CPU_BLOCK_TOKENS, "enforce_eager": True}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        torch.set_num_threads(run.threads)
    # — it refuses a GPU whose memory another model of this process keeps
    gc.collect()
    torch.cuda.empty_cache()
    log = cache_dir() / "vllm.log"
    longest = max(question.longest_suffix for question in prompt.questions)
    try:
        with _prints_into(log):
            from vllm import LLM, __version__

            llm = LLM(
                str(folder),
                dtype=run.dtype,
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                tensor_parallel_size=run.tensor_parallel,
                max_model_len=len(prompt.prefix) + max_tokens + longest + GENERATED_TOKENS,
                max_logprobs=_MOST_TOKENS,
                **options,
            )
    except Exception as error:  # — vLLM raises any kind, of its assertions too
        raise ModelError(f"vLLM does not load this model: {_reason(error)}; see {log}") from error
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return VllmEngine(llm, prompt, version=__version__, device=run.device)


def _reason(error: Exception) -> str:
    """The line of an error with the cause."""
    if isinstance(error, ValidationError):  # — its last line is the address of a manual
        return str(error.errors()[0]["msg"])
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@contextmanager
def _prints_into(log: Path) -> Iterator[None]:
    """What this process prints in the block goes to a file, also what C++ prints."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(stream) for stream in (1, 2)]

    def print_into(streams: Sequence[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)

    try:
        with log.open("ab") as file:
            print_into([file.fileno(), file.fileno()])
        yield
    finally:
        print_into(kept)
        for stream in kept:
            os.close(stream)
