"""A model that sees digits: SmolLM2 with a linear connector, trained on scikit-learn's digits.

    python -m benchmarks.digits models/smollm2-135m-instruct.gguf FOLDER

Writes to FOLDER a model of the LLaVA kind, the digits that it was trained on and those held out as
Parquet, and their gold. Then, in FOLDER:

    assay run held_out.yaml && assay eval held_out.yaml --gold held_out.csv
    assay fit trained-read.yaml --gold trained.csv
    assay run held_out-read.yaml && assay eval held_out-read.yaml --gold held_out.csv

`held_out.yaml` asks which digit it is; the others name a readout of the image's own states. Only
the connector is trained; the vision tower is a fixed rotation of the pixels, and SmolLM2 stays as
it is.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from pipeline.cache import cache_dir
from pipeline.inference.images import ImageReader
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.loading import load_tokenizer
from pipeline.runtime.assembly import local_files
from pipeline.runtime.weights import locate
from pipeline.spec.model import ModelSpec
from pipeline.spec.parse import spec_of

SIDE, CHANNELS = 8, 3
TOWER = SIDE * SIDE * CHANNELS
LABELS = [str(digit) for digit in range(10)]
QUESTION = "Which digit is this? Answer with one digit."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Trains the connector and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder or GGUF file of SmolLM2")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    smollm2 = local_files(locate(ModelSpec(path=options.model), cache_dir()), cache_dir(), {})
    network = untrained(smollm2, options.folder / "model")
    images, digits = png_files()
    order = np.random.default_rng(0).permutation(len(digits))
    trained, held_out = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    started = time.perf_counter()
    train(network, options.folder / "model", [images[i] for i in trained], digits[trained], options)
    print(f"trained on {len(trained)} images in {time.perf_counter() - started:.0f} s")
    network.save_pretrained(options.folder / "model")
    write(options.folder, images, digits, trained, "trained")
    write(options.folder, images, digits, held_out, "held_out")


def png_files() -> tuple[list[bytes], NDArray[np.int64]]:
    """The digits as PNG files of 8 x 8 pixels, and what they show."""
    data: Any = load_digits()
    files = []
    for pixels in data.images:
        sink = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(sink, "PNG")
        files.append(sink.getvalue())
    return files, data.target


def untrained(smollm2: Path, folder: Path) -> Any:
    """SmolLM2 below a vision tower whose first states are a rotation of the pixels."""
    tokenizer: Any = load_tokenizer(smollm2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    text = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LlavaConfig(
        text_config=text.config,
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": TOWER,
            "intermediate_size": TOWER,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": SIDE,
        },
        vision_feature_layer=-2,  # of the two states of a tower of one layer, the first
        projector_hidden_act="linear",
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    network: Any = LlavaForConditionalGeneration(config)
    network.model.language_model.load_state_dict(text.model.state_dict())
    network.tie_weights()
    with torch.no_grad():
        embeddings: Any = network.model.vision_tower.embeddings
        nn.init.orthogonal_(embeddings.patch_embedding.weight.view(TOWER, TOWER))
        nn.init.zeros_(embeddings.position_embedding.weight)
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    processor: Any = LlavaProcessor
    processor(
        images,
        tokenizer,
        patch_size=SIDE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return network


def train(
    network: Any, folder: Path, images: Sequence[bytes], digits: NDArray[np.int64], options: Any
) -> None:
    """Trains the connector: to the embedding of each digit, then through SmolLM2's answers."""
    tokenizer, reader = load_tokenizer(folder), ImageReader(folder)
    spec = spec_of(asked(folder, folder, folder))
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    [question] = prompt.questions
    labels = torch.tensor([question.labels[label][0] for label in LABELS])
    classes = torch.from_numpy(digits)
    network.requires_grad_(False)
    pixels = torch.cat([reader.inputs(image)["pixel_values"] for image in images])
    tower = network.model.vision_tower(pixels, output_hidden_states=True).hidden_states[0][:, 1]
    embedding = network.get_input_embeddings()
    connector = network.model.multi_modal_projector
    with torch.no_grad():
        target = embedding(labels)[classes]
        bias = torch.cat([tower, torch.ones(len(tower), 1)], dim=1)
        gram = bias.T @ bias + torch.eye(bias.shape[1])
        solved = torch.linalg.solve(gram, bias.T @ target)
        connector.linear_1.weight.copy_(solved[:-1].T)
        connector.linear_1.bias.copy_(solved[-1])
        connector.linear_2.weight.copy_(torch.eye(len(solved[0])))
        connector.linear_2.bias.zero_()
    connector.linear_1.requires_grad_(True)
    before = embedding(torch.tensor(prompt.prefix))
    after = embedding(torch.tensor(question.token_ids))

    def logits(rows: Tensor) -> Tensor:  # [rows] -> [rows, digits]
        image = connector(tower[rows]).unsqueeze(1)
        around = (side.expand(len(rows), *side.shape) for side in (before, after))
        read = torch.cat([next(around), image, next(around)], dim=1)
        states = network.model.language_model(inputs_embeds=read, use_cache=False)
        of_labels: Tensor = network.lm_head(states.last_hidden_state[:, -1])[:, labels]
        return of_labels

    optimiser = torch.optim.Adam(connector.linear_1.parameters(), lr=1e-3)
    for step in range(options.steps):
        rows = torch.randperm(len(digits))[:32]
        loss: Any = nn.functional.cross_entropy(logits(rows), classes[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def asked(folder: Path, images: Path, output: Path) -> dict[str, Any]:
    """A spec that asks which digit an image shows."""
    return {
        "name": "digits",
        "model": {"path": str(folder), "dtype": "float32"},
        "input": {"path": str(images), "image": "image", "id": "id"},
        "output": str(output),
        "tasks": [{"name": "digit", "question": QUESTION, "labels": LABELS}],
    }


def write(
    folder: Path,
    images: Sequence[bytes],
    digits: NDArray[np.int64],
    rows: NDArray[np.int64],
    name: str,
) -> None:
    """The images of these rows, their gold, and the specs."""
    ids = [f"digit-{row}" for row in rows]
    table = pa.table({"id": ids, "image": pa.array([images[i] for i in rows], pa.binary())})
    pq.write_table(table, folder / f"{name}.parquet")
    gold = "".join(f"{id},{digits[row]}\n" for id, row in zip(ids, rows, strict=True))
    (folder / f"{name}.csv").write_text(f"id,digit\n{gold}")
    spec = asked(folder / "model", folder / f"{name}.parquet", folder / f"out-{name}")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    [task] = spec["tasks"]
    readout = {"name": task["name"], "labels": LABELS, "readout": str(folder / "digit.safetensors")}
    read = {**spec, "name": "digits-read", "tasks": [readout]}
    read["output"] = str(folder / f"read-{name}")
    (folder / f"{name}-read.yaml").write_text(yaml.safe_dump(read, sort_keys=False))


if __name__ == "__main__":
    main()
