"""What a model answers where there is nothing to answer about: documents without content.

Knows token ids and the engine. Knows nothing of text, files or what the answers are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.errors import ModelError
from pipeline.fitted.calibration import Prior
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens


def content_free_prior(engine: LabelEngine, documents: Sequence[DocumentIds], task: str) -> Prior:
    """The mean of the answers about these documents, each among the labels (Zhao et al. 2021).

    A document may be empty, which the engine does not take: the question but for its last token
    goes with the document, so that the same tokens are read and no span is empty. So it is no
    measure for a readout of the document's own tokens, nor where other tasks decide how deep it is
    read.
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
