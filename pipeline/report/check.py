"""The report of `check`: what was proved, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pipeline.inference.memory import MemoryPlan
from pipeline.report.console import Part, printed, warnings
from pipeline.verbs.check import AnswerFacts, CheckedModel, Findings, Prompt, ReadoutFacts
from pipeline.verbs.doubts import check_doubts
from pipeline.verbs.exactness import FLOAT32_MAX, Difference, Exactness

SHOWN_LABELS = 64  # of a task; the JSON form has all of them


@printed
def show_findings(findings: Findings, *, prompts: bool) -> Iterator[Part]:
    """A table of what was proved; with `prompts`, the first document's prompt for every task."""
    model = findings.model
    weights = " with 8-bit products" if model.int8 else ""
    weights += "" if model.kv == "none" else f", kv: {model.kv}"
    template = "chat" if model.chat_template else "none: plain text ending in 'Answer:'"
    rows = [
        ("storage", f"{findings.output}: conditional create works"),
        ("documents", f"{findings.documents:,}"),
        ("model", f"{model.path}, {model.dtype}{weights} on {model.device}, engine {model.engine}"),
        ("context", f"{model.context_tokens:,} tokens"),
        ("template", template),
        *((f"  {task}", f"asked of each label: {own}") for task, own in findings.usual.items()),
        *((f"  {task}", _tokens(labels)) for task, labels in findings.label_tokens.items()),
        *((f"  {task}", _readout(facts)) for task, facts in findings.readouts.items()),
        ("kernels", ", ".join(f"{what} by {by}" for what, by in model.processor.items()) or "vLLM"),
        ("memory", _memory(findings.proof.memory)),
        ("exactness", _exactness(findings.proof.exactness, model.engine)),
    ]
    if quantization := findings.proof.quantization:
        rows.append(
            ("quantized", f"{_difference(quantization)}, against the model without quantisation")
        )
    yield rows
    yield from warnings(check_doubts(findings))
    for prompt in findings.prompts if prompts else ():
        yield from ("", f"--- {prompt.task} · {prompt.doc_id} ---")
        yield from prompt.text.split("\n")
        yield str(list(prompt.token_ids))


def _memory(memory: MemoryPlan | None) -> str:
    if memory is None:
        return "planned by vLLM"
    return (
        f"weights {memory.weights_bytes / 1e6:,.0f} MB, the instruction's cache "
        f"{memory.prefix_bytes / 1e6:,.1f} MB; "
        f"{memory.max_batch_tokens:,} tokens at once, {memory.peak_bytes / 1e6:,.0f} MB in all"
    )


def _exactness(exactness: Exactness, engine: str) -> str:
    """The comparison in float32, which shows a wrong tree, and beside it the one in the dtype."""
    if not exactness.difference.answers:
        return "not tested: no answers were compared"
    float32 = exactness.difference if exactness.number_format == "float32" else exactness.in_float32
    verdict = "exact" if exactness.exact else "NOT exact"
    if float32 and not float32.max_abs_dp <= FLOAT32_MAX:
        verdict = f"{verdict}: {FLOAT32_MAX:g} is allowed"
    against = "all questions in one reading against a prompt for each question"
    if engine == "vllm":
        against = "vLLM against transformers"
    if float32 is exactness.difference:
        return f"{verdict}; {_difference(float32)}, {against}"
    half = (
        f"in {exactness.number_format} {_difference(exactness.difference)} (allowed: at most "
        f"{exactness.allowed_max:.1e}, mean {exactness.allowed_mean:.1e})"
    )
    if exactness.rounding is None:
        return (
            f"{verdict}; {half}, {against}; there is no room for float32 weights, which would "
            "prove this more precisely"
        )
    rounding = (
        f"{half}: prompts for each question differ by a mean of "
        f"{exactness.rounding.mean_abs_dp:.1e} from their float32 answers"
    )
    if float32 is None:
        return f"{verdict}; {against}; {rounding}"
    return f"{verdict}; in float32 {_difference(float32)}, {against}; {rounding}"


def _difference(difference: Difference) -> str:
    return (
        f"p differs by at most {difference.max_abs_dp:.1e}, mean {difference.mean_abs_dp:.1e}; "
        f"{difference.argmax_flips} of {difference.answers} answers have another label"
    )


def _readout(facts: ReadoutFacts) -> str:
    read = "mean of" if facts.pooling == "mean" else f"last of {facts.kind}, of"
    layers = ", ".join(map(str, facts.layers))
    return (
        f"{', '.join(facts.labels)} by the readout {facts.path} ({facts.sha256[:12]}), "
        f"{read} layer {facts.layer} of {layers}"
    )


def _tokens(labels: dict[str, list[str]]) -> str:
    first = list(labels.items())[:SHOWN_LABELS]
    shown = ", ".join(f"{label} {' '.join(map(repr, tokens))}" for label, tokens in first)
    left_out = len(labels) - len(first)
    return f"{shown} and {left_out:,} more" if left_out else shown


@dataclass(frozen=True, slots=True)
class ExactnessJson(Difference):
    """The tree against independent prompts."""

    exact: bool
    allowed: Mapping[Literal["max_abs_dp", "mean_abs_dp", "max_abs_dp_in_float32"], float | None]
    in_float32: Difference | None
    rounding: Difference | None


@dataclass(frozen=True, slots=True)
class FindingsJson:
    """The result of a check, for other programs."""

    model: CheckedModel
    storage: Mapping[Literal["url", "create_only"], str | bool]
    documents: int
    repeated_ids: int
    label_tokens: Mapping[str, Mapping[str, list[str]]]  # by task, by label
    readouts: Mapping[str, ReadoutFacts]  # by task
    prompts: tuple[Prompt, ...]
    memory: MemoryPlan | None
    exactness: ExactnessJson
    quantization: Difference | None
    answers: Mapping[str, AnswerFacts]  # by task
    warnings: tuple[str, ...]


def findings_json(findings: Findings) -> FindingsJson:
    """The form that other programs read (DESIGN, section 7)."""
    exactness = findings.proof.exactness
    return FindingsJson(
        model=findings.model,
        storage={"url": findings.output, "create_only": True},
        documents=findings.documents,
        repeated_ids=findings.repeated_ids,
        label_tokens=findings.label_tokens,
        readouts=findings.readouts,
        prompts=findings.prompts,
        memory=findings.proof.memory,
        exactness=ExactnessJson(
            **asdict(exactness.difference),
            exact=exactness.exact,
            allowed={
                "max_abs_dp": exactness.allowed_max,
                "mean_abs_dp": exactness.allowed_mean,
                "max_abs_dp_in_float32": FLOAT32_MAX,
            },
            in_float32=exactness.in_float32,
            rounding=exactness.rounding,
        ),
        quantization=findings.proof.quantization,
        answers=findings.answers,
        warnings=tuple(check_doubts(findings)),
    )
