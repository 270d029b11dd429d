"""Properties of documents: assay's answers beside JSON that vLLM writes within a schema.

    python -m benchmarks.properties [SPEC ...] [--documents N] [--rounds N] [--to FILE]

The specs ask for the same properties in several forms: by default isolated questions, and a sheet.
Both engines have the same model in float32, the same documents and all cores, and take turns. vLLM
gets all prompts of a round at once; the description of the properties comes before the document,
where its prefix cache keeps it. Installs vLLM once, as `python -m benchmarks.peers` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

from benchmarks.bench import as_questions
from benchmarks.peers.__main__ import CACHE, start
from benchmarks.peers.environments import Worker
from benchmarks.peers.serve import Asked, Setup, Writing
from benchmarks.timing import processor
from pipeline.inference.attention.tree import Branches
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.runtime.assembly import DocumentReader, reader_prompt
from pipeline.runtime.job import make_job, make_reader
from pipeline.runtime.limits import usable_cores
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.labels import ANSWER, YES
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.check import take_samples

MAX_JSON_TOKENS = 600
WARM_UP = 2  # documents that are not measured
SPECS = ("jobs/specs/web_properties.yaml", "jobs/specs/web_properties_sheet.yaml")
VLLM = "vllm"
_YES_OR_NO = " Answer yes or no."

Properties = dict[str, Any]  # by task a label, a number, or a list of labels


def schema(tasks: Sequence[TaskSpec]) -> dict[str, Any]:
    """The JSON schema of one object with a property for each task."""
    properties: dict[str, Any] = {}
    for task in tasks:
        labels = list(task.labels)
        properties[task.name] = {"type": "string", "enum": labels}
        if task.kind == "score":
            properties[task.name] = {"type": "number", "enum": list(map(json.loads, labels))}
        elif task.kind == "multi":
            items = properties[task.name]
            properties[task.name] = {"type": "array", "items": items, "maxItems": len(labels)}
    own = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "object", **own}


def description(tasks: Sequence[TaskSpec]) -> str:
    """The instruction that asks for all properties at once, with the tasks' own questions."""
    lines = ["Read the text, then describe it as one JSON object with these properties:"]
    for task in tasks:
        question, _, _ = (task.question or "").partition(ANSWER)
        question = question.removesuffix(_YES_OR_NO)
        labels = ", ".join(
            f"{label} ({texts[0]})" if task.kind == "multi" else label
            for label, texts in task.labels.items()
        )
        of = "A list of all that apply" if task.kind == "multi" else "One"
        lines.append(f"- {task.name}: {question} {of} of: {labels}.")
    return "\n".join(lines)


def parsed(tasks: Sequence[TaskSpec], text: str) -> Properties | None:
    """The properties of a JSON text; None if it is not JSON, or lacks one of them."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    names = {task.name for task in tasks}
    return content if isinstance(content, dict) and set(content) == names else None


def answers(
    tasks: Sequence[TaskSpec],
    questions: Sequence[Question],  # of the tasks' parts
    log_probs: Sequence[Mapping[int, float]],  # by question, of the tokens of its labels
) -> Properties:
    """The properties of a document by the model's probabilities."""
    likeliest = {}
    for question, of_tokens in zip(questions, log_probs, strict=True):
        p = {
            label: sum(exp(of_tokens[token]) for token in tokens)
            for label, tokens in question.first_tokens.items()
        }
        likeliest[question.name] = max(p, key=p.__getitem__)
    properties: Properties = {}
    for task in tasks:
        if task.kind == "multi":
            applies = [likeliest[part.name] == YES for part in task.parts]
            pairs = zip(task.labels, applies, strict=True)
            properties[task.name] = [label for label, yes in pairs if yes]
        else:
            label = likeliest[task.name]
            properties[task.name] = json.loads(label) if task.kind == "score" else label
    return properties


def differences(
    tasks: Sequence[TaskSpec], asked: Sequence[Properties], read: Sequence[Properties | None]
) -> dict[str, float]:
    """By kind of task, the share of answers in valid JSON that are not assay's.

    A list of labels is one answer for each label of the task.
    """
    differ: defaultdict[str, list[bool]] = defaultdict(list)
    for own, other in zip(asked, read, strict=True):
        for task in tasks if other else ():
            answer, other_answer = own[task.name], (other or {})[task.name]
            if task.kind == "multi":
                differ[task.kind] += [
                    (label in answer) != (label in other_answer) for label in task.labels
                ]
            else:
                differ[task.kind].append(answer != other_answer)
    return {kind: statistics.fmean(each) for kind, each in sorted(differ.items())}


def measure(
    spec: JobSpec,
    setup: Setup,
    forms: Mapping[str, PromptTokens],  # by name, with a question a part
    json_prompt: PromptTokens,
    documents: Sequence[list[int]],  # the first ones are the warm-up
    rounds: int,
) -> dict[str, Any]:
    """The figures of both engines, with all answers."""
    before, after = json_prompt.prefix, json_prompt.questions[0].token_ids
    seconds: dict[str, list[float]] = {name: [] for name in (*forms, VLLM)}
    replies: dict[str, list[Any]] = {name: [] for name in seconds}
    measured = documents[WARM_UP:]
    size = -(-len(measured) // rounds)
    parts = [documents[:WARM_UP], *(measured[i : i + size] for i in range(0, len(measured), size))]
    with ExitStack() as stack:
        assay = start("assay", setup, CACHE, stack)
        vllm = Worker(VLLM, setup, CACHE)
        stack.callback(vllm.close)
        for number, part in enumerate(parts):
            for name in sorted(seconds, reverse=bool(number % 2)):
                if name in forms:
                    assay.prepare(_asked(forms[name]))
                    took, of_part = assay.label(list(part))
                else:
                    ids = [[*before, *document, *after] for document in part]
                    vllm.ask(write=asdict(Writing(ids, schema(spec.tasks), MAX_JSON_TOKENS)))
                    took, of_part = vllm.reply()
                if number:
                    seconds[name].append(took / len(part))
                    replies[name] += of_part
        versions = {"assay": assay.version, VLLM: vllm.version}
    own = {
        name: [answers(spec.tasks, prompt.questions, each) for each in replies[name]]
        for name, prompt in forms.items()
    }
    read = [parsed(spec.tasks, each["text"]) for each in replies[VLLM]]
    first = next(iter(own.values()))
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "versions": versions,
        "documents": len(measured),
        "tokens of a document": statistics.fmean(map(len, measured)),
        "tokens of the questions": {
            name: len(Branches.of([q.token_ids for q in prompt.questions]).token_ids)
            for name, prompt in forms.items()
        },
        "tokens that vLLM read": statistics.fmean(each["read"] for each in replies[VLLM]),
        "tokens that vLLM wrote": statistics.fmean(each["tokens"] for each in replies[VLLM]),
        "seconds of a document, by round": seconds,
        "vLLM / assay": {name: _ratio(seconds[VLLM], seconds[name]) for name in forms},
        "not valid JSON": read.count(None) / len(read),
        "other answers in JSON, by kind": {
            name: differences(spec.tasks, each, read) for name, each in own.items()
        },
        "other answers than the first form's": {
            name: differences(spec.tasks, first, each) for name, each in own.items()
        },
        "answers": {**own, VLLM: replies[VLLM]},
    }


def _asked(prompt: PromptTokens) -> Asked:
    """The questions of a prompt, and the tokens that their labels begin with."""
    tokens = [sorted({t for own in q.first_tokens.values() for t in own}) for q in prompt.questions]
    return Asked(list(prompt.prefix), [list(q.token_ids) for q in prompt.questions], tokens)


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """The median of the rounds' ratios, the least and the greatest."""
    ratios = [s / f for s, f in zip(slow, fast, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def _labels(spec: JobSpec) -> list[tuple[str, str, list[str]]]:
    """The tasks, which two forms of the same properties share."""
    return [(task.name, task.kind, list(task.labels)) for task in spec.tasks]


def main() -> None:
    """Reads the specs and the documents, measures, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--to", type=Path, help="file for the figures and all answers, as JSON")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    forms: dict[str, PromptTokens] = {}
    spec, *others = map(load_spec, options.specs)
    job = make_job(spec, place(spec.model, this_machine()), CACHE)
    for form in (spec, *others):
        if _labels(form) != _labels(spec):
            sys.exit(f"tasks: {form.name} has other tasks or labels than {spec.name}")
        reader = make_reader(form, job.placement, CACHE)
        folder, tokenizer, prompt = reader_prompt(reader, as_questions(form.parts))
        if odd := [q.name for q in prompt.questions if not q.scores_first_tokens]:
            sys.exit(f"tasks: labels with the same first token are not measured here: {odd}")
        forms[form.name] = prompt
    changes = {"instruction": description(spec.tasks), "examples": ()}
    of_json = spec.model_copy(update={"prompt": spec.prompt.model_copy(update=changes)})
    question = spec.tasks[0].model_copy(
        update={"name": "json", "question": "Write the JSON object."}
    )
    _, _, json_prompt = reader_prompt(make_reader(of_json, job.placement, CACHE), [question])
    shards = plan(job, open_store(spec.output, spec.storage_options), keep=False).shards
    document_reader = DocumentReader.of(job.readers[0], folder, tokenizer)
    samples = take_samples(shards, document_reader, spec, options.documents + WARM_UP)
    setup = Setup(str(folder), None, "float32", threads=usable_cores(), cache=str(CACHE))
    documents = [list(each.token_ids) for each in samples]
    figures = measure(spec, setup, forms, json_prompt, documents, options.rounds)
    if options.to:
        options.to.write_text(json.dumps(figures, indent=1))
    print(*(f"{name}: {value}" for name, value in figures.items() if name != "answers"), sep="\n")


if __name__ == "__main__":
    main()
