"""Hidden states of documents at chosen layers: what a trained readout is fitted on.

    prefix  ──  document        ──┬── suffix 0
                 its own rows'     └── suffix 1   the state at each one's last token
                 mean

State N is the residual stream after N layers, as the `hidden_states[N]` of transformers: below
the last layer before the final norm, at the last one after it. Knows token ids, the tree and a
decoder's layers. Knows nothing of labels, text or of what is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.inference.attention.compiled import compile_plans, to_device
from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.plan import plan_attention
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import pack
from pipeline.inference.schedules.forward import prefill
from pipeline.inference.schedules.interface import Asked
from pipeline.inference.schedules.select import read_prefix

DocumentIds = Sequence[int]
Batches = Iterator[tuple[list[int], Tensor]]  # documents, and [docs, layers, kinds, hidden]


def document_states(
    model: LoadedModel,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],  # of one token at least
    documents: Sequence[DocumentIds],  # of one token at least
    *,
    layers: Sequence[int],  # rising, from 1 to all
    max_batch_tokens: int,
    advance: Callable[[int], None] = lambda documents: None,
) -> NDArray[np.float32]:  # [docs, layers, kinds, hidden]
    """The states of every document; kinds are the suffixes' last tokens, then the mean.

    The mean is over the document's own tokens. Layers above the highest wanted one are not run,
    unless the model goes level by level. `advance` hears how many documents have been read.
    """
    hidden_size = model.network.config.get_text_config().hidden_size
    shape = (len(documents), len(layers), len(suffixes) + 1, hidden_size)
    found = np.empty(shape, dtype=np.float32)
    read = _staged if model.schedule == "staged" else _fused
    for batch, states in read(model, prefix, suffixes, documents, layers, max_batch_tokens):
        found[batch] = states.float().numpy(force=True)
        advance(len(batch))
    return found


def layer_count(model: LoadedModel) -> int:
    """How many layers the decoder has; ModelError where it does not say."""
    layers = getattr(model.decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(model.decoder).__name__}: its layers cannot be told apart")
    return len(layers)


def _fused(
    model: LoadedModel,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    documents: Sequence[DocumentIds],
    layers: Sequence[int],
    max_batch_tokens: int,
) -> Batches:
    kept = prefill(model, prefix)
    branches = Branches.of(suffixes)
    lengths = [len(document) + len(branches.token_ids) for document in documents]
    for batch in pack(lengths, max_tokens=max_batch_tokens):
        read = [documents[i] for i in batch]
        yield batch, _packed_states(model, kept, branches, read, layers)


@torch.inference_mode()
def _packed_states(
    model: LoadedModel,
    prefix: PrefixKV | None,
    branches: Branches,
    documents: Sequence[DocumentIds],
    layers: Sequence[int],
) -> Tensor:  # [docs, layers, kinds, hidden]
    """Of one batch, in one forward of as many layers as are needed."""
    lengths = [len(document) for document in documents]
    above = prefix.tokens if prefix else 0
    tree = Tree.of(lengths, branches.nodes, prefix_tokens=above)
    read = [token for document in documents for token in document]
    token_ids = np.array([*read, *branches.token_ids * len(documents)])
    ids, positions, ends = to_device(
        [token_ids, tree.positions, tree.rows_at(branches.ends)], model.device
    )

    def pick(states: Tensor) -> Tensor:  # [1, rows, hidden] -> [docs, kinds, hidden]
        last = states[0, ends].view(len(documents), len(branches.ends), -1)
        own = torch.split(states[0, : tree.document_rows].float(), lengths)
        mean = torch.stack([rows.mean(dim=0) for rows in own])
        return torch.cat([last.float(), mean.unsqueeze(1)], dim=1)

    plans = {window: plan_attention(tree, window=window) for window in model.windows}
    compiled = compile_plans(plans, model.device, model.kernel) if model.kernel else None
    with _capturing(model, layers, pick, stop=True) as captured, suppress(_ReachedError):
        model.decoder(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            tree=TreeAttention(plans, prefix, compiled=compiled),
        )
    return torch.stack([captured[layer][0] for layer in layers], dim=1)


def _staged(
    model: LoadedModel,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    documents: Sequence[DocumentIds],
    layers: Sequence[int],
    max_batch_tokens: int,
) -> Batches:
    asked = read_prefix(model, prefix).ask(suffixes)
    ends = torch.tensor([len(suffix) - 1 for suffix in suffixes], device=model.device)
    for place, document in enumerate(documents):
        yield [place], _levels_states(model, asked, document, ends, layers)


@torch.inference_mode()
def _levels_states(
    model: LoadedModel,
    asked: Asked,
    document: DocumentIds,
    ends: Tensor,  # [suffixes] int64
    layers: Sequence[int],
) -> Tensor:  # [1, layers, kinds, hidden]
    """Of one document, which is read before the suffixes below it."""
    with _capturing(model, layers, lambda states: states, stop=False) as captured:
        asked.states([document])
    found = []
    for layer in layers:
        read, below = captured[layer]  # [1, tokens, hidden], [suffixes, tokens, hidden]
        last = below[torch.arange(len(ends), device=ends.device), ends].float()
        mean = read[0, asked.prefix_tokens :].float().mean(dim=0, keepdim=True)
        found.append(torch.cat([last, mean]))
    return torch.stack(found).unsqueeze(0)


class _ReachedError(Exception):
    """Leaves the decoder behind the highest layer that is wanted."""


@contextmanager
def _capturing(
    model: LoadedModel, layers: Sequence[int], pick: Callable[[Tensor], Tensor], *, stop: bool
) -> Iterator[dict[int, list[Tensor]]]:
    """What is picked of the states of each layer, forward by forward, as long as it is open."""
    captured: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    decoder: Any = model.decoder

    def keep(layer: int, output: Any) -> None:
        states = getattr(output, "last_hidden_state", output)
        states = states[0] if isinstance(states, tuple) else states
        captured[layer].append(pick(states.to(model.device)))
        if stop and layer == layers[-1]:
            raise _ReachedError

    handles = []
    for layer in layers:
        # — what leaves the last layer is not its state yet: the final norm comes after it
        whole = layer == len(decoder.layers)
        module: nn.Module = decoder if whole else decoder.layers[layer - 1]
        handles.append(
            module.register_forward_hook(lambda _module, _inputs, output, n=layer: keep(n, output))
        )
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
