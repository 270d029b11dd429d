"""The arithmetic that labelling one document needs: matrix products, each prefix read once.

Knows a model's shapes and a prompt's lengths. Knows nothing of time.
"""

from __future__ import annotations

from torch import nn

from pipeline.inference.model import LoadedModel
from pipeline.inference.tokens import PromptTokens
from pipeline.inference.tree import Node, Tree


def tree_flops(model: LoadedModel, prompt: PromptTokens, document_tokens: int) -> int:
    """Floating-point operations for one document and all questions; the instruction is there."""
    questions = tuple(Node(len(question.token_ids)) for question in prompt.questions)
    tree = Tree.of([Node(document_tokens, questions)], prefix_tokens=len(prompt.opening))
    config = model.network.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    # — a score and a weighted value: 2 multiply-adds for each query, key, head and dimension
    attention = 4 * heads * dim * attended_pairs(tree) * config.num_hidden_layers
    unembedding = 2 * config.hidden_size * config.vocab_size * len(questions)
    return int(2 * linear_weights(model) * tree.tokens + attention + unembedding)


def attended_pairs(tree: Tree) -> int:
    """How many (query, key) pairs a layer without a window attends to."""
    return sum(position + 1 for position in tree.positions)


def linear_weights(model: LoadedModel) -> int:
    """Weights that each token is multiplied with, in all layers; of experts, the chosen ones."""
    config = model.network.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    dense = sum(m.weight.numel() for m in model.decoder.modules() if isinstance(m, nn.Linear))
    experts = sum(
        p.numel() * chosen // p.shape[0] for p in model.decoder.parameters() if p.ndim == 3
    )
    return dense + experts
