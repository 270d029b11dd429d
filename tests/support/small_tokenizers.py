"""Tokenizers of some pieces, as those of Llama 3 and SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.inference.labels.tokenizer import DocumentTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROLS = ["<s>", "</s>", "<|user|>"]


def byte_pairs(
    *words: str, merges: Sequence[tuple[str, str]] = (), ignore_merges: bool = False
) -> Tokenizer:
    """A byte-level BPE whose vocabulary holds some whole words too."""
    pieces = [*ALPHABET, *words, *("".join(merge) for merge in merges)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=ignore_merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not ignore_merges
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def whole_words() -> PreTrainedTokenizerFast:
    """As Llama 3: a word that is in the vocabulary is taken whole, whatever the merges are."""
    backend = byte_pairs(*CONTROLS, "yes", ignore_merges=True)
    backend.add_special_tokens(CONTROLS[:2])
    backend.add_tokens([AddedToken(CONTROLS[2], special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template="{# <|user|> #}"
    )


def pieces_of_words(unknown: str = "<unk>") -> PreTrainedTokenizerFast:
    """As SentencePiece: control pieces are in the scored vocabulary itself."""
    letters = "▁abcdefghijklmnopqrstuvwxyzANTY<>/|:., \n"
    scored = [(unknown, 0.0), *((control, 0.0) for control in CONTROLS)]
    scored = list(dict(scored).items())
    scored += [(letter, -5.0) for letter in dict.fromkeys(letters)]
    scored += [("▁Yes", -1.0), ("▁No", -1.0), ("s>", -2.0)]
    backend = Tokenizer(models.Unigram(scored, unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([unknown, *CONTROLS[:2]])
    backend.add_tokens([AddedToken(CONTROLS[2], special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token=unknown,
        chat_template="{# <|user|> #}",
    )


def decoded(documents: DocumentTokenizer, token_ids: list[int]) -> str:
    """The text of a document's tokens."""
    text: str = documents._backend.decode(token_ids, skip_special_tokens=False)
    return text
