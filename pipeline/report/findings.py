"""What a check found, for people and as JSON values.

Knows findings. Knows nothing of how they came about.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.check import Change, Findings, ReadoutFacts
from pipeline.inference.memory import MemoryPlan

SHOWN_LABELS = 64  # of a task; all of them stand in the JSON


def show_findings(found: Findings, console: Console, *, prompts: bool) -> None:
    """A table of what was proved; with `prompts`, the first document's prompt for every task."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    exactness = found.exactness
    verdict = "exact" if found.exact else f"NOT exact: {exactness.tolerance:g} is allowed"
    rows = {
        "storage": f"{found.output} honours create-only writes",
        "documents": f"{found.documents:,}",
        "model": f"{found.model_folder}, {_numbers(found)} on {found.device}",
        "context": f"{found.context_tokens:,} tokens",
        "template": "chat" if found.has_chat_template else "none: plain text ending in 'Answer:'",
        **{f"  {task}": _tokens(labels) for task, labels in found.label_tokens.items()},
        **{f"  {task}": _readout(facts) for task, facts in found.readouts.items()},
        "memory": _memory(found.memory),
        "exactness": f"{verdict}; max |dp| {exactness.max_abs_dp:.1e}, {exactness.argmax_flips} "
        f"argmax flips in {exactness.answers} answers, tree against independent prompts",
    }
    if found.quantization:
        rows["quantized"] = _change(found.quantization)
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


def _change(change: Change) -> str:
    return (
        f"max |dp| {change.max_abs_dp:.1e}, mean {change.mean_abs_dp:.1e}, {change.argmax_flips} "
        f"argmax flips in {change.answers} answers, against the model's own weights"
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
                "surfaces": prompt.surfaces,
            }
            for prompt in found.prompts
        ],
        "memory": {**asdict(found.memory), "peak_bytes": found.memory.peak_bytes},
        "exactness": {
            "max_abs_dp": _number(found.exactness.max_abs_dp),
            "argmax_flips": found.exactness.argmax_flips,
            "answers": found.exactness.answers,
        },
        "quantization": _change_json(found.quantization) if found.quantization else None,
    }


def _change_json(change: Change) -> dict[str, Any]:
    numbers = {name: _number(getattr(change, name)) for name in ("max_abs_dp", "mean_abs_dp")}
    return asdict(change) | numbers


def _number(value: float) -> float | None:
    """The value; JSON has no word for what is no number."""
    return None if math.isnan(value) else value
