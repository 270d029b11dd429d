"""Score labels by their first tokens, from the hidden state at a question's last token.

Entry point: `first_token_log_probs`. Reads hidden states and the unembedding; must not import
tokenizers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Unembed = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab]

# Rows whose logits are in memory at once: 128 x 150,000 x 4 bytes = 77 MB.
ROWS = 128


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of the verbalizers of one question's labels, padded to a rectangle."""

    token_ids: Tensor  # [labels, verbalizers] int64
    padding: Tensor  # [labels, verbalizers] bool

    @classmethod
    def of(cls, labels: Sequence[Sequence[int]], device: torch.device) -> FirstTokens:
        width = max(len(token_ids) for token_ids in labels)
        padded = [[*ids, *[0] * (width - len(ids))] for ids in labels]
        padding = [[i >= len(ids) for i in range(width)] for ids in labels]
        return cls(torch.tensor(padded, device=device), torch.tensor(padding, device=device))

    def log_probs(
        self,
        logits: Tensor,  # [docs, vocab] fp32
    ) -> Tensor:  # [docs, labels] fp32
        docs, _vocab = logits.shape
        normaliser = logits.logsumexp(dim=-1).view(-1, 1)  # [docs, 1]
        own = logits[:, self.token_ids.flatten()].view(docs, *self.token_ids.shape)
        return own.masked_fill(self.padding, -torch.inf).logsumexp(dim=-1) - normaliser


def first_token_log_probs(
    hidden: Tensor,  # [questions, docs, hidden]
    questions: Sequence[FirstTokens],
    unembed: Unembed,
) -> list[Tensor]:  # one [docs, labels] fp32 a question
    """Each label's log-probability out of the whole vocabulary: the sum over its first tokens.

    The rest, 1 - sum of exp, is the probability of every other token.
    """
    states, _docs, _hidden = hidden.shape
    assert states == len(questions), f"{states} states for {len(questions)} questions"
    # — all questions together, so that the unembedding is read once a part
    parts = torch.split(hidden, max(1, ROWS // states), dim=1)
    answers: list[list[Tensor]] = [[] for _ in questions]
    for part in parts:  # [questions, docs of the part, hidden]
        logits = unembed(part.flatten(0, 1)).float()  # [questions * docs, vocab]
        by_question = logits.view(states, part.shape[1], logits.shape[-1])
        for of_question, first, own in zip(by_question, questions, answers, strict=True):
            own.append(first.log_probs(of_question))
    return [torch.cat(own) for own in answers]
