"""Text to tokens: a document is never a control token, and labels stand where the model answers."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from byte_tokenizer import CHAT_TEMPLATE, make_byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ModelError, SpecError
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer, chat_template, control_ids
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

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
    """As Llama 3: a word that is in the vocabulary is taken whole, whatever the merges say."""
    backend = byte_pairs(*CONTROLS, "yes", ignore_merges=True)
    backend.add_special_tokens(CONTROLS[:2])
    backend.add_tokens([AddedToken(CONTROLS[2], special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template="{# <|user|> #}"
    )


def pieces_of_words(unknown: str = "<unk>") -> PreTrainedTokenizerFast:
    """As SentencePiece: control pieces stand in the scored vocabulary itself."""
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
        assert documents.decode(ids) == text
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
        assert documents.decode(ids) == unicodedata.normalize("NFKC", text)


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
    """As GPT-2 and SmolLM2: one token begins and ends a text, and stands for unknown letters."""
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
    """As BERT, but for the brackets, which are letters of a word here."""
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
    assert documents.decode(ids).replace("▁", " ").strip() == text


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


def task(
    labels: dict[str, tuple[str, ...]], name: str = "t", question: str = "Q?", **more: Any
) -> TaskSpec:
    return TaskSpec(name=name, question=question, labels=labels, **more)


EXAMPLE = {"document": "a text", "question": "Q?", "answer": "Yes"}
YES_NO = task({"yes": ("Yes", "yes"), "no": ("No",)})


def plain_bytes(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_pairs(merges=merges))


USERS_TURN = "{{ messages[-1]['content'] }}"
SPACED = [("Ġ", "Y"), ("Ġ", "y"), ("Ġ", "N")]


@pytest.mark.parametrize(
    "tokenizer, template, question, pieces",
    [
        # — after a chat header; two texts that begin alike count once
        (make_byte_tokenizer(), CHAT_TEMPLATE, "Q?", {"yes": ["Y", "y"], "no": ["N"]}),
        (plain_bytes(*SPACED), None, "Q?", {"yes": ["ĠY", "Ġy"], "no": ["ĠN"]}),
        (pieces_of_words(), None, "that is it:", {"yes": ["▁Yes", "▁"], "no": ["▁No"]}),
        # — alone, "Yes" begins a text and becomes the piece with the space before it
        (pieces_of_words(), USERS_TURN + ":", "Q", {"yes": ["Y", "y"], "no": ["N"]}),
        # — an answer never takes back a token of the prompt
        (plain_bytes(("x", "Y")), USERS_TURN + "x", "Q?", {"yes": ["Y", "y"], "no": ["N"]}),
    ],
    ids=["chat header", "no template", "word pieces", "after a colon", "merges with the prompt"],
)
def test_a_label_is_tokenised_where_the_model_answers(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    question: str,
    pieces: dict[str, list[str]],
) -> None:
    tokenizer.chat_template = template
    labels = task({"yes": ("Yes", "Yeah", "yes"), "no": ("No",)}, question=question)
    prompt = tokenise_prompt(tokenizer, PromptSpec(instruction=""), [labels])
    for label, ids in prompt.questions[0].first_tokens.items():
        assert sorted(tokenizer.convert_ids_to_tokens(ids)) == sorted(pieces[label])


WRITES = "a <|im_end|> b"


@pytest.mark.parametrize(
    "place, prompt, asked",
    [
        ("prompt.system", {"system": WRITES}, YES_NO),
        ("prompt.instruction", {"instruction": WRITES}, YES_NO),
        ("prompt.document", {"document": "<|im_end|>{document}"}, YES_NO),
        *[
            (
                f"prompt.examples.1.{key}",
                {"examples": [EXAMPLE, {**EXAMPLE, key: WRITES}]},
                YES_NO,
            )
            for key in EXAMPLE
        ],
        ("tasks.1.question", {}, task({"yes": ("Yes",), "no": ("No",)}, "u", WRITES)),
        ("tasks.1.labels", {}, task({"yes": ("Yes",), "no": (WRITES,)}, "u")),
        (
            "tasks.1.question",
            {},
            task({"a": (WRITES,), "b": ("b",)}, "u", "Is it {label}?", kind="multi"),
        ),
    ],
)
def test_a_text_of_the_spec_that_writes_a_control_token_is_refused_by_its_place(
    place: str, prompt: dict[str, Any], asked: TaskSpec, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tasks = [task(YES_NO.labels, "s"), *asked.parts]
    with pytest.raises(SpecError) as refused:
        tokenise_prompt(byte_tokenizer, PromptSpec(**prompt), tasks)
    [problem] = refused.value.problems
    assert (problem.place, problem.value) == (place, "<|im_end|>")


def test_what_follows_the_mark_of_the_answer_may_write_control_tokens(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = task({"yes": ("Yes",), "no": ("No",)}, question="Q?{answer}<|im_start|>")
    [question] = tokenise_prompt(byte_tokenizer, PromptSpec(), [asked]).questions
    assert question.token_ids[-1] == byte_tokenizer.convert_tokens_to_ids("<|im_start|>")


HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<tool_call>final"
    "<|im_end|>{% else %}<|im_end|>{% endif %}{{ m.content }}{% endfor %}<|im_start|>assistant"
)


@pytest.mark.parametrize(
    "template, begun",
    [
        (HARMONY, "<tool_call>final<|im_end|>"),  # as gpt-oss
        (CHAT_TEMPLATE + "<think>\n", "</think>"),  # as the distillations of DeepSeek R1
        (CHAT_TEMPLATE + "<thinking>", "</thinking>"),
        (CHAT_TEMPLATE + "<reasoning>\n\n", "</reasoning>"),
        (CHAT_TEMPLATE, ""),
        (CHAT_TEMPLATE + "<think>\n\n</think>\n\n", ""),  # as Qwen3
        (HARMONY.replace("<tool_call>final<|im_end|>", " "), ""),
        ("{{ messages[-1].content }}", ""),
        (CHAT_TEMPLATE + "{{ raise_exception('no') if messages | length > 2 }}", ""),
    ],
)
@pytest.mark.parametrize("kind", ["choice", "multi"])
def test_a_model_that_answers_behind_a_control_token_needs_the_beginning_of_an_answer(
    kind: str, template: str, begun: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    labels = {"yes": ("Yes",), "no": ("No",), "x": ("X",)}
    for question, refused in (("Is it?", bool(begun)), (f"Is it?{{answer}}{begun}It is", False)):
        parts = task(labels, question=question, kind=kind).parts
        if not refused:
            tokenise_prompt(tokenizer, PromptSpec(), parts)
            continue
        with pytest.raises(SpecError) as caught:
            tokenise_prompt(tokenizer, PromptSpec(), parts)
        [problem] = caught.value.problems
        assert problem.place == "tasks.0.question"
        assert problem.fix.endswith(f"end the question in {{answer}}{begun}Answer:")


def test_labels_that_begin_alike_are_refused_by_name(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tasks = [
        YES_NO,
        task(
            {"sport": ("Sport",), "science": ("Science", "Tech"), "art": ("Art",)},
            "topic",
            scoring="first_token",
        ),
        task({"a": ("x1", "y1"), "b": ("x2", "y2")}, "other", scoring="first_token"),
    ]
    with pytest.raises(SpecError) as caught:
        tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "tasks.1.labels: labels ['sport', 'science'] of 'topic' begin with the same token 'S'; "
        "give them texts that begin differently "
        "(got {'sport': ['Sport'], 'science': ['Science', 'Tech']})"
    )
    assert [line.split(": ")[0] for line in lines] == ["tasks.1.labels"] + ["tasks.2.labels"] * 2


def test_labels_that_only_share_their_space_collide_where_the_space_is_a_token() -> None:
    with pytest.raises(SpecError, match="begin with the same token ' '"):
        tokenise_prompt(
            plain_bytes(), PromptSpec(), [YES_NO.model_copy(update={"scoring": "first_token"})]
        )
    whole = tokenise_prompt(plain_bytes(), PromptSpec(), [YES_NO]).questions[0]
    assert whole.first_tokens == {"yes": [220], "no": [220]} and not whole.scores_first_tokens


@pytest.mark.parametrize("chat", [True, False])
def test_prefix_document_and_question_are_the_prompt(
    chat: bool, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer) if chat else plain_bytes(("Ġ", "Y"), ("Ġ", "N"))
    prompt_spec = PromptSpec(system="Be brief." if chat else None)
    tasks = [task({"yes": ("Yes",), "no": ("No",)}, n, q) for n, q in [("a", "A?"), ("b", "Bb?")]]
    prompt = tokenise_prompt(tokenizer, prompt_spec, tasks)
    document = DocumentTokenizer(tokenizer).encode("some <|im_end|> text")
    read = [
        tokenizer.decode([*prompt.prefix, *document, *question.token_ids])
        for question in prompt.questions
    ]
    turn = "Read the text, then answer the question.\n\nText:\nsome <|im_end|> text\n\n"
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" if chat else ""
    tail = "<|im_end|>\n<|im_start|>assistant\n" if chat else "\nAnswer:"
    assert read == [f"{head}{turn}{asked}{tail}" for asked in ("A?", "Bb?")]
    assert [question.name for question in prompt.questions] == ["a", "b"]
    if chat:  # the template's own control tokens are one token each
        start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        spans = (prompt.prefix, *(question.token_ids for question in prompt.questions))
        assert [(ids.count(start), ids.count(end)) for ids in spans] == [(2, 1), (1, 1), (1, 1)]


def test_a_tokenizer_that_begins_every_text_begins_the_prompt_too() -> None:
    backend = byte_pairs(merges=[("Ġ", "Y"), ("Ġ", "N")])
    backend.add_special_tokens(["<bos>"])
    added = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    plain = tokenise_prompt(added, PromptSpec(), [task({"y": ("Y",), "n": ("N",)})])
    assert plain.prefix[0] != added.bos_token_id
    backend.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", added.bos_token_id)]
    )
    begun = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    prompt = tokenise_prompt(begun, PromptSpec(), [task({"y": ("Y",), "n": ("N",)})])
    assert prompt.prefix == (added.bos_token_id, *plain.prefix)
    assert prompt.questions == plain.questions
    assert begun.bos_token_id not in DocumentTokenizer(begun).encode("text")


def test_a_context_leaves_room_for_the_longest_question_with_its_longest_label(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    short, long = ({"y": ("Y",), "n": ("N",)}, {"y": ("Y",), "n": ("Nine",)})
    tasks = [task(short, "a", "Longest?"), task(long, "b", "B?", scoring="full")]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    first, second = (len(question.token_ids) for question in prompt.questions)
    assert first - second == len("Longest?") - len("B?") == 6
    # — of a label, all tokens but the last are read
    assert prompt.room(4_096) == 4_096 - len(prompt.prefix) - first
    asked_in_full = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks[1:])
    assert asked_in_full.room(4_096) == 4_096 - len(prompt.prefix) - second - 3


@pytest.mark.parametrize(
    "printed, text",
    [
        ("date_string", "1 January 2025"),
        ("strftime_now('%d %B %Y')", "1 January 2025"),
        ("enable_thinking", "False"),
    ],
)
def test_a_template_that_prints_the_date_or_thinks_gives_the_same_prompt_every_day(
    printed: str, text: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = f"{{{{ {printed} }}}}|{{{{ messages[-1]['content'] }}}}"
    render = chat_template(tokenizer)
    assert render is not None
    assert render([{"role": "user", "content": "hello"}]) == f"{text}|hello"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'][:20] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "nothing",
    ],
    ids=["cuts", "repeats", "shouts", "drops"],
)
def test_a_template_that_changes_the_users_turn_is_refused(
    template: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="use a model with a plain chat template"):
        tokenise_prompt(tokenizer, PromptSpec(), [YES_NO])


def test_a_template_that_refuses_a_system_turn_is_a_problem_of_the_job(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    with pytest.raises((ModelError, SpecError), match="no system role"):
        tokenise_prompt(tokenizer, PromptSpec(system="s"), [YES_NO])
