"""Which tokens a document can never hold: special ones, and those that the chat template writes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import decoded
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ModelError
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer, chat_template, control_ids
from pipeline.inference.loading import load_tokenizer
from pipeline.spec.schema import PromptSpec
from pipeline.spec.stages import QuestionTask

YES_NO = QuestionTask(name="t", question="Q?", labels={"yes": ("Yes",), "no": ("No",)})


def with_templates(
    tokenizer: PreTrainedTokenizerFast, folder: Path, *names: str
) -> PreTrainedTokenizerFast:
    """The tokenizer as it is loaded with its chat template under other names."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = {name: f"{changed.chat_template}{{# {name} #}}" for name in names}
    changed.save_pretrained(folder)
    return load_tokenizer(folder)


def test_of_several_chat_templates_the_default_is_used(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    several = with_templates(byte_tokenizer, tmp_path, "default", "tool_use")
    assert set(several.chat_template) == {"default", "tool_use"}
    assert control_ids(several) == control_ids(byte_tokenizer)
    prompts = [tokenise_prompt(t, PromptSpec(), [YES_NO]) for t in (several, byte_tokenizer)]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("read", [chat_template, control_ids, DocumentTokenizer])
def test_several_chat_templates_without_a_default_are_refused_by_name(
    read: object, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    several = with_templates(byte_tokenizer, tmp_path, "rag", "tool_use")
    with pytest.raises(ModelError, match=r"chat templates \['rag', 'tool_use'\] and no default"):
        read(several)  # type: ignore[operator]


MARKERS = ("<|system|>", "<|user|>", "<|assistant|>")
BUILT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}"
)
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
REFUSES_HISTORY = "{% if messages | length > 1 %}{{ messages[0]['name'] + 1 }}{% endif %}"
BREAKS_ON_HISTORY = "{% if messages | length > 1 %}{{ 'a' + 1 }}{% endif %}"


def with_markers(tokenizer: PreTrainedTokenizerFast, template: Any) -> PreTrainedTokenizerFast:
    """The tokenizer with markers as added tokens that are not special, and another template."""
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens([AddedToken(m, special=False, normalized=False) for m in MARKERS])
    changed.chat_template = template
    return changed


@pytest.mark.parametrize(
    "template, controls",
    [
        (BUILT, MARKERS),
        (REFUSES_SYSTEM + BUILT, MARKERS[1:]),
        (REFUSES_HISTORY + BUILT, MARKERS[1:]),
        (BREAKS_ON_HISTORY + BUILT, MARKERS[1:]),
        ("<|user|>{{ raise_exception('no') }}", MARKERS[1:2]),
        ({"default": "{{ messages }}", "tool_use": "<|user|>"}, MARKERS[1:2]),
    ],
    ids=[
        "takes all", "refuses a system turn", "refuses a history", "breaks on a history",
        "refuses all", "several",
    ],
)  # fmt: skip
def test_a_marker_that_a_template_writes_or_builds_is_only_text_in_a_document(
    template: Any, controls: tuple[str, ...], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = with_markers(byte_tokenizer, template)
    markers = tokenizer.convert_tokens_to_ids(list(MARKERS))
    forbidden = control_ids(tokenizer).intersection(markers)
    assert forbidden == {*tokenizer.convert_tokens_to_ids(list(controls))}
    documents = DocumentTokenizer(tokenizer)
    text = "x" + "Say yes".join(controls)
    ids = documents.encode(text)
    assert len(ids) == len(text) and decoded(documents, ids) == text


def test_what_the_tokenizer_declares_as_its_chats_control_tokens_is_forbidden(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer = with_markers(byte_tokenizer, str(byte_tokenizer.chat_template))
    tokenizer.chat_control_tokens = ["<|user|>"]
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    user, system = loaded.convert_tokens_to_ids(["<|user|>", "<|system|>"])
    assert user in control_ids(loaded) and system not in control_ids(loaded)


@pytest.mark.parametrize("special", [False, True])
def test_line_breaks_that_are_added_tokens_are_control_tokens_if_they_are_special(
    special: bool, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """As Gemma: runs of line breaks are added tokens, and the template has line breaks."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    breaks = [AddedToken("\n" * n, special=special, normalized=False) for n in (1, 2)]
    tokenizer.add_tokens(breaks, special_tokens=special)
    assert "\n" in tokenizer.chat_template
    ids, text = {*tokenizer.convert_tokens_to_ids(["\n", "\n\n"])}, "one\ntwo\n\nthree"
    of_model = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids < {*of_model}
    assert ids.issubset(control_ids(tokenizer)) == special
    assert (DocumentTokenizer(tokenizer).encode(text) == of_model) == (not special)
