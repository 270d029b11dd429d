"""OpenVINO GenAI's continuous batching with prefix caching. Number formats: float32, int8.

int8 has the weights of `optimum-cli export --weight-format int8`, and the defaults for activations
and the KV cache. The prefix cache is read when a request is added, so the first question of every
document is asked before the others. Only the most probable token has a log-probability.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino_genai
from openvino import Tensor

from benchmarks.peers.serve import Answers, Asked, Documents, Setup

_EXPORTED = {"float32": "fp32", "int8": "int8"}
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_EXACT |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


class Engine:
    """One continuous-batching pipeline."""

    version = openvino_genai.get_version()

    def __init__(self, setup: Setup) -> None:
        folder = _exported(setup)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = 2_048
        own = _EXACT if setup.number_format == "float32" else {"INFERENCE_PRECISION_HINT": "f32"}
        properties = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "PERFORMANCE_HINT": "THROUGHPUT",
            "NUM_STREAMS": 1,
            **own,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )
        self._first = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, ignore_eos=True)

    def prepare(self, asked: Asked) -> None:
        self._asked = asked

    def label(self, documents: Documents) -> Answers:
        first, *others = self._asked.questions
        before = self._generate(documents, [first])
        after = iter(self._generate(documents, others))
        return [[answer, *(next(after) for _ in others)] for answer in before]

    def _generate(
        self, documents: Documents, questions: list[list[int]]
    ) -> list[dict[int, float]]:  # by document and question
        prompts = [
            Tensor(np.array([[*self._asked.prefix, *document, *question]]))
            for document in documents
            for question in questions
        ]
        results = self._pipeline.generate(prompts, [self._first] * len(prompts))
        return [{each.m_generation_ids[0][0]: each.m_scores[0]} for each in results]


def _exported(setup: Setup) -> Path:
    """The folder with the model in OpenVINO's format, converted on first use."""
    folder = Path(setup.cache) / f"openvino-{setup.number_format}"
    if not (folder / "config.json").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--model", setup.folder]
        options += ["--weight-format", _EXPORTED[setup.number_format]]
        subprocess.run([*command, *options, str(folder)], check=True)
    return folder
