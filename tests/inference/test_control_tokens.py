"""Which tokens a document can never hold: special ones, and those that the chat template writes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ModelError
from pipeline.inference.loading import load_tokenizer
from pipeline.inference.tokens import (
    DocumentTokenizer,
    chat_template,
    control_ids,
    tokenise_prompt,
)
from pipeline.spec import PromptSpec, TaskSpec

YES_NO = TaskSpec(name="t", question="Q?", labels={"yes": ("Yes",), "no": ("No",)})


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
