"""What transformers' `generate` makes of a prompt: the oracle of continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.inference.continuations import Continuation


def generated(
    network: Any, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = ()
) -> Continuation:
    """The likeliest tokens after the prompt alone, with the probabilities of its scores."""
    with torch.inference_mode():
        output = network.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=tokens,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=list(stop_ids) or None,
        )
    p = [step[0].float().softmax(-1).max().item() for step in output.scores]
    return Continuation(output.sequences[0, len(prompt) :].tolist(), p)
