"""Plain greedy decoding: the oracle of continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.inference.continuations import Continuation


@torch.inference_mode()
def greedily_decoded(
    network: Any, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = ()
) -> Continuation:
    """The likeliest tokens after the prompt alone: for each, one forward of all before it."""
    made: list[int] = []
    p: list[float] = []
    while len(made) < tokens and not {*made} & {*stop_ids}:
        logits = network(input_ids=torch.tensor([[*prompt, *made]]), use_cache=False).logits
        probabilities = logits[0, -1].double().softmax(-1)
        made.append(int(probabilities.argmax()))
        p.append(float(probabilities.max()))
    return Continuation(made, p)
