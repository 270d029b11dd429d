"""Tokenise text: documents without control tokens, prompts by the model's chat template.

Entry points: `DocumentTokenizer`, `encode` and `chat_template`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, groupby
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, ModelError
from pipeline.spec.prompts import Message, Render

# A chat template that prints the date would change the prompt every day. It gets this date, as a
# variable or through the function of transformers, which the macro replaces.
_DATE = "1 January 2025"
_DATELESS = f"{{%- macro strftime_now(format) -%}}{_DATE}{{%- endmacro -%}}"
# Conversations that show what a chat template writes around turns; the text of a turn is a
# private-use character, which is no token.
_PROBES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user",),
)
_TURN, _ANSWER = "\ue0d2", "\ue0d3"
_OPENED = re.compile(r"<(think\w*|reason\w*)>\s*$")  # a prompt that ends where a model thinks


# Part of each piece that replaces a control token: random, so that no text contains it.
_UNGUESSABLE = secrets.token_hex(8)
# Characters that are tokenised at once: each token takes some hundred bytes until it is a number.
_BATCH_CHARS = 500_000


class DocumentTokenizer:
    """Encodes document text with a copy of the tokenizer that has no control tokens.

    `split_special_tokens=True` is not enough: it keeps added tokens that are not marked special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.control_ids = control_ids(tokenizer)
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"{type(tokenizer).__name__} has no tokenizer.json; save the model's fast tokenizer"
            )
        content = json.loads(backend.to_str())
        # — the token of letters that the vocabulary lacks may also begin or end a sequence
        self._forbidden = self.control_ids - {_unknown_id(content["model"])}
        self._backend = _without(content, self.control_ids, backend.id_to_token)

    def encode(self, text: str) -> list[int]:
        """The text's token ids; DocumentError if one of them is a control token."""
        [ids] = self.encode_all([text])
        if isinstance(ids, DocumentError):
            raise ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int] | DocumentError]:
        """The token ids of each text, or the error that `encode` raises; in parallel."""
        chars = accumulate(map(len, texts))
        for _, group in groupby(texts, lambda _text: next(chars) // _BATCH_CHARS):
            batch = list(group)
            for encoding in self._backend.encode_batch_fast(batch, add_special_tokens=False):
                ids: list[int] = encoding.ids
                forbidden = self._forbidden.intersection(ids)
                yield (
                    DocumentError(f"its text encodes to control tokens {sorted(forbidden)}")
                    if forbidden
                    else ids
                )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the text begins and ends, in characters."""
        places: list[tuple[int, int]] = self._backend.encode(text, add_special_tokens=False).offsets
        return places


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens, and added tokens that the chat template writes or the tokenizer declares.

    The unknown token is one of them: a text may be encoded to it, but may not contain its written
    form. Whitespace that is not special, such as Gemma's runs of line breaks, which templates write
    as ordinary text, is not a control token.
    """
    written = _template_text(tokenizer)
    # — only newer versions of transformers have it
    declared = getattr(tokenizer, "chat_control_tokens", None) or ()
    added = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or token.content in declared
        or (token.content in written and not token.content.isspace())
    }
    return frozenset(added.union(tokenizer.all_special_ids))


def control_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The written forms of the control tokens, except runs of line breaks."""
    pieces = map(str, tokenizer.convert_ids_to_tokens(sorted(control_ids(tokenizer))))
    return [piece for piece in pieces if piece.strip()]


def begun_answer(tokenizer: PreTrainedTokenizerBase, render: Render) -> str:
    """What the model writes after a prompt before it answers, if that has a control token; else "".

    As gpt-oss, which names a channel first, and models whose prompt opens `<think>`.
    """
    user: Message = {"role": "user", "content": _TURN}
    prompt = render([user])
    if opened := _OPENED.search(prompt):
        return f"</{opened[1]}>"
    with suppress(ModelError):  # — some templates refuse a history
        history = render([user, {"role": "assistant", "content": _ANSWER}, user])
        before, answer, _ = history.removeprefix(prompt).partition(_ANSWER)
        if history.startswith(prompt) and answer:
            return before if any(piece in before for piece in control_texts(tokenizer)) else ""
    return ""


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that the chat template may write around a turn: its source, and what it renders.

    Some templates build a marker from parts, `'<|' + message['role'] + '|>'`: it is not in their
    source. Some refuse a role, or write a system turn only if the conversation has none.
    """
    render = chat_template(tokenizer)
    if render is None:
        return ""
    sources = tokenizer.chat_template
    # — with several templates, all of them: the model was trained with the markers of each
    texts = list(sources.values()) if isinstance(sources, dict) else [sources]
    for roles in _PROBES:
        with suppress(ModelError):
            texts.append(render([{"role": role, "content": _TURN} for role in roles]))
    return "\0".join(texts)


def _without(
    content: dict[str, Any], forbidden: frozenset[int], piece_of: Callable[[int], str | None]
) -> Tokenizer:
    """A tokenizer that cannot produce the forbidden ids, except for letters that it lacks.

    `content` is that of a tokenizer.json, and is changed.

    A forbidden piece keeps its id, with a content that no text has.
    """
    content.update(post_processor=None, truncation=None, padding=None)
    content["added_tokens"] = [
        {**token, "content": _unwritable(token["id"]), "special": False, "normalized": False}
        if token["id"] in forbidden
        else token
        for token in content["added_tokens"]
    ]
    model = content["model"]
    if (unknown := _unknown_id(model)) in forbidden and "unk_token" in model:
        model["unk_token"] = _unwritable(unknown)
    pieces = {piece_of(token_id) for token_id in forbidden}
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


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """The id that the model of a tokenizer gives to letters that its vocabulary lacks, if any."""
    unknown: int | None = model.get("unk_id")
    if unknown is None and isinstance(model.get("vocab"), dict):
        unknown = model["vocab"].get(model.get("unk_token"))
    return unknown


def _builds(merge: str | list[str], pieces: set[str | None]) -> bool:
    """Whether a merge of two pieces produces or uses one of these."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return not pieces.isdisjoint((left, right, left + right))


def _unwritable(token_id: int) -> str:
    """A piece that no text contains: Unicode reserves noncharacters for internal use."""
    return f"\ufdd0{_UNGUESSABLE}.{token_id}\ufdd1"


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """The token ids of a prompt's text; with `special`, those that begin or end a sequence too."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Render | None:
    """The tokenizer's chat template as a function that ignores the date; None if it has none.

    ModelError if it has several and none is the default.
    """
    if not tokenizer.chat_template:
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        names = sorted(tokenizer.chat_template)
        raise ModelError(
            f"the model's tokenizer has chat templates {names} and no default; name one 'default'"
        ) from error

    def render(messages: Sequence[Message], *, in_parts: bool = False) -> str:
        turns: list[dict[str, Any]] = [dict(message) for message in messages]
        if in_parts:
            for turn in turns:
                turn["content"] = [{"type": "text", "text": turn["content"]}]
        try:
            text = tokenizer.apply_chat_template(
                turns,
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

    # — templates of models with images may accept only the parts of a turn
    turn: Message = {"role": "user", "content": _TURN}
    with suppress(ModelError):
        if _TURN not in render([turn]) and _TURN in render([turn], in_parts=True):
            return partial(render, in_parts=True)
    return render
