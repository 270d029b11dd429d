"""A spec from YAML or from Python. Entry points: `load_spec`, `parse_spec`, `as_spec`.

Errors are one line a problem, and never repeat a line of the YAML, which may hold a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import Problem, SpecError
from pipeline.spec.locations import masked
from pipeline.spec.schema import JobSpec

# Where neither an input nor an output is used, a spec in Python may leave these keys out.
_UNUSED: Mapping[str, Any] = {"name": "labeller", "input": {"path": "unused"}, "output": "unused"}
_FIXES = {  # by pydantic's message
    "Extra inputs are not permitted": "no such key; remove it or correct its spelling",
    "Field required": "missing; add it",
}


def load_spec(path: str | Path) -> JobSpec:
    """The spec in a YAML file.

    Args:
        path: The file, in UTF-8.

    Returns:
        The valid spec, which cannot be changed.

    Raises:
        SpecError: The file cannot be read, or the spec is wrong; one line a problem.

    Examples:
        >>> load_spec("my.yaml").output
        'out/my_corpus'
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem(str(path), f"cannot be read: {error}", str(path))]) from error
    return parse_spec(text, place=str(path))


def parse_spec(text: str, *, place: str = "spec") -> JobSpec:
    """The spec in a YAML text.

    Args:
        text: The YAML. Anchors are refused, and `yes`, `no` and dates are strings.
        place: A name for the text in errors.

    Returns:
        The valid spec, which cannot be changed.

    Raises:
        SpecError: The text is not plain YAML, or the spec is wrong; one line a problem.

    Examples:
        >>> parse_spec("{name: a, model: {path: m}, input: {path: in}, output: out, tasks: []}")
        Traceback (most recent call last):
        pipeline.errors.SpecError: tasks: Tuple should have at least 1 item ...
    """
    try:
        content = yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a malformed number, such as `0x_`
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError):  # its text would repeat lines of the YAML
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            reason = f"{' '.join(part for part in (error.context, error.problem) if part)}{line}"
        raise SpecError([Problem(place, f"is not plain YAML: {reason}", place)]) from None
    if not isinstance(content, dict):
        raise SpecError([Problem(place, "write a mapping of keys to values", content)])
    return spec_of(content)


def as_spec(spec: str | Path | Mapping[str, Any] | JobSpec) -> JobSpec:
    """A spec from its file, from a dictionary of its keys, or as it is.

    A dictionary may omit the name, the input and the output.
    """
    if isinstance(spec, JobSpec):
        return spec
    return spec_of({**_UNUSED, **spec}) if isinstance(spec, Mapping) else load_spec(spec)


def spec_of(content: Mapping[str, Any]) -> JobSpec:
    """The spec with these keys and values; SpecError with one line a problem."""
    try:
        return JobSpec.model_validate(dict(content))
    except ValidationError as error:
        raise SpecError(_problems(error)) from error


class PlainLoader(yaml.SafeLoader):
    """YAML without surprises: `yes` is a string, a key occurs once, anchors are refused."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"write the value out: anchors are not read, line {line}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is one word, line {key_node.start_mark.line + 1}")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise yaml.YAMLError(f"{key!r} occurs twice, line {mark.line + 1}; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads yes, no, on, off as booleans and 2026-11-01 as a date. In a spec they are labels.
PlainLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _problems(error: ValidationError) -> list[Problem]:
    """One problem for each cause of a validation error."""
    details = error.errors()
    places = [".".join(str(part) for part in detail["loc"]) for detail in details]
    return [
        Problem(
            place or "spec",
            _FIXES.get(detail["msg"], detail["msg"].removeprefix("Value error, ")),
            _value(detail),
        )
        for place, detail in zip(places, details, strict=True)
        # A wrong element also makes its list "too short": report the cause, not this consequence.
        if not (detail["type"] == "too_short" and any(p.startswith(f"{place}.") for p in places))
    ]


def _value(detail: ErrorDetails) -> object:
    """The wrong value as an error may show it; None for a missing key."""
    value = detail["input"]
    if "storage_options" in detail["loc"]:  # only the names: a value may be a secret
        return sorted(value) if isinstance(value, dict) else type(value).__name__
    # Masked together with its key: a misspelt key may still name a secret.
    key = str(detail["loc"][-1]) if detail["loc"] else ""
    shown = masked({key: value})
    assert isinstance(shown, dict)
    return None if detail["type"] == "missing" else shown[key]
