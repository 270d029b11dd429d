"""assay's engine of encoders beside the pipeline of transformers, with the same answers.

    python -m benchmarks.encoders [--documents 256] [--tokens 128] [--rounds 5]

The model has the size of MiniLM-L6 and random weights. Both read the same texts in turns, with one
number of threads; the time of both includes the tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers import pipeline as transformers_pipeline

from benchmarks.timing import Turn, processor, take_turns
from pipeline.inference.encoder import EncoderEngine, load_encoder
from pipeline.inference.labels.tokenizer import encode
from pipeline.inference.loading import load_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
WORDS = 30_000
BATCH_DOCUMENTS = 32  # of transformers
BATCH_TOKENS = 8_192  # of assay


def main() -> None:
    """Prints the documents a second of both, and the largest difference of their answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of the longest document")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder)
        tokenizer = load_tokenizer(folder)
        labels = {"task": {"LABEL_0": ["LABEL_0"], "LABEL_1": ["LABEL_1"]}}
        network = load_encoder(folder, dtype="float32", device="cpu")
        engine = EncoderEngine(network, tokenizer, labels, max_batch_tokens=BATCH_TOKENS)
        baseline = transformers_pipeline(
            "text-classification", str(folder), device="cpu", dtype=torch.float32, top_k=None
        )
    source = np.random.default_rng(0)
    lengths = source.integers(1, options.tokens - 1, options.documents)
    texts = [" ".join(f"w{n}" for n in source.integers(0, WORDS, length)) for length in lengths]

    def of_assay() -> list[float]:
        read = engine.label([encode(tokenizer, text) for text in texts])
        return [float(p) for p in np.exp(read.log_probs[0][:, 0])]

    def of_transformers() -> list[float]:
        answers: Any = baseline(texts, batch_size=BATCH_DOCUMENTS)
        return [{each["label"]: each["score"] for each in own}["LABEL_0"] for own in answers]

    largest = np.abs(np.subtract(of_assay(), of_transformers())).max()
    ways = {"assay": of_assay, "transformers": of_transformers}
    timed = take_turns({n: Turn(way, len(texts), options.rounds, True) for n, way in ways.items()})
    print(
        f"{processor()}, {torch.get_num_threads()} threads; largest difference of p {largest:.1e}"
    )
    for name, own in timed.items():
        ratio = own.times(timed["assay"])
        print(f"{name:13} {1 / own.median:8,.1f} documents/s, {ratio:5.2f} times the time of assay")


def _write_model(folder: Path) -> None:
    """A random model, and a tokenizer of whole words."""
    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    names = [*special, *(f"w{number}" for number in range(WORDS))]
    more: dict[str, Any] = {"vocab_size": len(names), "intermediate_size": 4 * SIZES["hidden_size"]}
    network = BertForSequenceClassification(BertConfig(**SIZES, **more))
    torch.nn.init.normal_(network.classifier.weight, std=1.0)  # — so that answers differ
    network.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


if __name__ == "__main__":
    main()
