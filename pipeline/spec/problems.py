"""The mistakes in a spec, in words. Entry point: `problems_of`.

A value is shown without its secrets, because an error may be printed or logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import Problem
from pipeline.spec.locations import masked
from pipeline.spec.schema import IN_WORDS, JobSpec

_MISSING = "missing; add it"
# By pydantic's type of error; the names in braces are those of its context.
_FIXES = {
    "missing": _MISSING,
    "tuple_type": "write a list, as in [a, b]",
    "dict_type": "write a mapping of keys to values",
    "model_type": "write a mapping of keys to values",
    "model_attributes_type": "write a mapping of keys to values",
    "too_short": "write at least {min_length}",
    "string_too_short": "write a text; this one is empty",
    "string_type": "write a text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "write a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "write a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "write true or false"),
    "greater_than": "write a number above {gt}",
    "greater_than_equal": "write a number of at least {ge}",
    "less_than_equal": "write a number of at most {le}",
    "less_than": "write a number below {lt}",
    "literal_error": "write {expected}",
    "union_tag_invalid": "a stage has no cascade of its own; remove it",
}

_OF_STAGES = ("model", "documents", "question", "readout", "classifier")
_WRITE = "no such key; write "


def problems_of(error: ValidationError, content: Mapping[str, Any]) -> list[Problem]:
    """One problem for each mistake that pydantic reports for this content of a spec."""
    mistakes: dict[str, tuple[object, dict[str, None]]] = {}  # the value at a place, and the fixes
    for detail in error.errors():
        place, value = _written(as_written(detail["loc"], content), content)
        if not _follows(detail, value):
            _, fixes = mistakes.setdefault(place or "spec", (_shown(detail["loc"], value), {}))
            fixes[_fix(detail)] = None
    problems = [
        # — a value that may be of two types has a fix for each of them
        Problem(place, " or ".join(fixes), value)
        for place, (value, fixes) in mistakes.items()
    ]
    # — a misspelt key is also missing
    suggested = {
        ".".join([*problem.place.split(".")[:-1], problem.fix.removeprefix(_WRITE)])
        for problem in problems
        if problem.fix.startswith(_WRITE)
    }
    return [each for each in problems if each.place not in suggested or each.fix != _MISSING]


def _follows(detail: ErrorDetails, value: Any) -> bool:
    """Whether it is no mistake, but follows from one: a list without its wrong elements is short,
    and a default that depends on a wrong key is not computed."""
    kind = detail["type"]
    is_long = kind == "too_short" and len(value) >= detail["ctx"]["min_length"]
    return is_long or kind == "default_factory_not_called"


def as_written(loc: Sequence[int | str], content: Mapping[str, Any]) -> Sequence[int | str]:
    """The place of a stage's key in what the user wrote.

    The stage of a cascade without `stages` is the task itself, with `teacher` as its model. A last
    stage that answers alone has the place of its task.
    """
    if len(loc) < 3 or loc[0] != "tasks" or not str(loc[1]).isdecimal():
        return loc
    task, at, own = content["tasks"][int(loc[1])], (*loc[:2], "cascade"), loc[2:]
    cascade = task.get("cascade") if isinstance(task, Mapping) else None
    stages = cascade.get("stages") if isinstance(cascade, Mapping) else None
    if "stages" in loc and not stages:
        own = loc[loc.index("stages") + 2 :]
    elif cascade is None or loc[2] not in _OF_STAGES or loc[2] in task:
        return loc
    if stages:
        return (*at, "stages", len(stages) - 1, *own)
    return (*at, "teacher", *own[own.index("model") + 1 :]) if "model" in own else (*loc[:2], *own)


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


def _fix(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _other_key(detail["loc"])
    if kind == "string_pattern_mismatch":
        return IN_WORDS[context["pattern"]]
    if kind in _FIXES:
        return _FIXES[kind].format(**context)
    return detail["msg"].removeprefix("Value error, ")


def _other_key(loc: Sequence[int | str]) -> str:
    """The fix of an unknown key: the nearest key there, or the place where this key belongs."""
    *above, last = loc
    models: list[type[BaseModel]] = [JobSpec]
    for part in above:  # — indices and names of types are not keys of a model
        models = [inner for model in models for inner in _models(model, str(part))] or models
    key, keys = str(last), dict.fromkeys(name for model in models for name in model.model_fields)
    if key in keys:  # — of another kind of task; the tag of this kind is the part before
        return f"{above[-1]} takes no {key}; remove one of the two"
    sections = [
        name
        for name in JobSpec.model_fields
        if name not in above and any(key in m.model_fields for m in _models(JobSpec, name))
    ]
    if len(sections) == 1:
        return f"no such key; {key} belongs below {sections[0]}"
    if nearest := get_close_matches(key.lower(), keys, n=1):
        return f"{_WRITE}{nearest[0]}"
    shown = ", ".join(keys)
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
