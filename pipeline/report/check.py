"""What a check found, for people and as JSON values.

Knows findings. Knows nothing of how they came about.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.inference.memory import MemoryPlan
from pipeline.verbs.check import Findings, ReadoutFacts
from pipeline.verbs.exactness import FLOAT32_MAX, Change, Exactness

SHOWN_LABELS = 64  # of a task; all of them stand in the JSON


def show_findings(found: Findings, console: Console, *, prompts: bool) -> None:
    """A table of what was proved; with `prompts`, the first document's prompt for every task."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "storage": f"{found.output} honours create-only writes",
        "documents": f"{found.documents:,}",
        "model": f"{found.model_folder}, {_numbers(found)} on {found.device}",
        "context": f"{found.context_tokens:,} tokens",
        "template": "chat" if found.has_chat_template else "none: plain text ending in 'Answer:'",
        **{f"  {task}": _tokens(labels) for task, labels in found.label_tokens.items()},
        **{f"  {task}": _readout(facts) for task, facts in found.readouts.items()},
        "memory": _memory(found.proof.memory),
        "exactness": _exactness(found.proof.exactness),
    }
    if found.proof.quantization:
        rows["quantized"] = f"{_change(found.proof.quantization)}, against the model's own weights"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, markup=False)
    for prompt in found.prompts if prompts else ():
        console.rule(f"{prompt.task} · {prompt.doc_id}")
        console.print(prompt.text, markup=False)
        console.print(list(prompt.token_ids), markup=False)


def _numbers(found: Findings) -> str:
    return found.dtype if found.quantize == "none" else f"{found.dtype}, {found.quantize} weights"


def _memory(memory: MemoryPlan) -> str:
    return (
        f"weights {memory.weights_bytes / 1e6:,.0f} MB, kept instruction "
        f"{memory.prefix_bytes / 1e6:,.1f} MB, {memory.token_bytes / 1e3:,.1f} kB a token; "
        f"{memory.max_batch_tokens:,} tokens at once, {memory.peak_bytes / 1e6:,.0f} MB in all"
    )


def _exactness(found: Exactness) -> str:
    """What was compared in float32, which shows a wrong tree, and in half precision beside it."""
    plain = found.apart if found.dtype == "float32" else found.in_float32
    verdict = "exact" if found.exact else "NOT exact"
    if plain and not plain.max_abs_dp <= FLOAT32_MAX:
        verdict = f"{verdict}: {FLOAT32_MAX:g} is allowed"
    if plain is found.apart:
        return f"{verdict}; {_change(plain)}, tree against independent prompts"
    half = (
        f"in {found.dtype} {_change(found.apart)}, {found.allowed_max:.1e} and a mean of "
        f"{found.allowed_mean:.1e} allowed"
    )
    if plain is None:
        return (
            f"{verdict}; {half}, tree against independent prompts; float32 weights, by which the "
            "tree would be proved closer, have no room here"
        )
    assert found.rounding
    return (
        f"{verdict}; in float32 {_change(plain)}, tree against independent prompts; {half}: "
        f"independent prompts lie {found.rounding.mean_abs_dp:.1e} from their float32 answers"
    )


def _change(change: Change) -> str:
    return (
        f"max |dp| {change.max_abs_dp:.1e}, mean {change.mean_abs_dp:.1e}, {change.argmax_flips} "
        f"argmax flips in {change.answers} answers"
    )


def _readout(facts: ReadoutFacts) -> str:
    read = "mean of" if facts.pooling == "mean" else f"last of {facts.kind}, of"
    held = ", ".join(map(str, facts.layers))
    return (
        f"{', '.join(facts.labels)} by the readout {facts.path} ({facts.sha256[:12]}), "
        f"{read} layer {facts.layer} of {held}"
    )


def _tokens(labels: dict[str, list[str]]) -> str:
    first = list(labels.items())[:SHOWN_LABELS]
    shown = ", ".join(f"{label} {' '.join(map(repr, tokens))}" for label, tokens in first)
    left_out = len(labels) - len(first)
    return f"{shown} and {left_out:,} more" if left_out else shown


def findings_json(found: Findings) -> dict[str, Any]:
    """The form that other programs read (DESIGN, section 7)."""
    exactness = found.proof.exactness
    return {
        "model": {
            "path": found.model_folder,
            "dtype": found.dtype,
            "quantize": found.quantize,
            "device": found.device,
            "context_tokens": found.context_tokens,
            "chat_template": found.has_chat_template,
        },
        "storage": {"url": found.output, "create_only": True},
        "documents": found.documents,
        "label_tokens": found.label_tokens,
        "readouts": {task: asdict(facts) for task, facts in found.readouts.items()},
        "prompts": [
            {
                "doc_id": prompt.doc_id,
                "task": prompt.task,
                "text": prompt.text,
                "token_ids": list(prompt.token_ids),
                "labels": prompt.labels,
                "scoring": prompt.scoring,
                "surfaces": prompt.verbalizers,
            }
            for prompt in found.prompts
        ],
        "memory": {**asdict(found.proof.memory), "peak_bytes": found.proof.memory.peak_bytes},
        "exactness": {
            **(_change_json(exactness.apart) or {}),
            "exact": exactness.exact,
            "in_float32": _change_json(exactness.in_float32),
            "rounding": _change_json(exactness.rounding),
        },
        "quantization": _change_json(found.proof.quantization),
    }


def _change_json(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    numbers = {name: _number(getattr(change, name)) for name in ("max_abs_dp", "mean_abs_dp")}
    return asdict(change) | numbers


def _number(value: float) -> float | None:
    """The value; JSON has no word for what is no number."""
    return None if math.isnan(value) else value
