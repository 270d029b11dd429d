"""A loaded causal language model whose attention is the tree's.

Entry points: `LoadedModel`; `plain_attention`, which switches the tree off for a while. Must not
read files: `loading` builds a LoadedModel.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from pipeline.inference.attention.reference import attend_plainly
from pipeline.inference.attention.tiles import Kernel
from pipeline.inference.images import ImageDocument, ImageReader
from pipeline.inference.memory import CACHE_COPIES
from pipeline.inference.model.llama import LlamaDecoder
from pipeline.inference.model.vision import EmbeddedDocument, read_images
from pipeline.spec.model import KeptFormat


@dataclass(slots=True)
class TokenCounter:
    """A count of tokens that grows as a model reads."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose attention is the tree's, with the properties that the engine reads."""

    network: PreTrainedModel
    windows: frozenset[int | None]  # how many positions back its layers see; None: all
    context_tokens: int
    schedule: Literal["fused", "staged"]  # staged where layers carry a recurrent state
    llama: LlamaDecoder | None = None  # None: the family's own code runs the layers
    kernel: Kernel = attend_plainly  # of the attention
    kernel_name: str = "torch"
    products: str = "torch"  # the library of its linear layers
    kv: KeptFormat = "none"  # of keys and values that outlive a forward; none: the model's own
    images: ImageReader | None = None  # of a model that sees images
    cache_copies: int = CACHE_COPIES  # of the staged schedule
    counter: TokenCounter = field(default_factory=TokenCounter, compare=False)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def processor(self) -> dict[str, str]:
        """What computes the model: the products, and the attention in its format."""
        return {"products": self.products, "attention": self.kernel_name}

    @property
    def decoder(self) -> nn.Module:
        return decoder_of(self.network)

    @property
    def layers(self) -> int:
        """How many layers the decoder has; 0 if it does not list them: only its end can be read."""
        layers = getattr(self.decoder, "layers", None)
        return len(layers) if isinstance(layers, nn.ModuleList) else 0

    def cache_kwargs(self, cache: Cache) -> dict[str, object]:
        """The arguments of a forward of the decoder that reads the cache and adds to it."""
        has_new_name = "cache" in inspect.signature(self.decoder.forward).parameters
        # — transformers renamed it in 5.24
        return {"cache" if has_new_name else "past_key_values": cache, "use_cache": True}

    def with_images(self, documents: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The documents, those with an image as the rows that the decoder reads of them."""
        shown = [document for document in documents if isinstance(document, ImageDocument)]
        if not shown:
            return list(documents)
        assert self.images is not None, "a model without images"
        inputs = [self.images.inputs(document.image) for document in shown]
        rows = iter(read_images(self.network, self.decoder, inputs))
        return [
            EmbeddedDocument(document, next(rows))
            if isinstance(document, ImageDocument)
            else document
            for document in documents
        ]

    def unembed(
        self,
        states: Tensor,  # [rows, hidden]
        tokens: Tensor | None = None,  # [tokens] int64
    ) -> Tensor:  # [rows, vocab], or [rows, tokens] fp32
        """Logits over the vocabulary, scaled and capped as the family does it.

        With `tokens`, of these alone, computed in float32.
        """
        config, head = self.network.config.get_text_config(), self.network.lm_head
        logits: Tensor
        if tokens is None:
            logits = head(states)
        else:
            logits = states.float() @ head.weight[tokens].float().T
            if head.bias is not None:
                logits = logits + head.bias[tokens].float()
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        for name in ("logit_scale", "lm_head_multiplier"):
            if scale := getattr(config, name, None):
                logits = logits * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits


def decoder_of(network: PreTrainedModel) -> PreTrainedModel:
    """The decoder: of a model that sees images, the part that reads the vision tower's states."""
    sees = getattr(network.config, "vision_config", None) is not None
    whole: Any = network
    decoder: PreTrainedModel = whole.get_decoder() if sees else whole.model
    return decoder


def set_attention(network: PreTrainedModel, implementation: str) -> None:
    """Sets the attention of the decoder; a vision tower keeps its own."""
    sees = getattr(network.config, "vision_config", None) is not None
    (decoder_of(network) if sees else network).set_attn_implementation(implementation)


def own_attention(network: PreTrainedModel) -> str:
    """The fastest of transformers' attention implementations that computes the family exactly."""
    # — `sdpa` applies no cap to scores, and older versions of transformers do not refuse that
    softcap = getattr(network.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if network._supports_sdpa and softcap is None else "eager"


@contextmanager
def plain_attention(network: PreTrainedModel, implementation: str | None = None) -> Iterator[None]:
    """Run the model with one of transformers' own attention implementations inside the block.

    None is the fastest that the family has: `sdpa`, unless it caps scores or has attention sinks.
    """
    if implementation is None:
        implementation = own_attention(network)
    before = decoder_of(network).config._attn_implementation
    set_attention(network, implementation)
    try:
        yield
    finally:
        set_attention(network, before)
