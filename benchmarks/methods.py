"""Other ways to ask the same questions, which the bench compares the tree with.

On the same canonical prompts, with transformers' own attention. Entry points: `expand` and
`per_label`. `tree_flops` is the arithmetic of the tree itself, for its share of the matmul rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.inference.alternatives import LabelLogProbs, per_question
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.memory import shape_of
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.model.rounded_products import RoundedLinear, expert_weights
from pipeline.inference.schedules.batching import pad


@torch.inference_mode()
def expand(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds], *, batch: int = 1
) -> LabelLogProbs:
    """Prefill documents, repeat their KV cache once a question, and run the padded questions.

    `batch` documents go through the model together, padded on the left. Reads first tokens only.
    """
    with plain_attention(model.network):
        return [
            answers
            for start in range(0, len(documents), batch)
            for answers in _expand_batch(model, prompt, documents[start : start + batch])
        ]


def _expand_batch(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> LabelLogProbs:
    prefixes = [[*prompt.prefix, *document] for document in documents]
    padded, mask = pad(prefixes, left=True)
    kv_cache = DynamicCache(config=model.network.config)
    model.decoder(
        input_ids=_tensor(model, padded),
        # A mask that hides nothing would keep sdpa from its faster causal kernel.
        attention_mask=None if mask.all() else _tensor(model, mask),
        position_ids=_tensor(model, np.maximum(mask.cumsum(axis=1) - 1, 0)),
        **model.cache_kwargs(kv_cache),
    )
    states = _question_states(model, prompt.questions, kv_cache, mask)
    first = [q.first_tokens.values() for q in prompt.questions]
    tries = [LabelTrie.of([[(t,) for t in label] for label in labels]) for labels in first]
    scorer = LabelScorer(tries, model.device)
    by_question = scorer.log_probs(states.transpose(0, 1), model.unembed)
    return [[log_probs[row] for log_probs in by_question] for row in range(len(documents))]


def _question_states(
    model: LoadedModel,
    questions: Sequence[Question],
    kv_cache: DynamicCache,  # holds the documents' prefixes
    mask: NDArray[np.int64],  # [docs, prefix]: 0 where a prefix is padded
) -> Tensor:  # [docs, questions, hidden]
    """The states at the questions' last tokens, with one copy of the cache for each question."""
    docs, _ = mask.shape
    rows = np.repeat(np.arange(docs), len(questions))
    # Not `batch_repeat_interleave`: cache layers with a recurrent state do not have it.
    kv_cache.reorder_cache(_tensor(model, rows))  # type: ignore[arg-type]
    ids, below = (np.tile(x, (docs, 1)) for x in pad([q.token_ids for q in questions]))
    _rows, longest = ids.shape
    starts = mask[rows].sum(axis=1, keepdims=True)
    output = model.decoder(
        input_ids=_tensor(model, ids),
        attention_mask=_tensor(model, np.concatenate([mask[rows], below], axis=1)),
        position_ids=_tensor(model, starts + np.arange(longest)),
        **model.cache_kwargs(kv_cache),
    )
    states = output.last_hidden_state.view(docs, len(questions), longest, -1)
    last = _tensor(model, [len(question.token_ids) - 1 for question in questions])
    at_last: Tensor = states[:, torch.arange(len(questions), device=model.device), last]
    return at_last


def per_label(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> LabelLogProbs:
    """One full forward for each document, question and label. Reads first tokens only."""
    of_labels = tuple(
        Question(question.name, question.token_ids, {label: tuple((t,) for t in tokens)})
        for question in prompt.questions
        for label, tokens in question.first_tokens.items()
    )
    alone = map(iter, per_question(model, replace(prompt, questions=of_labels), documents))
    return [
        [torch.cat([next(answers) for _ in question.labels]) for question in prompt.questions]
        for answers in alone
    ]


def _tensor(model: LoadedModel, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
    return torch.tensor(values, device=model.device)


def tree_flops(model: LoadedModel, prompt: PromptTokens, document_tokens: int) -> int:
    """Floating-point operations of the tree for one document, without the kept prefix.

    The last layer is counted at the answers only, even where the decoder must be run whole.
    """
    # — of a beam search only the question: which labels it follows depends on the document
    asked = [(not q.searched and q.suffixes) or [q.token_ids] for q in prompt.questions]
    branches = Branches.of([sequence for of_question in asked for sequence in of_question])
    tree = Tree((document_tokens,), branches.spans, prefix_tokens=len(prompt.prefix))
    positions = tree.positions
    ends = positions[document_tokens + np.array(branches.ends, dtype=np.int64)]
    layers: nn.ModuleList = model.decoder.layers  # type: ignore[assignment]
    config = model.network.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    *below, last = [linear_weights(layer, experts_per_token=chosen) for layer in layers]
    # — a row at position n attends to n + 1 rows, where no window hides one
    pairs = (len(layers) - 1) * (positions + 1).sum() + (ends + 1).sum()
    products = sum(below) * tree.tokens + last * len(ends)
    unembedding = config.hidden_size * config.vocab_size * len(ends)
    # — a score and a weighted value: 2 multiply-adds for each query, key, head and dimension
    shape = shape_of(model)
    attention = 4 * shape.heads * shape.dim * pairs
    return int(2 * (products + unembedding) + attention)


def linear_weights(module: nn.Module, *, experts_per_token: int) -> int:
    """Weights that each token is multiplied with; of a mixture, those of the chosen experts."""
    dense = sum(
        m.in_features * m.out_features
        for m in module.modules()
        if isinstance(m, nn.Linear | RoundedLinear)
    )
    experts = sum(w.numel() * experts_per_token // w.shape[0] for w in expert_weights(module))
    return dense + experts
