"""What people do without a tree: the methods `assay bench` compares it with.

Each answers the same questions on the same canonical prompts, written as well as transformers
allows. Knows the model as transformers runs it. Knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.inference.engine import DocumentIds
from pipeline.inference.model import LoadedModel, plain_attention
from pipeline.inference.readout import FirstTokens, first_token_log_probs
from pipeline.inference.tokens import PromptTokens, Question

Answers = list[list[Tensor]]  # by document, by question: [labels]


@torch.inference_mode()
def expand(model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]) -> Answers:
    """Prefill the document, expand its cache to one row a question, run the padded questions."""
    with plain_attention(model.network, "sdpa"):
        return [_expand_one(model, prompt, document) for document in documents]


def _expand_one(model: LoadedModel, prompt: PromptTokens, document: DocumentIds) -> list[Tensor]:
    prefix = [*prompt.opening, *document]
    cache = DynamicCache(config=model.network.config)
    model.decoder(
        input_ids=torch.tensor([prefix], device=model.device), past_key_values=cache, use_cache=True
    )
    questions = [question.token_ids for question in prompt.questions]
    cache.batch_repeat_interleave(len(questions))
    longest = max(len(question) for question in questions)
    padded = [[*question, *[0] * (longest - len(question))] for question in questions]
    seen = [[1] * (len(prefix) + len(q)) + [0] * (longest - len(q)) for q in questions]
    output = model.decoder(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        past_key_values=cache,
        use_cache=True,
    )
    states = output.last_hidden_state  # [questions, longest, hidden]
    last = torch.tensor([len(question) - 1 for question in questions], device=model.device)
    chosen = states[torch.arange(len(questions), device=model.device), last]  # [questions, hidden]
    return _read(model, chosen, prompt.questions)


@torch.inference_mode()
def per_question(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> Answers:
    """One full forward for every document and question."""
    with plain_attention(model.network, "sdpa"):
        return [
            [
                _read(model, _last_state(model, prompt, document, question), [question])[0]
                for question in prompt.questions
            ]
            for document in documents
        ]


@torch.inference_mode()
def per_label(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> Answers:
    """One full forward for every document, question and label."""
    with plain_attention(model.network, "sdpa"):
        return [
            [
                torch.cat(list(_each_label(model, prompt, document, question)))
                for question in prompt.questions
            ]
            for document in documents
        ]


def _each_label(
    model: LoadedModel, prompt: PromptTokens, document: DocumentIds, question: Question
) -> Iterator[Tensor]:
    for label, token_ids in question.labels.items():
        alone = Question(question.name, question.token_ids, {label: token_ids})
        yield _read(model, _last_state(model, prompt, document, question), [alone])[0]


def _last_state(
    model: LoadedModel, prompt: PromptTokens, document: DocumentIds, question: Question
) -> Tensor:  # [1, hidden]
    token_ids = [*prompt.opening, *document, *question.token_ids]
    output = model.decoder(
        input_ids=torch.tensor([token_ids], device=model.device), use_cache=False
    )
    last: Tensor = output.last_hidden_state[:, -1]
    return last


def _read(
    model: LoadedModel,
    states: Tensor,  # [questions, hidden]
    questions: Sequence[Question],
) -> list[Tensor]:  # [labels] a question
    first = [FirstTokens.of(list(q.labels.values()), model.device) for q in questions]
    read = first_token_log_probs(states.unsqueeze(1), first, model.unembed)
    return [log_probs[0] for log_probs in read]
