"""vLLM in place of assay's own engine: `model.engine: vllm`.

Entry points: `load_vllm`, and `VllmEngine.label`, which stands in for `LabelEngine`. Must not
import Ray or read files other than the model's. vLLM is imported where it is used: it is an extra.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cache import cache_dir
from pipeline.errors import ModelError
from pipeline.inference.engine import DocumentIds, Labelled
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.schedules.batching import Usage

# Documents whose prompts vLLM gets at once, so that its scheduler fills its batches.
_DOCUMENTS_AT_ONCE = 64
GENERATED_TOKENS = 1
_MOST_TOKENS = 128  # whose log-probabilities it gives for one prompt
_CPU_BLOCK_TOKENS = 32  # of its cache: a prompt shares whole blocks; its own choice for CPUs is 128
_CPU_CACHE_GIB = "2"
Item = TypeVar("Item")


class VllmEngine:
    """A model that vLLM runs.

    Each inner node of the trie of a question's labels is a prompt of its own: the prefix, the
    document, the question and the node's tokens. Its answer is the log-probability of each token
    below the node, out of the whole vocabulary. Prompts share the keys and values of their
    beginnings as far as vLLM's cache holds them.

    Args:
        llm: A `vllm.LLM` with prefix caching.
        prompt: The questions. ModelError for one whose labels are searched.
        version: Of vLLM.
    """

    def __init__(self, llm: Any, prompt: PromptTokens, *, version: str) -> None:
        self._llm, self.prompt, self.version = llm, prompt, version
        for question in prompt.questions:
            if question.searched:
                raise ModelError(
                    f"task {question.name!r}: its labels are searched (beam, or too many tokens), "
                    "which vLLM does not do; write model.engine: assay, or leave out beam"
                )

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
        for start in range(0, len(documents) if asked else 0, _DOCUMENTS_AT_ONCE):
            batch = list(range(start, min(start + _DOCUMENTS_AT_ONCE, len(documents))))
            answers, computed = self._answers(asked, [documents[i] for i in batch])
            for of_all, of_batch in zip(log_probs, answers, strict=True):
                of_all[batch] = of_batch
            usage += computed
            on_batch(batch)
        return Labelled(tuple(log_probs), usage)

    def _answers(
        self, asked: Sequence[Question], documents: Sequence[DocumentIds]
    ) -> tuple[list[NDArray[np.float32]], Usage]:  # by question: [docs, labels]
        from vllm import SamplingParams, TokensPrompt

        asks = [ask for question in asked for ask in _asks(question)]
        sampling = [
            SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=tokens)
            for _, tokens in asks
        ]
        prompts = [
            TokensPrompt(prompt_token_ids=[*self.prompt.prefix, *map(int, document), *suffix])
            for document in documents
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
        edges = torch.tensor(rows, dtype=torch.float32).T  # [edges, docs]
        scorer = LabelScorer([question.trie for question in asked], edges.device)
        read = sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs)
        of_documents = sum(map(len, documents))
        usage = Usage(of_documents, max(0, read - of_documents))
        return [answers.numpy() for answers in scorer.of_edges(edges)], usage


def _asks(question: Question) -> Iterator[tuple[tuple[int, ...], list[int]]]:
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


def load_vllm(
    folder: Path, prompt: PromptTokens, run: VllmOptions, *, max_tokens: int
) -> VllmEngine:
    """vLLM with the model in a folder; ModelError where it is not installed, or refuses the model.

    Args:
        folder: Local folder with the model's configuration and safetensors.
        prompt: The questions.
        run: How it is run.
        max_tokens: Of the longest document.
    """
    # — read when vLLM is imported; without it the engine is a second process, which polls
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0" if run.tensor_parallel == 1 else "1"
    )
    options: dict[str, Any] = {}
    if run.device == "cpu":
        # — to compile takes a minute at each start, and .8 of the time of a document after it
        options = {"block_size": _CPU_BLOCK_TOKENS, "enforce_eager": True}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(run.threads)
    torch.cuda.empty_cache()  # — it refuses a GPU whose memory another model of this process keeps
    if find_spec("vllm") is None:
        raise ModelError("model.engine: vllm needs vLLM here: pip install 'corpus-assay[vllm]'")
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
    except (ImportError, ValueError, RuntimeError, OSError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ModelError(f"vLLM does not load this model: {reason[0]}; see {log}") from error
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return VllmEngine(llm, prompt, version=__version__)


@contextmanager
def _prints_into(log: Path) -> Iterator[None]:
    """What this process prints in the block goes to a file, also what C++ prints."""
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = 1, 2
    kept = [os.dup(stream) for stream in streams]
    try:
        with log.open("ab") as file:
            for stream in streams:
                os.dup2(file.fileno(), stream)
        yield
    finally:
        for stream, own in zip(streams, kept, strict=True):
            os.dup2(own, stream)
            os.close(own)
