"""Forwards of independent prompts by the family's own code, with which the tree is compared.

Entry points: `PromptAlone`, `forward_alone`, `states_alone` and `greedy_alone`. They are run inside
a block of `plain_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from pipeline.inference.images import ImageDocument
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import whole_prompt


@dataclass(frozen=True, slots=True)
class PromptAlone:
    """One document between token ids."""

    before: Sequence[int]
    document: Sequence[int]  # may be an `ImageDocument`
    after: Sequence[int]

    def __len__(self) -> int:
        return len(self.before) + len(self.document) + len(self.after)

    def inputs(self, model: LoadedModel) -> dict[str, Tensor]:
        """The inputs of the whole model."""
        before, document, after = self.before, self.document, self.after
        if not isinstance(document, ImageDocument):
            ids = torch.tensor([[*before, *document, *after]], device=model.device)
            return {"input_ids": ids}
        assert model.images is not None, "a model without images"
        image = model.images.inputs(document.image)
        text = document[image["input_ids"].shape[1] :]
        return whole_prompt(model.network, image, before=before, after=(*text, *after))


def forward_alone(model: LoadedModel, prompt: PromptAlone, **options: bool) -> Any:
    """The output of the decoder, or for a document with an image of all that is below the head."""
    has_image = isinstance(prompt.document, ImageDocument)
    network = model.network.base_model if has_image else model.decoder
    return network(**prompt.inputs(model), use_cache=False, **options)


def states_alone(model: LoadedModel, prompt: PromptAlone) -> list[Tensor]:  # [tokens, hidden]
    """The `hidden_states` of transformers; below an image, the states that enter each layer.

    They differ only with DeepStack, which adds to the states between two layers.
    """
    if not isinstance(prompt.document, ImageDocument):
        output = forward_alone(model, prompt, output_hidden_states=True)
        return [states[0] for states in output.hidden_states]
    entering: list[Tensor] = []

    def enter(_layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        entering.append((args[0] if args else kwargs["hidden_states"])[0])

    layers: nn.ModuleList = model.decoder.layers  # type: ignore[assignment]
    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.callback(handle.remove)
        output = forward_alone(model, prompt)
    return [*entering, output.last_hidden_state[0]]


@torch.inference_mode()
def greedy_alone(
    model: LoadedModel, prompt: PromptAlone, *, most: int
) -> list[tuple[int, float]]:  # at most `most`
    """The likeliest next tokens, one after the other, each with its probability."""
    network: Any = model.network
    own, make_config = network.generation_config, cast(Any, GenerationConfig)
    config = make_config(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id or 0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    inputs = prompt.inputs(model)
    chosen = network.generate(**inputs, generation_config=config)
    p = (logits[0].float().softmax(-1) for logits in chosen.logits)
    tokens = chosen.sequences[0, -len(chosen.logits) :].tolist()
    return [(token, float(of_all[token])) for token, of_all in zip(tokens, p, strict=True)]
