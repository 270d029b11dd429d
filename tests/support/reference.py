"""The oracle: one document, one question, one label, one full forward. Never optimised.

Entry points: `label_log_prob` for first tokens, `verbalizer_log_prob` for whole labels,
`readout_log_probs` for trained readouts. Tests compare everything with it. Must not import the
tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.fitted.readout import Readout
from pipeline.inference.model.loaded import LoadedModel, plain_attention


def pieces(ids: Sequence[int]) -> list[Sequence[int]]:
    """The chunks of a document, of at most 40 tokens, of which each has 8 of the one before."""
    if len(ids) <= 40:
        return [ids]
    return [ids[start : start + 40] for start in [*range(0, len(ids) - 40, 32), len(ids) - 40]]


@torch.inference_mode()
def label_log_prob(
    model: LoadedModel,
    prefix: Sequence[int],
    document: Sequence[int],
    question: Sequence[int],
    first_tokens: Sequence[int],
) -> float:
    """The log-probability that the answer begins with one of the label's first tokens."""
    prompt = torch.tensor([[*prefix, *document, *question]], device=model.device)
    with plain_attention(model.network, "eager"):
        logits = model.network(input_ids=prompt, use_cache=False).logits[0, -1]  # [vocab]
    log_probs = logits.float().log_softmax(dim=-1)
    return float(log_probs[list(first_tokens)].logsumexp(dim=0))


@torch.inference_mode()
def verbalizer_log_prob(
    model: LoadedModel,
    prefix: Sequence[int],
    document: Sequence[int],
    question: Sequence[int],
    verbalizer: Sequence[int],
) -> float:
    """The log-probability that the answer begins with all of the verbalizer's tokens."""
    before = [*prefix, *document, *question]
    prompt = torch.tensor([[*before, *verbalizer]], device=model.device)
    with plain_attention(model.network, "eager"):
        logits = model.network(input_ids=prompt, use_cache=False).logits[0]  # [tokens, vocab]
    # — the logit at position i predicts token i + 1
    log_probs = logits[len(before) - 1 : -1].float().log_softmax(dim=-1)
    return sum(float(row[token_id]) for row, token_id in zip(log_probs, verbalizer, strict=True))


@torch.inference_mode()
def readout_log_probs(
    model: LoadedModel,
    prefix: Sequence[int],
    document: Sequence[int],
    question: Sequence[int],
    readout: Readout,
) -> np.ndarray:  # [labels]
    """Log softmax of W h + b: h is the mean state of the document, or that of the last token."""
    averaged = readout.card.pooling == "mean"
    prompt = [*prefix, *document, *(() if averaged else question)]
    with plain_attention(model.network, "eager"):
        output = model.network.model(
            input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False
        )
    states = output.hidden_states[readout.card.layer][0].double().numpy()  # [tokens, hidden]
    linear = readout.maps[readout.card.layer]
    logits = linear.weight @ states[len(prefix) if averaged else -1 :].mean(axis=0) + linear.bias
    return logits - np.logaddexp.reduce(logits)
