"""The prior of a task's labels: what a model answers about documents without content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.errors import ModelError
from pipeline.fitted.calibration import Prior
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens


def content_free_prior(engine: LabelEngine, documents: Sequence[DocumentIds], task: str) -> Prior:
    """The mean probability of each label over these documents (Zhao et al. 2021).

    A document may be empty, which the engine does not accept: the question without its last token
    is read as the end of the document. The model reads the same tokens, and no span is empty. So
    this prior is wrong for a readout of the document's own tokens, and for exits by confidence.
    ModelError if an answer is not a number.
    """
    (question,) = [each for each in engine.prompt.questions if each.name == task]
    *before, last = question.token_ids
    prompt = PromptTokens(engine.prompt.prefix, (replace(question, token_ids=(last,)),))
    read = [[*document, *before] for document in documents]
    (log_probs,) = engine.with_prompt(prompt).label(read).log_probs
    wide = log_probs.astype(np.float64)  # [docs, labels]
    p = np.exp(wide - np.logaddexp.reduce(wide, axis=1, keepdims=True))
    if not np.isfinite(p).all():
        raise ModelError(f"task {task!r}: the model's answer about nothing is not a number")
    return Prior(tuple(float(share) for share in p.mean(axis=0)))
