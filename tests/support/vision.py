"""Tiny models with random weights that see images, saved as users' folders are, and images.

Entry points: `FAMILIES`, `save_vision_model`, `picture`, `encoded_picture`.
"""

from __future__ import annotations

import io
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from byte_tokenizer import make_byte_tokenizer
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.processing_auto import processor_class_from_name

# The byte tokenizer, with a template that writes the parts of a turn as these families do.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
}
_QWEN: dict[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_PIXELS = {"min_pixels": 16 * 16, "max_pixels": 64 * 64, "patch_size": 8, "merge_size": 2}
_TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
_CLIP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_GRIDS = [[32, 64], [64, 32], [64, 64]]

_LLAVA: dict[str, Any] = {
    "vision": {"model_type": "clip_vision_model", "image_size": 32, **_SIGLIP},
    "tokens": ["<image>"],
    "written": "<image>\n",
}
_LLAVA_PROCESSOR = {
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_IDEFICS: dict[str, Any] = {
    "text": {"model_type": "llama"},
    "vision": {"image_size": 32, **_SIGLIP},
    "config": {"scale_factor": 2},
    "tokens": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"],
    "written": "<image>",
}
_QWEN_VL: dict[str, Any] = {
    "images": ("Qwen2VLImageProcessor", _PIXELS),
    "tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "written": "<|vision_start|><|image_pad|><|vision_end|>",
}

# By family: configuration of the text and of the vision tower, more keys of the configuration,
# image processor and its settings, processor and its settings, and what a template writes for an
# image.
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        **_LLAVA,
        "text": {"model_type": "llama"},
        "images": ("CLIPImageProcessor", _CLIP),
        "processor": ("LlavaProcessor", _LLAVA_PROCESSOR),
    },
    "llava_next": {
        **_LLAVA,
        "text": {"model_type": "mistral"},
        "config": {"image_grid_pinpoints": _GRIDS},
        "images": ("LlavaNextImageProcessor", {**_CLIP, "image_grid_pinpoints": _GRIDS}),
        "processor": ("LlavaNextProcessor", _LLAVA_PROCESSOR),
    },
    "idefics3": {
        **_IDEFICS,
        "images": ("Idefics3ImageProcessor", _TILES),
        "processor": ("Idefics3Processor", {"image_seq_len": 4}),
    },
    "smolvlm": {
        **_IDEFICS,
        "images": ("SmolVLMImageProcessor", _TILES),
        "processor": ("SmolVLMProcessor", {"image_seq_len": 4}),
    },
    "qwen2_5_vl": {
        **_QWEN_VL,
        "text": {"rope_parameters": _MROPE},
        "vision": {"hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1], **_QWEN},
        "processor": ("Qwen2_5_VLProcessor", {}),
    },
    "qwen3_vl": {
        **_QWEN_VL,
        "text": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision": {
            "hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            **_QWEN,
        },
        "processor": ("Qwen3VLProcessor", {}),
    },
    "gemma3": {
        "text": {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "vision": {"model_type": "siglip_vision_model", "image_size": 32, **_SIGLIP},
        "config": {"mm_tokens_per_image": 4},
        "images": ("Gemma3ImageProcessor", {"size": {"height": 32, "width": 32}}),
        "processor": ("Gemma3Processor", {"image_seq_length": 4}),
        "tokens": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "written": "<start_of_image>",
    },
}


def vision_tokenizer(family: str) -> Any:
    """The byte tokenizer with the image tokens of the family."""
    parts = FAMILIES[family]
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": parts["tokens"]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", parts["written"])
    if family == "gemma3":
        tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = parts["tokens"]
        ids = (tokenizer.convert_tokens_to_ids(token) for token in parts["tokens"])
        tokenizer.boi_token_id, tokenizer.image_token_id, tokenizer.eoi_token_id = ids
    return tokenizer


def vision_network(family: str, tokenizer: Any) -> Any:
    """A random network of the family whose answers depend on the image."""
    parts = FAMILIES[family]
    image_token = parts["tokens"][1 if len(parts["tokens"]) > 1 else 0]
    token_id = tokenizer.convert_tokens_to_ids(image_token)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        text_config={**_TEXT, **parts["text"]},
        vision_config=parts["vision"],
        image_token_id=token_id,
        image_token_index=token_id,
        **parts.get("config", {}),
    )
    network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in network.parameters():
        # The default of 0.02 makes every attention weight alike, which hides wrong masks.
        torch.nn.init.normal_(parameter, std=0.25) if parameter.ndim > 1 else None
    return network


def save_vision_model(folder: Path, family: str) -> Path:
    """The folder, with a random model of the family, its processor and its tokenizer."""
    parts = FAMILIES[family]
    tokenizer = vision_tokenizer(family)
    vision_network(family, tokenizer).save_pretrained(folder)
    name, settings = parts["images"]
    image_processor = getattr(transformers, name)(**settings)
    name, settings = parts["processor"]
    family: Any = processor_class_from_name(name)
    own = {"get_attributes": classmethod(lambda _class: ["image_processor", "tokenizer"])}
    more = {"video_processor": None} if "video_processor" in signature(family).parameters else {}
    type(name, (family,), own)(
        image_processor, tokenizer, chat_template=tokenizer.chat_template, **more, **settings
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded_picture(width: int, height: int, seed: int = 0, format: str = "PNG") -> bytes:
    """The same as a file."""
    return saved(picture(width, height, seed), format)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()
