"""Greedy continuations of prompts by transformers' `generate`, with the probability of each token.

Entry point: `ContinuationEngine.decode`. Prompts of a batch are padded on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from pipeline.inference.engine import read_in_batches
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.schedules.batching import pad

# In the place of padding, which no token attends to, and behind the end of a continuation.
_PAD_ID = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """The likeliest next tokens of a prompt, one after the other."""

    token_ids: Sequence[int]  # up to and with the token that ends a text, if it came
    p: Sequence[float]  # [tokens]: of each token, in the whole vocabulary


class ContinuationEngine:
    """Continues prompts, as many at a time as its limit allows.

    Args:
        model: The model; not one with recurrent states, which padding would change.
        stop_ids: Tokens that end a continuation.
        max_batch_tokens: The most tokens of prompts, padding and continuations in one batch.
    """

    def __init__(
        self, model: LoadedModel, *, stop_ids: Collection[int], max_batch_tokens: int
    ) -> None:
        assert model.schedule == "fused", model.network.config.model_type
        self._network = model.network
        self._stop_ids = sorted(stop_ids)
        self._max_batch_tokens = max_batch_tokens

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        on_step: Callable[[int], None] = lambda _prompts: None,
    ) -> list[Continuation | None]:
        """A continuation of each prompt, of at most `tokens` tokens; None: no memory for it alone.

        `on_step` is called with 0 for each token of a batch, and with the number of prompts after
        each batch.
        """
        results: list[Continuation | None] = [None] * len(prompts)
        lengths = [len(prompt) + tokens for prompt in prompts]

        def decode(batch: list[int], _tokens: int) -> list[Continuation]:
            return self._decode_together([prompts[i] for i in batch], tokens, on_step)

        most = self._max_batch_tokens
        for batch, decoded in read_in_batches(lengths, decode, max_tokens=most, padded=True):
            if decoded is not None:
                for i, continuation in zip(batch, decoded, strict=True):
                    results[i] = continuation
                on_step(len(batch))
        return results

    def _decode_together(
        self, prompts: Sequence[Sequence[int]], tokens: int, on_step: Callable[[int], None]
    ) -> list[Continuation]:
        """The continuations of the prompts of one batch."""
        ids, mask = pad(prompts, fill=_PAD_ID, left=True)
        steps = _Probabilities(on_step)
        network: Any = self._network
        with torch.inference_mode(), _plain_generation(network):
            sequences = network.generate(
                torch.from_numpy(ids).to(network.device),
                attention_mask=torch.from_numpy(mask).to(network.device),
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=_PAD_ID,
                eos_token_id=self._stop_ids or None,
                logits_processor=[steps],
            )
            p = torch.stack(steps.of_steps, dim=1).tolist()
        made = sequences[:, ids.shape[1] :].tolist()
        return [self._until_stop(*of_prompt) for of_prompt in zip(made, p, strict=True)]

    def _until_stop(self, token_ids: list[int], p: list[float]) -> Continuation:
        """The tokens up to the first that ends a text."""
        ends = (n for n, token in enumerate(token_ids, start=1) if token in self._stop_ids)
        count = next(ends, len(token_ids))
        return Continuation(token_ids[:count], p[:count])


class _Probabilities(LogitsProcessor):
    """Notes the probability of the likeliest token at each step; changes no score.

    `output_logits` would hold the logits of all steps: 24 MB for 40 tokens of one prompt and a
    vocabulary of 150,000.
    """

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.of_steps: list[Tensor] = []  # [prompts] each
        self._on_step = on_step

    def __call__(
        self,
        input_ids: Tensor,  # [prompts, tokens]
        scores: Tensor,  # [prompts, vocab] fp32: the logits
    ) -> Tensor:
        self.of_steps.append((scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp())
        self._on_step(0)
        return scores


@contextmanager
def _plain_generation(network: PreTrainedModel) -> Iterator[None]:
    """Inside the block, `generate` uses one of transformers' own attention implementations.

    It also ignores what the model's files set, such as a penalty for repeated tokens.
    """
    whole: Any = network
    settings = network.generation_config
    with plain_attention(network):
        whole.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            whole.generation_config = settings
