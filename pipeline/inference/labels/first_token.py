"""Read label log-probabilities from the hidden state at a question's last token.

Knows hidden states, the unembedding and token ids. Knows nothing of text, trees or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Unembed = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab]

# Logits of about this many rows stand in memory at once: 128 x 150,000 x 4 bytes = 77 MB.
ROWS = 128


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of one question's labels, padded to a rectangle."""

    token_ids: Tensor  # [labels, verbalizers] int64
    padding: Tensor  # [labels, verbalizers] bool

    @classmethod
    def of(cls, labels: Sequence[Sequence[int]], device: torch.device) -> FirstTokens:
        verbalizers = max(len(token_ids) for token_ids in labels)
        padded = [[*ids, *[0] * (verbalizers - len(ids))] for ids in labels]
        padding = [[i >= len(ids) for i in range(verbalizers)] for ids in labels]
        return cls(torch.tensor(padded, device=device), torch.tensor(padding, device=device))

    @property
    def nothing(self) -> Tensor:
        """The answers for no documents: [0, labels] fp32."""
        labels, _ = self.token_ids.shape
        return torch.empty((0, labels), dtype=torch.float32, device=self.token_ids.device)


def first_token_log_probs(
    hidden: Tensor,  # [questions, docs, hidden]
    questions: Sequence[FirstTokens],
    unembed: Unembed,
) -> list[Tensor]:  # one [docs, labels] fp32 a question
    """Each label's log-probability: its verbalizers' first tokens, out of the whole vocabulary.

    What the labels leave over is the probability of anything else: 1 - sum of exp.
    """
    states, docs, _ = hidden.shape
    assert states == len(questions), f"{states} states for {len(questions)} questions"
    found: list[list[Tensor]] = [[first.nothing] for first in questions]
    # Questions are unembedded together, so that the unembedding is read once for all of them.
    for part in torch.split(hidden, max(1, ROWS // states), dim=1) if docs else ():
        logits = unembed(part.flatten(0, 1)).float()  # [questions * docs, vocab]
        by_question = logits.view(states, part.shape[1], -1)
        for read, of_question, first in zip(found, by_question, questions, strict=True):
            read.append(_read(of_question, first))
    return [torch.cat(parts) for parts in found]


def _read(
    logits: Tensor,  # [docs, vocab] fp32
    first: FirstTokens,
) -> Tensor:  # [docs, labels] fp32
    everything = logits.logsumexp(dim=-1).view(-1, 1)  # [docs, 1]
    labels, verbalizers = first.token_ids.shape
    chosen = logits[:, first.token_ids.flatten()].view(-1, labels, verbalizers)
    chosen = chosen.masked_fill(first.padding, -torch.inf)
    return chosen.logsumexp(dim=-1) - everything
