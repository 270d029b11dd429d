"""The report of `check`: a verdict, then the findings, in numbers."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.inference.memory import MemoryPlan
from pipeline.report.console import Part, printed, warnings
from pipeline.verbs.check import Findings, ReadoutFacts
from pipeline.verbs.exactness import FLOAT32_MAX, Difference, Exactness

SHOWN_LABELS = 64  # of a task; the JSON form has all of them


@printed
def show_findings(findings: Findings, *, prompts: bool) -> Iterator[Part]:
    """The verdict and the findings; with `prompts`, the first document's prompt for every task."""
    model, exactness = findings.model, findings.exactness
    weights = f" with {model.rounded_to} products" if model.rounded_to else ""
    weights += "" if model.kv == "none" else f", kv: {model.kv}"
    yield _verdict(exactness, model.engine)
    yield ""
    rows = [
        ("storage", f"{findings.output}: conditional create works"),
        ("documents", f"{findings.documents:,}"),
        ("model", f"{model.name}, {model.dtype}{weights} on {model.device}, engine {model.engine}"),
        ("context", f"{model.context_tokens:,} tokens"),
        ("template", "chat" if model.chat_template else "none: plain text ending in 'Answer:'"),
        *((f"  {task}", f"asked of each label: {own}") for task, own in findings.usual.items()),
        *((f"  {task}", _tokens(labels)) for task, labels in findings.label_tokens.items()),
        *((f"  {task}", _readout(facts)) for task, facts in findings.readouts.items()),
        (
            "kernels",
            ", ".join(f"{operation} by {by}" for operation, by in model.processor.items())
            or "vLLM",
        ),
        ("memory", _memory(findings.memory)),
        *_differences(exactness),
    ]
    if findings.quantization is not None:
        quantized = f"{_difference(findings.quantization)}, against the model without quantisation"
        rows.append(("quantized", quantized))
    yield rows
    yield from warnings(findings.warnings)
    for prompt in findings.prompts if prompts else ():
        yield from ("", f"--- {prompt.task} · {prompt.doc_id} ---")
        yield from prompt.text.split("\n")
        yield str(list(prompt.token_ids))


def _verdict(exactness: Exactness, engine: str) -> str:
    if not exactness.answers:
        return "not tested: no answers were compared"
    one, other = "all questions in one reading", "a prompt for each question"
    if engine == "vllm":
        one, other = "vLLM", "transformers"
    if exactness.exact:
        return f"exact: {one} and {other} give the same answers up to rounding"
    return f"differs: {one} and {other} give answers that differ by more than rounding"


def _differences(exactness: Exactness) -> Iterator[tuple[str, str]]:
    """The comparison in float32, which shows a wrong tree, and the one in the job's format."""
    if not exactness.answers:
        return
    if exactness.in_float32 is not None:
        shown = f"{_difference(exactness.in_float32)}; allowed: at most {FLOAT32_MAX:g}"
        yield "in float32", shown
    bounds = exactness.allowed
    shown = f"{_difference(exactness)}; allowed: at most {bounds['max_abs_dp']:.1e}"
    if bounds["mean_abs_dp"] is not None:
        shown += f", mean {bounds['mean_abs_dp']:.1e}"
    yield f"in {exactness.number_format}", shown
    if exactness.rounding is not None:
        mean = f"a mean of {exactness.rounding.mean_abs_dp:.1e}"
        yield "rounding", f"prompts for each question differ by {mean} from their float32 answers"
    elif exactness.number_format != "float32":
        yield "not in float32", "there is no room for its weights, which would prove this better"


def _difference(difference: Difference) -> str:
    return (
        f"p differs by at most {difference.max_abs_dp:.1e}, mean {difference.mean_abs_dp:.1e}; "
        f"{difference.argmax_flips} of {difference.answers} answers have another label"
    )


def _memory(memory: MemoryPlan | None) -> str:
    if memory is None:
        return "planned by vLLM"
    return (
        f"weights {memory.weights_bytes / 1e6:,.0f} MB, the instruction's cache "
        f"{memory.prefix_bytes / 1e6:,.1f} MB; "
        f"{memory.max_batch_tokens:,} tokens at once, {memory.peak_bytes / 1e6:,.0f} MB in all"
    )


def _readout(facts: ReadoutFacts) -> str:
    read = "mean of" if facts.pooling == "mean" else f"last of {facts.kind}, of"
    others = ", ".join(str(layer) for layer in facts.layers if layer != facts.layer)
    return (
        f"{', '.join(facts.labels)} by the readout {facts.path} ({facts.sha256[:12]}), "
        f"{read} layer {facts.layer}{f'; its file also has {others}' if others else ''}"
    )


def _tokens(labels: dict[str, list[str]]) -> str:
    first = list(labels.items())[:SHOWN_LABELS]
    shown = ", ".join(f"{label} {' '.join(map(repr, tokens))}" for label, tokens in first)
    left_out = len(labels) - len(first)
    return f"{shown} and {left_out:,} more" if left_out else shown
