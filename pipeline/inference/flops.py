"""The arithmetic that labelling one document needs: matrix products, each prefix read once.

Knows a model's shapes and a prompt's lengths. Knows nothing of time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pipeline.inference.branches import Branches
from pipeline.inference.experts import expert_weights
from pipeline.inference.model import LoadedModel
from pipeline.inference.tokens import PromptTokens
from pipeline.inference.tree import Tree


def tree_flops(model: LoadedModel, prompt: PromptTokens, document_tokens: int) -> int:
    """Floating-point operations for one document and all questions; the instruction is there.

    The last layer counts at the answers only, even where the model's has to be run whole.
    """
    # — of a search only the question: what is followed depends on the document
    asked = [[q.token_ids] if q.searched else q.sequences for q in prompt.questions]
    branches = Branches.of([sequence for of_question in asked for sequence in of_question])
    tree = Tree.of([document_tokens], branches.nodes, prefix_tokens=len(prompt.opening))
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
