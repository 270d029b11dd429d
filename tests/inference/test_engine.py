"""Long documents, what an engine counts, and what it does where memory is short."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch

from pipeline.errors import ModelError
from pipeline.inference.engine import LabelEngine, read_in_batches
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.model.llama import _LlamaLayer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import Usage, pack

FAMILIES = ["llama", "gemma3_text"]
# fp32 sums of a few thousand terms in another order; the contract allows 1e-4.
TOLERANCE = 1e-4

TinyModel = Callable[[str], LoadedModel]


def some_ids(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(300) for _ in range(tokens)]


def some_prompt(source: random.Random, tasks: int, *, prefix: int) -> PromptTokens:
    questions = []
    for i in range(tasks):
        first = source.sample(range(300), source.randint(2, 6))
        labels = {f"label{n}": [(token,)] for n, token in enumerate(first[1:])}
        labels["label0"].append((first[0],))  # two verbalizers
        token_ids = tuple(some_ids(source, source.randint(1, 40)))
        questions.append(Question(f"task{i}", token_ids, labels))
    return PromptTokens(tuple(some_ids(source, prefix)), tuple(questions))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_document_with_many_tasks_equals_independent_prompts(
    family: str, tiny_model: TinyModel
) -> None:
    source = random.Random(family)
    prompt = some_prompt(source, 32, prefix=5)
    document = some_ids(source, 1_700)  # with the questions, more rows than a block has
    model = tiny_model(family)
    labelled = LabelEngine(model, prompt, max_batch_tokens=5_000).label([document, [7]])
    for answers, question in list(zip(labelled.log_probs, prompt.questions, strict=True))[::8]:
        oracle = reference.label_log_prob(
            model, prompt.prefix, document, question.token_ids, question.first_tokens["label0"]
        )
        np.testing.assert_allclose(answers[0, 0], oracle, rtol=0, atol=TOLERANCE)


def test_no_documents_have_no_answers(tiny_model: TinyModel) -> None:
    prompt = some_prompt(random.Random(2), 2, prefix=4)
    labelled = LabelEngine(tiny_model("llama"), prompt, max_batch_tokens=100).label([])
    assert [answers.shape[0] for answers in labelled.log_probs] == [0, 0]
    assert labelled.usage == Usage()


ASKED = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (7,))
FIRST_TOKENS = {"a": [(4,)], "b": [(5,)]}
# Four tokens are shared, which is enough to be read once.
SHARED = [Question(n, ids, FIRST_TOKENS) for n, ids in zip("xyz", ASKED, strict=True)]
TRIE = {"a": [(1, 2, 3, 4, 5)], "b": [(1, 2, 3, 4, 6, 7)]}


@pytest.mark.parametrize(
    "family, questions, of_documents, of_questions",
    [
        ("llama", SHARED, 50 + 20, 2 * (4 + 1 + 1 + 1)),
        ("llama", [Question("q", (8, 9, 10, 11), TRIE)], 70, 2 * 9),
        # — padded questions, and with every document the prefix's last token
        ("lfm2", SHARED, 50 + 20, 2 * (1 + 3 * 5)),
    ],
)
def test_usage_counts_each_token_as_often_as_it_is_read(
    family: str,
    questions: Sequence[Question],
    of_documents: int,
    of_questions: int,
    tiny_model: TinyModel,
) -> None:
    prompt = PromptTokens((1,) * 10, tuple(questions))
    model = tiny_model(family)
    engine = LabelEngine(model, prompt, max_batch_tokens=99)
    embedded: list[int] = []
    handle = model.network.get_input_embeddings().register_forward_pre_hook(
        lambda _module, inputs: embedded.append(inputs[0].numel())
    )
    usage = engine.label([[1] * 50, [2] * 20]).usage
    handle.remove()
    assert usage == Usage(of_documents, of_questions)
    assert sum(embedded) == of_documents + of_questions


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("memory", [0, 12, 40, 100])
def test_where_memory_is_short_only_that_batch_is_read_in_smaller_ones(
    memory: int, padded: bool
) -> None:
    source = random.Random(memory)
    lengths = [source.randint(1, 20) for _ in range(40)] + [90]

    def tokens(batch: Sequence[int]) -> int:
        own = [lengths[i] for i in batch]
        return len(own) * max(own) if padded else sum(own)

    def read(batch: list[int], max_tokens: int) -> str:
        assert max_tokens == 60 or tokens(batch) <= 30
        if tokens(batch) > memory:
            raise MemoryError
        read_once.extend(batch)
        return "answers"

    read_once: list[int] = []
    results = list(read_in_batches(lengths, read, max_tokens=60, padded=padded))
    assert sorted(i for batch, _ in results for i in batch) == list(range(41))
    too_large = {i for batch, answers in results if answers is None for i in batch}
    assert too_large == {i for i, length in enumerate(lengths) if length > memory}
    fitting = [
        each for each in pack(lengths, max_tokens=60, padded=padded) if tokens(each) <= memory
    ]
    assert all((batch, "answers") in results for batch in fitting)
    assert sorted(read_once) == sorted(set(range(41)) - too_large)


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_every_allocator_is_known_by_its_message(message: str) -> None:
    def short_of_memory(batch: list[int], max_tokens: int) -> None:
        raise RuntimeError(message)

    results = read_in_batches([1, 2], short_of_memory, max_tokens=9)
    assert sorted(results, key=str) == [([0], None), ([1], None)]


def test_another_error_is_not_taken_for_memory() -> None:
    def broken(batch: list[int], max_tokens: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(read_in_batches([1, 2], broken, max_tokens=9))


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_where_memory_is_short_documents_are_read_in_smaller_batches_or_named(
    family: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model had read some of a document when memory ran out."""
    source = random.Random(4)
    engine = LabelEngine(tiny_model(family), some_prompt(source, 2, prefix=4), max_batch_tokens=900)
    documents = [some_ids(source, tokens) for tokens in (200, *[20] * 12)]
    whole = engine.label(documents).log_probs
    last: Any = engine.model.decoder.layers[-1]
    owner, name = (last, "forward") if engine.model.llama is None else (_LlamaLayer, "__call__")
    real = getattr(owner, name)

    def small_memory(*args: Any, **options: Any) -> object:
        states = next(each for each in args if isinstance(each, torch.Tensor))
        if states.shape[-2] > 150:
            raise torch.OutOfMemoryError("no room")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, small_memory)
    with pytest.raises(ModelError, match=r"instruction: memory is too short to read its 152 tok"):
        LabelEngine(engine.model, some_prompt(source, 1, prefix=152), max_batch_tokens=900)
    assert engine.label(documents[:1]).out_of_memory == {0}
    read: list[int] = []
    labelled = engine.label(documents, on_batch=read.extend)
    assert labelled.out_of_memory == {0} and engine.max_batch_tokens == 900
    assert sorted(read) == list(range(1, 13))  # a batch for which memory was short is not counted
    for answers, expected in zip(labelled.log_probs, whole, strict=True):
        assert np.isnan(answers[0]).all()
        np.testing.assert_allclose(answers[1:], expected[1:], rtol=0, atol=TOLERANCE)


def test_answers_are_read_back_after_the_last_batch(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the first of these waits, and no batch is laid out meanwhile."""
    events: list[str] = []

    class Answers:
        def numpy(self, *, force: bool) -> np.ndarray:
            events.append("read")
            return np.zeros((1, 2), dtype=np.float32)

    def answer(*args: object) -> list[Answers]:
        events.append("laid out")
        return [Answers()]

    monkeypatch.setattr("pipeline.inference.labels.scoring.LabelScorer.log_probs", answer)
    prompt = PromptTokens((), (Question("q", (1, 2), FIRST_TOKENS),))
    LabelEngine(tiny_model("llama"), prompt, max_batch_tokens=1).label([[1], [2], [3]])
    assert events == ["laid out"] * 3 + ["read"] * 3


def test_engines_that_read_at_once_with_one_model_count_their_own_tokens(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(8)
    model, prompts = tiny_model("llama"), [some_prompt(source, 2, prefix=4) for _ in range(2)]
    documents = [some_ids(source, 30) for _ in range(3)]
    counted, other = [LabelEngine(model, each, max_batch_tokens=900) for each in prompts]
    usage = counted.label(documents).usage
    real, others = _LlamaLayer.__call__, iter([documents])

    def beside(*args: Any, **options: Any) -> object:
        for of_other in others:
            other.label(of_other)
        return real(*args, **options)

    monkeypatch.setattr(_LlamaLayer, "__call__", beside)
    assert counted.label(documents).usage == usage
    assert next(others, None) is None  # the other engine read them
