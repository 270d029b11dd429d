"""Labelling without a tree: what `assay check` and the benchmarks compare the tree with.

Every method answers the same questions on the same canonical prompts with transformers' own
attention. Entry points: `expand`, `per_question` and `per_label` for the bench, `answers_alone` for
the check. `tree_flops` is the arithmetic of the tree itself, for its share of the matmul rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.fitted.readout import Readout
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.answers import Readouts
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.memory import shape_of
from pipeline.inference.model.alone import PromptAlone, forward_alone, states_alone
from pipeline.inference.model.int8_products import Int8Linear, expert_weights
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.schedules.batching import pad

LabelLogProbs = list[list[Tensor]]  # by document, by question: [labels]
Floats = NDArray[np.float32]


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
    padded, seen = pad(prefixes, left=True)
    kv_cache = DynamicCache(config=model.network.config)
    model.decoder(
        input_ids=_tensor(model, padded),
        # A mask that hides nothing would keep sdpa from its faster causal kernel.
        attention_mask=None if seen.all() else _tensor(model, seen),
        position_ids=_tensor(model, np.maximum(seen.cumsum(axis=1) - 1, 0)),
        **model.cache_kwargs(kv_cache),
    )
    states = _question_states(model, prompt.questions, kv_cache, seen)
    tries = [_first_token_trie(list(q.first_tokens.values())) for q in prompt.questions]
    scorer = LabelScorer(tries, model.device)
    by_question = scorer.log_probs(states.transpose(0, 1), model.unembed)
    return [[log_probs[row] for log_probs in by_question] for row in range(len(documents))]


def _question_states(
    model: LoadedModel,
    questions: Sequence[Question],
    kv_cache: DynamicCache,  # holds the documents' prefixes
    seen: NDArray[np.int64],  # [docs, prefix]: 0 where a prefix is padded
) -> Tensor:  # [docs, questions, hidden]
    """The states at the questions' last tokens, with one copy of the cache for each question."""
    docs, _ = seen.shape
    rows = np.repeat(np.arange(docs), len(questions))
    # Not `batch_repeat_interleave`: cache layers with a recurrent state do not have it.
    kv_cache.reorder_cache(_tensor(model, rows))  # type: ignore[arg-type]
    ids, below = (np.tile(x, (docs, 1)) for x in pad([q.token_ids for q in questions]))
    _rows, longest = ids.shape
    starts = seen[rows].sum(axis=1, keepdims=True)
    output = model.decoder(
        input_ids=_tensor(model, ids),
        attention_mask=_tensor(model, np.concatenate([seen[rows], below], axis=1)),
        position_ids=_tensor(model, starts + np.arange(longest)),
        **model.cache_kwargs(kv_cache),
    )
    states = output.last_hidden_state.view(docs, len(questions), longest, -1)
    last = _tensor(model, [len(question.token_ids) - 1 for question in questions])
    at_last: Tensor = states[:, torch.arange(len(questions), device=model.device), last]
    return at_last


@torch.inference_mode()
def per_question(
    model: LoadedModel,
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
    *,
    each_label: bool = False,
) -> LabelLogProbs:
    """One full forward for each document and question; with whole labels, for each verbalizer."""

    def answer(document: DocumentIds, question: Question) -> Tensor:  # [labels]
        alone = PromptAlone(prompt.prefix, document, question.token_ids)
        if each_label:
            tries = [_first_token_trie([tokens]) for tokens in question.first_tokens.values()]
            return torch.cat([_first_token_answer(model, alone, trie) for trie in tries])
        if question.scores_first_tokens:
            return _first_token_answer(model, alone, question.trie)
        return _whole_label_answer(model, alone, question.trie)

    with plain_attention(model.network):
        return [[answer(document, q) for q in prompt.questions] for document in documents]


# One full forward for each document, question and label. Reads first tokens only.
per_label = partial(per_question, each_label=True)


@torch.inference_mode()
def answers_alone(
    model: LoadedModel,
    prompt: PromptTokens,
    document: DocumentIds,
    *,
    readouts: Readouts,
) -> list[Floats]:  # by question: [labels]
    """Log-probabilities of one document: each task by a plain forward, then by its readout."""
    untrained = [question for question in prompt.questions if question.name not in readouts]
    [answered] = per_question(model, replace(prompt, questions=tuple(untrained)), [document])
    answers = {q.name: a.numpy(force=True) for q, a in zip(untrained, answered, strict=True)}

    @cache  # tasks of one prompt read the same states
    def states_below(below: tuple[int, ...]) -> list[Tensor]:  # by layer: [tokens, hidden]
        alone = PromptAlone(prompt.prefix, document, below)
        with plain_attention(model.network):
            return states_alone(model, alone)

    for question in (q for q in prompt.questions if q.name in readouts):
        readout = readouts[question.name]
        averaged = readout.card.pooling == "mean"
        by_layer = states_below(() if averaged else question.token_ids)
        own = by_layer[readout.card.layer][len(prompt.prefix) if averaged else -1 :]
        answers[question.name] = _readout_log_probs(readout, own.float().mean(dim=0))
    return [answers[question.name] for question in prompt.questions]


def _readout_log_probs(
    readout: Readout,
    state: Tensor,  # [hidden] fp32
) -> Floats:  # [labels]
    linear = readout.maps[readout.card.layer]
    logits = linear.weight @ state.numpy(force=True) + linear.bias
    return np.asarray(logits - np.logaddexp.reduce(logits), dtype=np.float32)


def _first_token_trie(labels: Sequence[Sequence[int]]) -> LabelTrie:
    return LabelTrie.of([[(token,) for token in tokens] for tokens in labels])


def _first_token_answer(
    model: LoadedModel, prompt: PromptAlone, trie: LabelTrie
) -> Tensor:  # [labels]
    """The log-probability that each label's first token comes next."""
    states = forward_alone(model, prompt).last_hidden_state[:, -1:]  # [1, 1, hidden]
    [log_probs] = LabelScorer([trie], model.device).log_probs(states, model.unembed)
    return log_probs[0]


def _whole_label_answer(
    model: LoadedModel, prompt: PromptAlone, trie: LabelTrie
) -> Tensor:  # [labels] fp32
    """The log-probability of each label: the sum over its verbalizers, one full forward each."""

    def verbalizer_log_prob(path: Sequence[int]) -> Tensor:  # []
        whole = replace(prompt, after=(*prompt.after, *path))
        states = forward_alone(model, whole).last_hidden_state[0]
        # — the state at position i predicts token i + 1
        logits = model.unembed(states[len(prompt) - 1 : -1])  # [tokens, vocab]
        log_probs = logits.float().log_softmax(-1)
        total = log_probs[range(len(path)), list(path)].sum()
        return total / float(len(path) ** trie.length_penalty)

    of_labels = ([verbalizer_log_prob(path) for path in paths] for paths in trie.verbalizers)
    return torch.stack([torch.stack(own).logsumexp(0) for own in of_labels])


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
        if isinstance(m, nn.Linear | Int8Linear)
    )
    experts = sum(w.numel() * experts_per_token // w.shape[0] for w in expert_weights(module))
    return dense + experts
