"""Turn a GGUF file into a folder of safetensors, once: reading GGUF takes half a minute.

Knows transformers' GGUF reader and its leftovers. Knows nothing of caches or of who asks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import ModelError


def convert(gguf: Path, folder: Path) -> None:
    """Write the file's weights, dequantised to float32 (exact), and its tokenizer to a folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        network = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{gguf}: cannot be read as a GGUF model: {error}") from error
    # The weights are plain now, but the model still says that it is quantised and refuses to save.
    vars(network).pop("hf_quantizer", None)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
