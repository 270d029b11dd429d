"""A model's files in another number format, for processes that share the weights of one machine.

torch maps a safetensors file into memory: all processes that read it share the pages of the file.
transformers keeps mapped tensors as they are, and makes a private copy of those that it casts. So
a copy of the files that needs no cast is shared. Entry points: `needs_cast` and `cast_files`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration, tokenizer, template


def needs_cast(folder: Path, dtype: str) -> bool:
    """Whether transformers would cast weights of the folder, and a cast copy gives the same ones.

    It does not for quantised weights, and for families that keep some weights in float32.
    """
    target = getattr(torch, dtype)
    formats = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            formats |= {_FORMATS.get(tensors.get_slice(name).get_dtype()) for name in names}
    if formats <= {target} or None in formats:
        return False
    if target == torch.float32:
        return True
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        kind: Any = AutoModelForCausalLM
        if getattr(config, "vision_config", None):
            kind = AutoModelForImageTextToText
        network = kind.from_config(config)
    kept = set(network._keep_in_fp32_modules_strict)
    if target == torch.float16:
        kept |= set(network._keep_in_fp32_modules)
    return not kept


def cast_files(source: Path, target: Path, dtype: str) -> None:
    """Write the model of a folder to another folder, with its floating-point weights cast."""
    for pattern in _OTHER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)
    for file in source.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            cast = dict[str, torch.Tensor]()
            names = tensors.keys()
            for name in names:  # — one at a time is in memory as it was
                tensor = tensors.get_tensor(name)
                is_float = tensor.is_floating_point()
                cast[name] = tensor.to(getattr(torch, dtype)) if is_float else tensor
        save_file(cast, target / file.name, metadata={"format": "pt"})
