"""Tokenise document text without any control token, and find the chat template.

Entry point: `DocumentTokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, ModelError
from pipeline.spec.prompts import Message, Render

# A template that prints today's date would make the prompt change overnight. It gets this one,
# by name or through the function that transformers offers, which the macro hides.
_DATE = "1 January 2025"
_DATELESS = f"{{%- macro strftime_now(format) -%}}{_DATE}{{%- endmacro -%}}"
# Turns that show what a chat template writes; their text is a private-use character, no token.
_PROBES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user",),
)
_TURN = "\ue0d2"


class DocumentTokenizer:
    """Encodes document text with a tokenizer that has lost its control tokens.

    `split_special_tokens=True` is not enough: it leaves added tokens that are not marked special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.control_ids = control_ids(tokenizer)
        self._backend = _without(_backend(tokenizer), self.control_ids)

    def encode(self, text: str) -> list[int]:
        """The text's token ids; DocumentError rather than a control token among them."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        forbidden = self.control_ids.intersection(ids)
        if forbidden:
            raise DocumentError(f"its text encodes to control tokens {sorted(forbidden)}")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens, and added tokens that the chat template writes or the tokenizer declares.

    Not the unknown token: it stands for letters, and steers nothing. Nor whitespace that is not
    special, as Gemma's runs of line breaks: templates write it as the text that it is.
    """
    written = _written(tokenizer)
    # — only newer versions of transformers know of it
    declared = getattr(tokenizer, "chat_control_tokens", None) or ()
    added = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or token.content in declared
        or (token.content in written and not token.content.isspace())
    }
    return frozenset(added.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


def _written(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that the chat template may write around a turn: its source, and what it renders.

    Some build a marker of pieces, `'<|' + message['role'] + '|>'`, and no source holds it. Some
    refuse a role, or write a system turn only where there is none.
    """
    render = chat_template(tokenizer)
    if render is None:
        return ""
    found = [tokenizer.chat_template]
    if isinstance(found[0], dict):  # also of the others: the model knows their markers
        found = list(found[0].values())
    for roles in _PROBES:
        with suppress(ModelError):
            found.append(render([{"role": role, "content": _TURN} for role in roles]))
    return "\0".join(found)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__} has no tokenizer.json; save the model's fast tokenizer"
        )
    return backend


def _without(backend: Tokenizer, forbidden: frozenset[int]) -> Tokenizer:
    """A copy that cannot produce the forbidden ids from text.

    A forbidden piece keeps its place under a name that no text contains: ids are given by place.
    """
    content: dict[str, Any] = json.loads(backend.to_str())
    content.update(post_processor=None, truncation=None, padding=None)
    content["added_tokens"] = [
        {**token, "content": _unwritable(token["id"]), "special": False, "normalized": False}
        if token["id"] in forbidden
        else token
        for token in content["added_tokens"]
    ]
    model = content["model"]
    pieces = {backend.id_to_token(token_id) for token_id in forbidden}
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {
            _unwritable(token_id) if token_id in forbidden else piece: token_id
            for piece, token_id in model["vocab"].items()
        }
        if "merges" in model:
            model["merges"] = [m for m in model["merges"] if not _builds(m, pieces)]
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [
            [_unwritable(i) if i in forbidden else piece, score]
            for i, (piece, score) in enumerate(model["vocab"])
        ]
    return Tokenizer.from_str(json.dumps(content))


def _builds(merge: str | list[str], pieces: set[str | None]) -> bool:
    """Whether a merge makes one of the pieces, or needs one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return not pieces.isdisjoint((left, right, left + right))


def _unwritable(token_id: int) -> str:
    """A piece that no text contains: noncharacters are not valid in interchange."""
    return f"\ufdd0{token_id}\ufdd1"


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Render | None:
    """The tokenizer's chat template as a function, the same every day; None if it has none."""
    template = _template(tokenizer)
    if template is None:
        return None

    def render(messages: Sequence[Message]) -> str:
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=_DATELESS + template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string=_DATE,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"the model's chat template refuses the prompt: {error}") from error
        assert isinstance(text, str), f"chat template gave {type(text).__name__}"
        return text

    return render


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template's source; of several the default, and ModelError where none is."""
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        names = sorted(tokenizer.chat_template)
        raise ModelError(
            f"the model's tokenizer has chat templates {names} and no default; name one 'default'"
        ) from error
