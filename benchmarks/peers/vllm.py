"""vLLM on a CPU, offline, with prefix caching. Number formats: float32, bfloat16.

It scores tokens, or writes compact JSON within a schema. All prompts are submitted together, so
that its scheduler fills its batches. Every prompt of a document takes the document's blocks from
the cache.
"""

from __future__ import annotations

import os

from benchmarks.peers.serve import Answers, Asked, Documents, Setup, Writing, Written

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB: 80,000 tokens of SmolLM2-135M in float32
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second process that polls

import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams


class Engine:
    """One offline `LLM`."""

    version = vllm.__version__

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(
            setup.folder,
            dtype=setup.number_format,
            enable_prefix_caching=True,
            block_size=32,
            max_logprobs=1_000,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )

    def prepare(self, asked: Asked) -> None:
        self._asked = asked
        self._sampling = [
            SamplingParams(
                max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=sorted(tokens)
            )
            for tokens in asked.tokens
        ]

    def label(self, documents: Documents) -> Answers:
        asked = self._asked
        prompts = [
            TokensPrompt(prompt_token_ids=[*asked.prefix, *document, *question])
            for document in documents
            for question in asked.questions
        ]
        outputs = self._llm.generate(prompts, self._sampling * len(documents), use_tqdm=False)
        firsts = [output.outputs[0].logprobs[0] for output in outputs]
        scored = [{token: each.logprob for token, each in first.items()} for first in firsts]
        step = len(asked.questions)
        return [scored[i : i + step] for i in range(0, len(scored), step)]

    def write(self, request: Writing) -> list[Written]:
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0,
            structured_outputs=StructuredOutputsParams(json=request.schema),
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request.prompts]
        return [
            Written(
                text=output.outputs[0].text,
                read=len(output.prompt_token_ids) - (output.num_cached_tokens or 0),
                tokens=len(output.outputs[0].token_ids),
            )
            for output in self._llm.generate(prompts, sampling, use_tqdm=False)
        ]
