"""A model's folder that cannot be used is one line that names the file, before a worker starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.errors import ModelError
from pipeline.runtime.model_folder import check_folder
from pipeline.runtime.weights import locate
from pipeline.spec.model import ModelSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def put(name: str, content: str | bytes | None) -> Damage:
    """A file with another content; None: without the file."""

    def damage(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def edit(name: str, **changes: Any) -> Damage:
    """A JSON file with other values; None: without the key."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return damage


def cut(stop: int) -> Damage:
    return lambda folder: put(WEIGHTS, (folder / WEIGHTS).read_bytes()[:stop])(folder)


def in_shards(shard_of: Callable[[str], str]) -> Damage:
    """The weights in one shard, and an index with the file of each tensor."""

    def damage(folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        put(INDEX, json.dumps({"weight_map": {n: shard_of(n) for n in names}}))(folder)

    return damage


def with_a_token(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 10_000
    put("tokenizer.json", json.dumps(content))(folder)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    "damage, name, reason",
    [
        (put(WEIGHTS, b""), WEIGHTS, "is not whole"),
        (cut(1_000), WEIGHTS, "is not whole"),
        (put(WEIGHTS, LFS), WEIGHTS, "is not whole"),
        (put("config.json", None), "config.json", "no such file"),
        (put("config.json", '{"model_type": '), "config.json", "cannot be read"),
        (put("config.json", b"\xff\xfe\x00"), "config.json", "cannot be read"),
        (put("config.json", "[" * 100_000), "config.json", "cannot be read"),
        (put("config.json", "[]"), "config.json", "not a mapping"),
        (edit("config.json", model_type=None), "config.json", "no model_type"),
        (edit("config.json", vocab_size=100), "tokenizer.json", "100 tokens by vocab_size"),
        (with_a_token, "tokenizer.json", "up to number 10000"),
        (put("tokenizer.json", None), "tokenizer.json", "no tokenizer"),
        (put("tokenizer.json", "{"), "tokenizer.json", "cannot be read"),
        (put("tokenizer_config.json", LFS), "tokenizer_config.json", "cannot be read"),
        (put(INDEX, "{"), INDEX, "cannot be read"),
        (in_shards(lambda name: "model-2.safetensors"), "model-2.safetensors", "is not in it"),
        (
            in_shards(lambda name: f"model-{1 + ('lm_head' in name)}.safetensors"),
            "model-2.safetensors",
            f"lm_head.weight of {INDEX}",
        ),
    ],
)
def test_a_broken_folder_is_one_line_that_names_the_file(
    damage: Damage, name: str, reason: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    with pytest.raises(ModelError) as refused:
        locate(ModelSpec(path=str(folder)), tmp_path / "cache")
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"{folder / name}: ") and reason in line and "again" in line


KERNEL = "kernels-community/flash-attn"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"_attn_implementation": KERNEL}, f"_attn_implementation: {KERNEL} is code of the Hub"),
        ({"attn_implementation": f"{KERNEL}@v1:f"}, "never run"),
        ({"experts_implementation": "someone/experts"}, "never run"),
        ({"text_config": {"attn_implementation": KERNEL}}, "never run"),
        ({"attn_implementation": {"text_config": KERNEL}}, "never run"),
        ({"use_kernels": True}, "use_kernels: True is code of the Hub"),
        *[
            ({"quantization_config": {"quant_method": method}}, f"are quantised ({method})")
            for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "mxfp4")
        ],
        ({"compression_config": {"format": "x"}}, "are quantised"),
    ],
)
def test_a_configuration_that_asks_for_what_is_not_supported_is_refused(
    changes: dict[str, Any], reason: str, folder: Path
) -> None:
    edit("config.json", **changes)(folder)
    with pytest.raises(ModelError) as refused:
        check_folder(folder)
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"{folder / 'config.json'}: ") and reason in line


@pytest.mark.parametrize(
    "damage",
    [
        edit("config.json", attn_implementation="sdpa", use_kernels=False),
        edit("config.json", auto_map={"AutoModelForCausalLM": "modeling.Own"}),
        put("trainer_state.json", "{"),
        in_shards(lambda name: "model-1.safetensors"),
    ],
)
def test_a_folder_that_can_be_used_is_not_refused(damage: Damage, folder: Path) -> None:
    damage(folder)
    check_folder(folder)


def test_vllm_reads_quantised_weights(folder: Path) -> None:
    edit("config.json", quantization_config={"quant_method": "awq"})(folder)
    check_folder(folder, engine="vllm")


def test_a_control_token_beyond_the_vocabulary_is_no_mistake(folder: Path) -> None:
    """As some fine-tuned models have one for padding, which no text becomes."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 9_999, "content": "<pad>"})
    put("tokenizer.json", json.dumps(content))(folder)
    check_folder(folder)


@pytest.mark.parametrize("content", [b"", b"GGU", LFS.encode(), b"\x00" * 100])
def test_a_file_that_is_not_gguf_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=f"^{file}: is not a GGUF file"):
        locate(ModelSpec(path=str(file)), tmp_path / "cache")
