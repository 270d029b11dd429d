"""What people do without a tree: the methods `assay bench` compares it with.

Each answers the same questions on the same canonical prompts, written as well as transformers
allows. Whole labels are answered by `per_question` alone, the others
read first tokens. Knows the model as transformers runs it. Knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.first_token import FirstTokens, first_token_log_probs
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.model.quantisation import expert_weights

Answers = list[list[Tensor]]  # by document, by question: [labels]


@torch.inference_mode()
def expand(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds], *, batch: int = 1
) -> Answers:
    """Prefill documents, expand their cache to one row a question, run the padded questions.

    `batch` documents go through the model together, padded on the left.
    """
    with plain_attention(model.network, "sdpa"):
        return [
            answers
            for start in range(0, len(documents), batch)
            for answers in _expand_batch(model, prompt, documents[start : start + batch])
        ]


def _expand_batch(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> Answers:
    prefixes = [[*prompt.prefix, *document] for document in documents]
    longest = max(len(prefix) for prefix in prefixes)
    padding = [longest - len(prefix) for prefix in prefixes]
    seen = [[0] * pad + [1] * len(prefix) for pad, prefix in zip(padding, prefixes, strict=True)]
    cache = DynamicCache(config=model.network.config)
    model.decoder(
        input_ids=_tensor(
            model, [[0] * pad + prefix for pad, prefix in zip(padding, prefixes, strict=True)]
        ),
        # A mask that hides nothing would cost the plain method its causal kernel.
        attention_mask=_tensor(model, seen) if any(padding) else None,
        position_ids=_tensor(model, [[max(0, i - pad) for i in range(longest)] for pad in padding]),
        past_key_values=cache,
        use_cache=True,
    )
    states = _ask(model, prompt.questions, cache, seen, [len(prefix) for prefix in prefixes])
    first = [FirstTokens.of(list(q.labels.values()), model.device) for q in prompt.questions]
    read = first_token_log_probs(states.transpose(0, 1), first, model.unembed)
    return [[log_probs[row] for log_probs in read] for row in range(len(documents))]


def _ask(
    model: LoadedModel,
    questions: Sequence[Question],
    cache: DynamicCache,
    seen: Sequence[Sequence[int]],  # [docs, prefix]: 0 where a prefix is padded
    lengths: Sequence[int],  # of the prefixes
) -> Tensor:  # [docs, questions, hidden]
    """The state at each question's last token; the cache holds the documents' prefixes."""
    rows = [row for row in range(len(lengths)) for _ in questions]
    # Not `batch_repeat_interleave`: layers with a state have none.
    cache.reorder_cache(torch.tensor(rows, device=model.device).long())  # type: ignore[arg-type]
    longest = max(len(question.token_ids) for question in questions)
    ids = [[*q.token_ids, *[0] * (longest - len(q.token_ids))] for q in questions]
    own = [[1] * len(q.token_ids) + [0] * (longest - len(q.token_ids)) for q in questions]
    output = model.decoder(
        input_ids=_tensor(model, ids * len(lengths)),
        attention_mask=_tensor(model, [[*row, *mask] for row in seen for mask in own]),
        position_ids=_tensor(
            model, [[n + i for i in range(longest)] for n in lengths for _ in questions]
        ),
        past_key_values=cache,
        use_cache=True,
    )
    states = output.last_hidden_state.view(len(lengths), len(questions), longest, -1)
    last = _tensor(model, [len(question.token_ids) - 1 for question in questions])
    chosen: Tensor = states[:, torch.arange(len(questions), device=model.device), last]
    return chosen


def _tensor(model: LoadedModel, values: Sequence[object]) -> Tensor:
    return torch.tensor(values, device=model.device)


@torch.inference_mode()
def per_question(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> Answers:
    """One full forward for every document and question; of whole labels, for each verbalizer."""
    with plain_attention(model.network, "sdpa"):
        return [
            [
                _each_verbalizer(model, prompt, document, question, question.trie)
                if question.trie
                else _read(model, _last_state(model, prompt, document, question), [question])[0]
                for question in prompt.questions
            ]
            for document in documents
        ]


def _each_verbalizer(
    model: LoadedModel,
    prompt: PromptTokens,
    document: DocumentIds,
    question: Question,
    trie: LabelTrie,
) -> Tensor:  # [labels] fp32
    before = [*prompt.prefix, *document, *question.token_ids]
    found = []
    for paths in trie.verbalizers:
        sums = []
        for path in paths:
            output = model.decoder(input_ids=_tensor(model, [[*before, *path]]), use_cache=False)
            states = output.last_hidden_state[0, len(before) - 1 : -1]  # [tokens, hidden]
            log_probs = model.unembed(states).float().log_softmax(-1)  # [tokens, vocab]
            sums.append(log_probs[range(len(path)), list(path)].sum() / _divisor(trie, path))
        found.append(torch.stack(sums).logsumexp(0))
    return torch.stack(found)


def _divisor(trie: LabelTrie, path: Sequence[int]) -> float:
    return float(len(path) ** trie.length_penalty)


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
    token_ids = [*prompt.prefix, *document, *question.token_ids]
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


def tree_flops(model: LoadedModel, prompt: PromptTokens, document_tokens: int) -> int:
    """Floating-point operations for one document and all questions; the instruction is there.

    The last layer counts at the answers only, even where the model's has to be run whole.
    """
    # — of a search only the question: what is followed depends on the document
    asked = [[q.token_ids] if q.searched else q.sequences for q in prompt.questions]
    branches = Branches.of([sequence for of_question in asked for sequence in of_question])
    tree = Tree.of([document_tokens], branches.nodes, prefix_tokens=len(prompt.prefix))
    positions = tree.positions
    ends = positions[document_tokens + np.array(branches.ends, dtype=np.int64)]
    layers: nn.ModuleList = model.decoder.layers  # type: ignore[assignment]
    config = model.network.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    *below, last = [linear_weights(layer, experts_per_token=chosen) for layer in layers]
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    # — a score and a weighted value: 2 multiply-adds for each query, key, head and dimension
    pairs = (len(layers) - 1) * attended_pairs(positions) + attended_pairs(ends)
    products = sum(below) * tree.tokens + last * len(ends)
    unembedding = config.hidden_size * config.vocab_size * len(ends)
    return int(2 * (products + unembedding) + 4 * heads * dim * pairs)


def attended_pairs(positions: NDArray[np.int64]) -> int:
    """How many (query, key) pairs a layer without a window attends to."""
    return int((positions + 1).sum())


def linear_weights(module: nn.Module, *, experts_per_token: int) -> int:
    """Weights that each token is multiplied with; of experts, the chosen ones."""
    dense = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    experts = sum(w.numel() * experts_per_token // w.shape[0] for w in expert_weights(module))
    return dense + experts
