"""Text to tokens: a document is never a control token, and labels stand where the model answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipeline.errors import DocumentError, ModelError, SpecError
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
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


def test_the_tokenizer_itself_does_read_control_tokens_out_of_text(
    any_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Without this the tests below would prove nothing."""
    for control in controls_of(any_tokenizer):
        ids = any_tokenizer(control, add_special_tokens=False)["input_ids"]
        assert any_tokenizer.convert_tokens_to_ids(control) in ids


@pytest.mark.parametrize("between", ["", " ", "a", "\n", " yes "])
def test_a_document_of_control_tokens_is_only_text(
    between: str, any_tokenizer: PreTrainedTokenizerFast
) -> None:
    documents, controls = DocumentTokenizer(any_tokenizer), controls_of(any_tokenizer)
    for text in ("a" + between + between.join(controls * 2) + "a", *controls):
        ids = documents.encode(text)
        assert control_ids(any_tokenizer).isdisjoint(ids)
        assert documents.decode(ids) == text
    assert any_tokenizer.decode(documents.encode("a" + controls[0])) == "a" + controls[0]


def test_text_that_normalises_to_a_control_token_is_only_text() -> None:
    tokenizer = pieces_of_words()
    documents = DocumentTokenizer(tokenizer)
    ids = documents.encode("a\uff1cs\uff1ea")  # full-width brackets, which NFKC makes plain
    assert control_ids(tokenizer).isdisjoint(ids)
    assert documents.decode(ids) == "a<s>a"


@pytest.mark.parametrize("number", range(5))
def test_the_spelling_that_stands_in_for_a_control_token_does_not_make_one(number: int) -> None:
    documents = DocumentTokenizer(pieces_of_words())
    try:
        ids = documents.encode(f"\ufdd0{number}\ufdd1")
    except DocumentError:
        return
    assert documents.control_ids.isdisjoint(ids)


@pytest.mark.parametrize("text", ["", "yes", "a yes b", "no added token\nin it"])
def test_ordinary_text_has_the_ids_of_the_models_own_tokenizer(
    text: str, any_tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert DocumentTokenizer(any_tokenizer).encode(text) == expected


def test_making_the_documents_tokenizer_leaves_the_models_own_as_it_was(
    any_tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = any_tokenizer.backend_tokenizer.to_str()
    DocumentTokenizer(any_tokenizer)
    assert any_tokenizer.backend_tokenizer.to_str() == before


def with_kept_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Added tokens that are not special and that the chat template does not write."""
    changed = copy.deepcopy(tokenizer)
    kept = [AddedToken(f"<kept{i}>", special=False, normalized=False) for i in range(6)]
    changed.add_tokens(kept)
    return changed


@pytest.mark.parametrize("number", range(6))
def test_an_added_token_that_is_no_control_token_keeps_its_id(
    number: int, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = with_kept_tokens(byte_tokenizer)
    text = f"a<kept{number}>b"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert DocumentTokenizer(tokenizer).encode(text) == expected


def test_a_control_token_that_merges_could_build_is_only_text() -> None:
    backend = byte_pairs(merges=[("<", "s"), ("<s", ">")])
    backend.add_special_tokens(["<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    documents = DocumentTokenizer(tokenizer)
    assert documents.control_ids.isdisjoint(documents.encode("a<s>b"))
    assert documents.decode(documents.encode("a<s>b")) == "a<s>b"


@pytest.mark.parametrize("text", ["a<unk>b", "a\u20acb"], ids=["spelled out", "unknown letter"])
def test_a_letter_that_the_vocabulary_lacks_does_not_set_the_document_aside(text: str) -> None:
    assert DocumentTokenizer(pieces_of_words()).encode(text)


def task(
    labels: dict[str, tuple[str, ...]], name: str = "t", question: str = "Q?", **more: Any
) -> TaskSpec:
    return TaskSpec(name=name, question=question, labels=labels, **more)


YES_NO = task({"yes": ("Yes", "yes"), "no": ("No",)})


def plain_bytes(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_pairs(merges=merges))


def pieces_at(tokenizer: PreTrainedTokenizerFast, prompt: PromptTokens) -> dict[str, list[str]]:
    labels = prompt.questions[0].labels
    return {
        label: [tokenizer.convert_ids_to_tokens(token_id) for token_id in ids]
        for label, ids in labels.items()
    }


def test_behind_a_chat_header_a_label_begins_without_a_space(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), [YES_NO])
    assert pieces_at(byte_tokenizer, prompt) == {"yes": ["Y", "y"], "no": ["N"]}


def test_without_a_template_the_prompt_ends_in_answer_and_labels_begin_with_a_space() -> None:
    tokenizer = plain_bytes(("Ġ", "Y"), ("Ġ", "y"), ("Ġ", "N"))
    prompt = tokenise_prompt(tokenizer, PromptSpec(), [YES_NO])
    assert tokenizer.decode(prompt.questions[0].token_ids).endswith("Q?\nAnswer:")
    assert pieces_at(tokenizer, prompt) == {"yes": ["ĠY", "Ġy"], "no": ["ĠN"]}


def test_a_tokenizer_of_word_pieces_answers_with_the_piece_that_holds_the_space() -> None:
    tokenizer = pieces_of_words()
    tokenizer.chat_template = None
    labels = task({"yes": ("Yes",), "no": ("No",)}, question="that is it:")
    prompt = tokenise_prompt(tokenizer, PromptSpec(instruction=""), [labels])
    assert pieces_at(tokenizer, prompt) == {"yes": ["▁Yes"], "no": ["▁No"]}
    assert prompt.prefix[0] != tokenizer.bos_token_id  # this one adds none by itself


def test_a_label_is_read_where_it_stands_and_not_alone() -> None:
    tokenizer = pieces_of_words()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}:"
    prompt = tokenise_prompt(
        tokenizer, PromptSpec(instruction=""), [task({"yes": ("Yes",), "no": ("No",)})]
    )
    # Alone, "Yes" begins a text and becomes the piece with the space in front.
    assert tokenizer.tokenize("Yes") == ["▁Yes"]
    assert pieces_at(tokenizer, prompt) == {"yes": ["Y"], "no": ["N"]}


def test_an_answer_never_takes_back_a_token_of_the_prompt() -> None:
    tokenizer = plain_bytes(("x", "Y"))
    tokenizer.chat_template = "{{ messages[-1]['content'] }}x"
    assert tokenizer.tokenize("xYes")[0] == "xY"
    prompt = tokenise_prompt(tokenizer, PromptSpec(), [YES_NO])
    assert tokenizer.convert_ids_to_tokens(prompt.questions[0].token_ids[-1]) == "x"
    assert pieces_at(tokenizer, prompt) == {"yes": ["Y", "y"], "no": ["N"]}


def test_two_verbalizers_that_begin_alike_count_once(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    labels = task({"yes": ("Yes", "Yeah", "yes"), "no": ("No",)})
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), [labels])
    assert pieces_at(byte_tokenizer, prompt)["yes"] == ["Y", "y"]


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
    assert whole.trie is not None and whole.labels == {"yes": (220,), "no": (220,)}


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


def test_the_templates_own_control_tokens_are_one_token_each(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), [YES_NO])
    start = byte_tokenizer.convert_tokens_to_ids("<|im_start|>")
    end = byte_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [prompt.prefix.count(start), prompt.prefix.count(end)] == [1, 0]
    suffix = prompt.questions[0].token_ids
    assert [suffix.count(start), suffix.count(end)] == [1, 1]


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


def test_what_a_context_leaves_for_a_document_counts_the_longest_question(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tasks = [task({"y": ("Y",), "n": ("N",)}, n, q) for n, q in [("a", "Longest?"), ("b", "B?")]]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    longest = len(prompt.questions[0].token_ids)
    assert prompt.room(4_096) + len(prompt.prefix) + longest == 4_096


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
