"""assay's own engine as a peer. Number formats: float32, bfloat16, int8."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.peers.serve import Answers, Asked, Documents, Setup
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import load_model
from pipeline.inference.memory import disable_malloc_trim
from pipeline.runtime.assembly import memory_plan
from pipeline.spec.model import RoundedFormat


class Engine:
    """Each token to score is a label of its own."""

    version = f"torch {torch.__version__}"

    def __init__(self, setup: Setup) -> None:
        disable_malloc_trim()
        torch.set_num_threads(setup.threads)
        wide = setup.number_format in ("float32", "bfloat16")
        dtype = setup.number_format if wide else "float32"
        rounded_to: RoundedFormat | None = None if wide else "int8"
        folder = Path(setup.folder)
        self._model = load_model(folder, dtype=dtype, device="cpu", rounded_to=rounded_to)

    def prepare(self, asked: Asked) -> None:
        questions = [
            Question(f"q{i}", tuple(ids), {str(token): [(token,)] for token in tokens})
            for i, (ids, tokens) in enumerate(zip(asked.questions, asked.tokens, strict=True))
        ]
        prompt = PromptTokens(tuple(asked.prefix), tuple(questions))
        tokens = memory_plan(self._model, prompt).max_batch_tokens
        self._engine = LabelEngine(self._model, prompt, max_batch_tokens=tokens)
        self._tokens = asked.tokens

    def label(self, documents: Documents) -> Answers:
        by_question = self._engine.label(documents).log_probs
        return [
            [
                dict(zip(tokens, log_probs[row].tolist(), strict=True))
                for tokens, log_probs in zip(self._tokens, by_question, strict=True)
            ]
            for row in range(len(documents))
        ]
