"""The mistakes in a spec, in words. Entry point: `problems_of`.

A value is shown without its secrets, because an error may be printed or logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import Problem
from pipeline.spec.locations import masked
from pipeline.spec.schema import IN_WORDS, JobSpec
from pipeline.spec.steps import Task
from pipeline.spec.tasks import INHERITED

# By pydantic's type of error; the names in braces are those of its context.
_FIXES = {
    "missing": "missing; add it",
    "tuple_type": "write a list, as in [a, b]",
    "dict_type": "write a mapping of keys to values",
    "model_type": "write a mapping of keys to values",
    "model_attributes_type": "write a mapping of keys to values",
    "too_short": "write at least {min_length}",
    "string_too_short": "write a text; this one is empty",
    "int_type": "write a whole number",
    "float_type": "write a number",
    "finite_number": "write a number",
    "greater_than": "write a number above {gt}",
    "greater_than_equal": "write a number of at least {ge}",
    "less_than_equal": "write a number of at most {le}",
    "literal_error": "write {expected}",
}


_WRITE = "no such key; write "
# Keys that earlier versions had.
_GONE = {
    "model.kind": "kind was removed: tasks of labels alone are answered by the head of a sequence "
    "classifier, and others by a language model; remove it",
    "explain": "no such key: continuations are not stored any more; remove it",
    "exit": "exit was removed: a readout is read at the layer that its file names; fit it with "
    "`assay fit --layers N`",
    "gpus": "gpus was removed: a worker has one GPU; for several write engine: vllm and "
    "tensor_parallel",
    "quantize": "quantize was removed; write dtype: int8",
    "scoring": "scoring was removed: labels that share a first token are scored whole, and so are "
    "all with beam or length_penalty; remove it",
    "calibration": "calibration was removed; fit thresholds or a readout with `assay fit`",
}


def problems_of(error: ValidationError, content: Mapping[str, Any]) -> list[Problem]:
    """One problem for each mistake that pydantic reports for this content of a spec."""
    of_tasks = [each for each in error.errors() if not _is_inherited(each["loc"], content)]
    written = [(*_written(detail["loc"], content), detail) for detail in of_tasks or error.errors()]
    places = [place for place, _, _ in written]
    mistakes = [
        (place, value, detail)
        for place, value, detail in written
        # A wrong element also makes its list "too short": report the cause, not this consequence.
        if not (detail["type"] == "too_short" and any(p.startswith(f"{place}.") for p in places))
    ]
    problems = []
    # — a value that may be of two types has an error for each of them
    for place, same in groupby(mistakes, key=itemgetter(0)):
        values, details = zip(*((value, detail) for _, value, detail in same), strict=True)
        fix = " or ".join(dict.fromkeys(_fix(detail) for detail in details))
        problems.append(Problem(place or "spec", fix, _shown(details[0]["loc"], values[0])))
    # — a misspelt key is also missing
    meant = {
        ".".join([*problem.place.split(".")[:-1], problem.fix.removeprefix(_WRITE)])
        for problem in problems
        if problem.fix.startswith(_WRITE)
    }
    missing = _FIXES["missing"]
    return [problem for problem in problems if problem.place not in meant or problem.fix != missing]


def _written(loc: Sequence[int | str], content: Mapping[str, Any]) -> tuple[str, Any]:
    """The place of a mistake in what the user wrote, and the value there; None without the key.

    Parts of pydantic's place that are names of types are left out.
    """
    place: list[str] = []
    value: Any = content
    for index, part in enumerate(loc):
        in_list = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, Mapping) and part in value):
            place.append(str(part))
            value = value[part]
        elif part == "[key]":  # — the key itself is wrong
            value = loc[index - 1]
        elif isinstance(value, Mapping) and index == len(loc) - 1:
            place.append(str(part))
            value = None
    return ".".join(place), value


def _is_inherited(loc: Sequence[int | str], content: Mapping[str, Any]) -> bool:
    """Whether it is a mistake in what a stage of a cascade has of its task."""
    if "stages" not in loc:
        return False
    at = loc.index("stages")
    _, stage = _written(loc[: at + 2], content)
    key = loc[at + 3] if len(loc) > at + 3 else None  # — after the name of the stage's class
    return isinstance(stage, Mapping) and key in INHERITED and key not in stage


def _fix(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _other_key(detail["loc"])
    if kind == "string_pattern_mismatch":
        return IN_WORDS[context["pattern"]]
    if kind == "string_type":
        value = detail["input"]
        if value is None and "labels" in detail["loc"]:
            value = "null"
        is_scalar = isinstance(value, int | float | str)
        return f"write a text: '{value}'" if is_scalar else "write a text"
    if kind in _FIXES:
        return _FIXES[kind].format(**context)
    return detail["msg"].removeprefix("Value error, ")


def _other_key(loc: Sequence[int | str]) -> str:
    """The fix of an unknown key: the nearest key there, or the place where this key belongs."""
    *above, last = loc
    models: list[type[BaseModel]] = [JobSpec]
    for part in above:  # — indices and names of types are not keys of a model
        models = [inner for model in models for inner in _models(model, str(part))] or models
    key, keys = str(last), [name for model in models for name in model.model_fields]
    for model in models:
        if issubclass(model, Task) and model.__name__ in above and key in model.refused:
            return model.refused[key]
    if gone := _GONE.get(key) or _GONE.get(f"{above[-1]}.{key}" if above else key):
        return gone
    sections = [
        name
        for name in JobSpec.model_fields
        if name not in above and any(key in m.model_fields for m in _models(JobSpec, name))
    ]
    if len(sections) == 1:
        return f"no such key; {key} belongs below {sections[0]}"
    if nearest := get_close_matches(key.lower(), keys, n=1):
        return f"{_WRITE}{nearest[0]}"
    shown = ", ".join(dict.fromkeys(keys))
    return f"no such key; remove it or correct its spelling: the keys are {shown}"


def _models(model: type[BaseModel], name: str) -> Iterator[type[BaseModel]]:
    """The models of the mappings that a key's value may be."""
    field = model.model_fields.get(name)
    waiting: list[Any] = [] if field is None else [field.annotation]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        waiting += get_args(annotation)


def _shown(loc: Sequence[int | str], value: object) -> object:
    """The wrong value as an error may show it."""
    if "storage_options" in loc:  # only the names: a value may be a secret
        return sorted(value) if isinstance(value, dict) else type(value).__name__
    # Masked together with its key: a misspelt key may still name a secret.
    key = str(loc[-1]) if loc else ""
    shown = masked({key: value})
    assert isinstance(shown, dict)
    return shown[key]
