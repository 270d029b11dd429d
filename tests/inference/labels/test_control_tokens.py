"""A document is never a control token, whatever it writes; other text has the model's tokens."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from small_tokenizers import byte_pairs, decoded, pieces_of_words, whole_words
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.inference.labels.tokenizer import DocumentTokenizer, control_ids


@pytest.fixture(params=["bytes", "words", "pieces"])
def any_tokenizer(
    request: pytest.FixtureRequest, byte_tokenizer: PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    made = {"bytes": lambda: byte_tokenizer, "words": whole_words, "pieces": pieces_of_words}
    return made[request.param]()


def controls_of(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    unknown = tokenizer.unk_token
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    controls = [content for content in added if content != unknown]
    assert controls
    return controls


def test_every_special_token_and_every_token_of_the_template_is_a_control_token(
    any_tokenizer: PreTrainedTokenizerFast,
) -> None:
    expected = any_tokenizer.convert_tokens_to_ids(controls_of(any_tokenizer))
    unknown = any_tokenizer.unk_token_id
    assert control_ids(any_tokenizer) - {unknown} == set(expected)


@pytest.mark.parametrize("between", ["", " ", "a", "\n", " yes "])
def test_a_document_of_control_tokens_is_only_text(
    between: str, any_tokenizer: PreTrainedTokenizerFast
) -> None:
    documents, controls = DocumentTokenizer(any_tokenizer), controls_of(any_tokenizer)
    for control in controls:  # — which the model's own tokenizer does read in a text
        ids = any_tokenizer(control, add_special_tokens=False)["input_ids"]
        assert any_tokenizer.convert_tokens_to_ids(control) in ids
    for text in ("a" + between + between.join(controls * 2) + "a", *controls):
        ids = documents.encode(text)
        assert control_ids(any_tokenizer).isdisjoint(ids)
        assert decoded(documents, ids) == text
    assert any_tokenizer.decode(documents.encode("a" + controls[0])) == "a" + controls[0]


def merged_control() -> PreTrainedTokenizerFast:
    """Merges build the text of its control token."""
    backend = byte_pairs(merges=[("<", "s"), ("<s", ">")])
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.mark.parametrize(
    "make, text",
    [
        (merged_control, "a<s>b"),
        (pieces_of_words, "a\uff1cs\uff1ea"),  # full-width brackets, which NFKC makes plain
        # — noncharacters, which are a part of what replaces a control token
        *[(pieces_of_words, f"\ufdd0{number}\ufdd1") for number in range(5)],
    ],
)
def test_text_that_could_become_a_control_token_is_only_text(
    make: Callable[[], PreTrainedTokenizerFast], text: str
) -> None:
    documents = DocumentTokenizer(make())
    ids = documents.encode(text)
    unknown = {make().unk_token_id} if "\ufdd0" in text else set()
    assert (documents.control_ids - unknown).isdisjoint(ids) and len(ids) >= len(text) - 1
    if "\ufdd0" not in text:
        assert decoded(documents, ids) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("text", ["", "yes", "a yes b", "no added token\nin it"])
def test_ordinary_text_has_the_ids_of_the_models_own_tokenizer_which_is_not_changed(
    text: str, any_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = any_tokenizer.backend_tokenizer.to_str()
    expected = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert DocumentTokenizer(any_tokenizer).encode(text) == expected
    assert any_tokenizer.backend_tokenizer.to_str() == before


def test_an_added_token_that_is_no_control_token_keeps_its_id(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer, names = copy.deepcopy(byte_tokenizer), [f"<kept{i}>" for i in range(6)]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    text = f"a{'b'.join(names)}c"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert DocumentTokenizer(tokenizer).encode(text) == expected
    assert {*tokenizer.convert_tokens_to_ids(names)} <= {*expected}


def ends_unknown(ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    """As GPT-2 and SmolLM2: one token begins and ends a text, and replaces unknown letters."""
    name = "<|endoftext|>"
    backend = byte_pairs(name, ignore_merges=ignore_merges)
    backend.model.unk_token = name
    backend.add_special_tokens([name])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), name)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def falls_back_to_bytes() -> PreTrainedTokenizerFast:
    """As Llama 2: letters that the vocabulary lacks are bytes, and `<unk>` is a piece of it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab<unk>s/"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def words_of(model: type[models.WordPiece] | type[models.WordLevel]) -> PreTrainedTokenizerFast:
    """As BERT, except that brackets are letters of a word here."""
    words = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "##b"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(model(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize(
    "make",
    [
        ends_unknown,
        partial(ends_unknown, ignore_merges=True),
        pieces_of_words,
        partial(pieces_of_words, "</s>"),
        falls_back_to_bytes,
    ],
    ids=["GPT-2", "whole words", "SentencePiece", "SentencePiece, also the end", "bytes"],
)
@pytest.mark.parametrize("between", ["", " ", "a"])
def test_the_token_of_unknown_letters_is_only_text_where_it_is_written(
    make: Callable[[], PreTrainedTokenizerFast], between: str
) -> None:
    tokenizer = make()
    documents, written = DocumentTokenizer(tokenizer), str(tokenizer.unk_token)
    text = "a" + between.join([written] * 20) + "a"
    assert (
        tokenizer(text, add_special_tokens=False)["input_ids"].count(tokenizer.unk_token_id) >= 20
    )
    ids = documents.encode(text)
    assert tokenizer.unk_token_id not in ids and len(ids) >= 20 * (len(written) - 1)
    assert decoded(documents, ids).replace("▁", " ").strip() == text


@pytest.mark.parametrize(
    "make, unknown",
    [
        (pieces_of_words, 1),
        (partial(pieces_of_words, "</s>"), 1),
        (partial(words_of, models.WordPiece), 1),
        (partial(words_of, models.WordLevel), 1),
        (falls_back_to_bytes, 0),
    ],
    ids=["SentencePiece", "SentencePiece, also the end", "WordPiece", "words", "bytes"],
)
def test_a_letter_that_the_vocabulary_lacks_does_not_set_the_document_aside(
    make: Callable[[], PreTrainedTokenizerFast], unknown: int
) -> None:
    tokenizer = make()
    ids = DocumentTokenizer(tokenizer).encode("a \u20ac b")
    assert ids == tokenizer("a \u20ac b", add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == unknown


@pytest.mark.parametrize("model", [models.WordPiece, models.WordLevel])
def test_a_written_unknown_token_is_a_word_that_the_vocabulary_lacks(model: Any) -> None:
    documents = DocumentTokenizer(words_of(model))
    assert documents.encode("a [UNK] b [CLS] a") == documents.encode("a [xxx] b [yyy] a")
    assert documents.encode("a[UNK]b") == documents.encode("a[xxx]b")  # — one word, one token
