"""Folders with random encoders of each family, and a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(90)]
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "id2label": {0: "good", 1: "bad", 2: "ugly"},
    "label2id": {"good": 0, "bad": 1, "ugly": 2},
}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
MODERN: dict[str, Any] = {"local_attention": 16, "global_attn_every_n_layers": 2}
FAMILIES = {
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "deberta-v2": DEBERTA,
    "modernbert": MODERN,
    "llama": {"num_key_value_heads": 2, "pad_token_id": None},
}
# Of further families, what a small model of them needs.
OTHERS: dict[str, Any] = {
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "distilbert": {"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 64},
    "longformer": {"attention_window": 16},
}


def write_encoder(
    folder: Path, family: str = "bert", head: Any = AutoModelForSequenceClassification, **more: Any
) -> Path:
    """A folder with a random model of the family whose answers are far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **{**SIZES, **(FAMILIES | OTHERS).get(family, {}), **more}
    )
    network = head.from_config(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    network.save_pretrained(folder)
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return folder
