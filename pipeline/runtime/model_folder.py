"""Checks a model's folder by its JSON files and headers. Entry point: `check_folder`.

The driver calls it before workers start. It reads no weights, and must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.errors import ModelError, one_line

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"
_JSON = (_CONFIG, _INDEX, _TOKENIZER, "tokenizer_config.json", "generation_config.json")
_TOKENIZERS = (_TOKENIZER, "*.model", "vocab.*", "tekken.json")
_AGAIN = "fetch the model again"


def check_folder(folder: Path, *, engine: str = "assay") -> None:
    """ModelError names the first file that is missing, broken or unsupported."""
    contents = {name: _mapping(folder / name) for name in _JSON if (folder / name).is_file()}
    stored = {file.name: _tensors(file) for file in sorted(folder.glob("*.safetensors"))}
    listed = contents.get(_INDEX, {}).get("weight_map", {})
    for name, shard in listed.items() if isinstance(listed, dict) else ():
        if name not in stored.get(shard, ()):
            raise ModelError(f"{folder / str(shard)}: {name} of {_INDEX} is not in it; {_AGAIN}")
    if _CONFIG not in contents:
        raise ModelError(f"{folder / _CONFIG}: there is no such file; {_AGAIN}")
    config = contents[_CONFIG]
    _check_config(folder / _CONFIG, config, engine)
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise ModelError(f"{folder / _TOKENIZER}: there is no tokenizer; {_AGAIN}")
    size = {**config, **(config.get("text_config") or {})}.get("vocab_size")
    if isinstance(size, int) and (last := _last_token(contents.get(_TOKENIZER, {}))) >= size:
        raise ModelError(
            f"{folder / _TOKENIZER}: has tokens up to number {last}, and the model {size} tokens "
            f"by vocab_size of its {_CONFIG}; {_AGAIN}"
        )


def _last_token(tokenizer: Mapping[str, Any]) -> int:
    """The largest id of a token that a text may have, by tokenizer.json; -1 without one."""
    added = {token["id"] for token in tokenizer.get("added_tokens") or ()}
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or ()
    is_list = isinstance(vocabulary, list)
    ids = range(len(vocabulary)) if is_list else dict(vocabulary).values()
    return max((number for number in ids if number not in added), default=-1)


def _mapping(file: Path) -> dict[str, Any]:
    """The content of a JSON file; ModelError unless it is a mapping."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {one_line(error)}; {_AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: is not a mapping of keys to values; {_AGAIN}")
    return content


def _tensors(file: Path) -> set[str]:
    """The names of the tensors in a file; ModelError if the file is not whole."""
    try:
        with safe_open(file, "np") as tensors:
            return set(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: is not whole: {one_line(error)}; {_AGAIN}") from error


def _check_config(file: Path, config: Mapping[str, Any], engine: str) -> None:
    """ModelError if the configuration names no family, quantised weights, or code of the Hub."""
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file}: names no model_type; {_AGAIN}")
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for key, value in part.items():
            is_kernel = key.endswith("_implementation") and "/" in str(value)
            if is_kernel or (key == "use_kernels" and value):
                raise ModelError(
                    f"{file}: {key}: {value} is code of the Hub, which is never run; remove it"
                )
            if key in ("quantization_config", "compression_config") and engine == "assay":
                method = value.get("quant_method") if isinstance(value, dict) else value
                raise ModelError(
                    f"{file}: the weights are quantised ({method}), which assay's engine does not "
                    "read; name the model without quantisation, or write engine: vllm"
                )
