"""A spec from YAML or from Python. Entry points: `load_spec`, `parse_spec`, `as_spec`.

Errors are one line a problem, and never repeat a line of the YAML, which may hold a secret.
`located` adds the line of the file to errors that are found after the spec was read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.errors import Option, Problem, SpecError
from pipeline.local_files import read_whole
from pipeline.spec.locations import Number
from pipeline.spec.problems import as_written, problems_of
from pipeline.spec.schema import JobSpec

MAX_SPEC_BYTES = 16 * 1024 * 1024
_TAG = "tag:yaml.org,2002:"
# The types of nodes that are read, as PyYAML names them.
_TAGS = ("map", "seq", "str", "null", "int", "float", "bool", "timestamp", "merge", "value")
# Where neither an input nor an output is used, a spec in Python may leave these keys out.
_UNUSED: Mapping[str, Any] = {"name": "labeller", "input": {"path": "unused"}, "output": "unused"}


def load_spec(path: str | Path) -> JobSpec:
    """The spec in a YAML file.

    Args:
        path: The file, in UTF-8. Relative paths in it are relative to its folder.

    Returns:
        The valid spec, which cannot be changed.

    Raises:
        SpecError: The file cannot be read, or the spec is wrong; one line a problem.

    Examples:
        >>> load_spec("my.yaml").output
        'out/my_corpus'
    """
    if re.search(
        r"\.(csv|tsv|jsonl|ndjson|parquet|arrow|tar|txt)(\.(?!ya?ml$)\w+)?$",
        str(path),
        re.IGNORECASE,
    ):
        fix = "is data, and not a spec; `assay init DATA` writes a spec for it"
        raise SpecError([Problem(str(path), fix)])
    try:
        text = read_whole(path, MAX_SPEC_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError([Problem(str(path), "is not UTF-8; save the file as UTF-8")]) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        fix = f"{reason}; write the path of the spec, a YAML file"
        raise SpecError([Problem(str(path), fix)]) from error
    folder = os.path.dirname(path)
    is_pipe = folder.startswith(("/dev", "/proc"))
    return parse_spec(text, place=str(path), folder="" if is_pipe else folder)


def parse_spec(text: str, *, place: str = "spec", folder: str = "") -> JobSpec:
    """The spec in a YAML text.

    Args:
        text: The YAML. Anchors are refused, and `yes`, `no` and dates are strings.
        place: A name for the text in errors.
        folder: The folder of relative paths. Default: the working folder.

    Returns:
        The valid spec, which cannot be changed.

    Raises:
        SpecError: The text is not plain YAML, or the spec is wrong; one line a problem.

    Examples:
        >>> parse_spec("{name: a, model: {path: m}, input: {path: in}, output: out, tasks: []}")
        Traceback (most recent call last):
        pipeline.errors.SpecError: tasks: write at least 1 (got []) in spec, line 1
    """
    content, lines = _read(text, place)
    if not isinstance(content, dict):
        raise SpecError([Problem(place, "write a mapping of keys to values", content)])
    try:
        return spec_of(content, folder=folder)
    except SpecError as error:
        raise SpecError(_with_lines(error, content, lines, place)) from error


@contextmanager
def located(path: str | Path) -> Iterator[None]:
    """Adds the line of this spec's file to the SpecErrors that are raised inside."""
    try:
        yield
    except SpecError as error:
        try:
            content, lines = _read(read_whole(path, MAX_SPEC_BYTES).decode("utf-8"), str(path))
            problems = _with_lines(error, content, lines, str(path))
        except (OSError, UnicodeDecodeError, SpecError, LookupError, TypeError):
            raise error from None  # the file has changed since it was read
        raise SpecError(problems) from error


def _read(text: str, place: str) -> tuple[Any, dict[str, int]]:
    """The content of a YAML text, and the line of each key and list item."""
    lines: dict[str, int] = {}
    try:
        root = _Loader(text).get_single_node()
        return None if root is None else _content(root, "", lines), lines
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError):  # its text would repeat lines of the YAML
            reason = _malformed(error)
        raise SpecError([Problem(place, f"is not plain YAML: {reason}")]) from None
    except RecursionError:
        raise SpecError([Problem(place, "is nested too deeply to be a spec")]) from None


class _Loader(yaml.SafeLoader):
    """The nodes of YAML without anchors."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"write the value out: anchors are not read, line {line}")
        return super().compose_node(parent, index)


def _content(node: yaml.Node, place: str, lines: dict[str, int]) -> Any:
    """The value of a node: a mapping, a list, a text, a `Number` or None.

    YAML 1.1 reads yes, no, on and off as booleans and 2026-11-01 as a date: in a spec they are
    texts. The line of each key and list item below the node is added to `lines`.
    """
    tag = node.tag.removeprefix(_TAG)
    if tag not in _TAGS:
        raise yaml.YAMLError(f"no type {tag!r} in a spec, line {node.start_mark.line + 1}")

    def below(name: str, key: yaml.Node, value: yaml.Node) -> Any:
        own = f"{place}.{name}" if place else name
        lines[own] = key.start_mark.line + 1
        return _content(value, own, lines)

    if isinstance(node, yaml.SequenceNode):
        return [below(str(index), item, item) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        number, text = tag in ("int", "float"), _text(node)
        return None if tag == "null" else Number(text) if number else text
    content: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.YAMLError(f"a key is one word, line {line}")
        if (name := _text(key)) in content:
            raise yaml.YAMLError(f"{name!r} occurs twice, line {line}; keep one")
        content[name] = below(name, key, value)
    return content


def _text(node: yaml.ScalarNode) -> str:
    """The text of a node: JSON writes a character as two escapes, which YAML leaves apart."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"half of a surrogate pair is not a character, line {line}") from None


def _malformed(error: yaml.MarkedYAMLError) -> str:
    """What the parser could not read, the line, and for the usual mistakes the fix."""
    parser_says = error.problem or ""
    reason = " ".join(part for part in (error.context, parser_says) if part)
    mark = error.problem_mark
    if parser_says == "could not find expected ':'":  # — noticed at the next line
        reason, mark = (
            "no value; write `key: value`, with a space after the colon",
            (error.context_mark or mark),
        )
    elif parser_says.startswith("found character '\\t'"):
        reason = "a tab; indent with spaces"
    elif parser_says == "mapping values are not allowed here":
        reason = "a second `: `; put a text with a colon in quotes"
    return f"{reason}, line {mark.line + 1}" if mark else reason


def _with_lines(
    error: SpecError, content: Mapping[str, Any], lines: Mapping[str, int], file: str
) -> list[Problem]:
    """The problems with the line and the task of each whose place is a key of the spec."""
    located = []
    for problem in error.problems:
        names = [problem.place] if problem.place in content else problem.place.split(".")
        parts = [*map(str, as_written(names, content))]  # — a key of the spec may have dots
        places = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        line = next((lines[place] for place in places if place in lines), None)
        known = line is not None or parts[0] in JobSpec.model_fields
        is_option = isinstance(problem.place, Option)  # — `tasks` is also a key
        if is_option or not known or problem.where.startswith(file):
            located.append(problem)
            continue
        where = file if line is None else f"{file}, line {line}"
        where += _task(parts, content)
        located.append(replace(problem, place=".".join(parts), where=where))
    return located


def _task(parts: Sequence[str], content: Mapping[str, Any]) -> str:
    """`, task 'topic'` for a place inside a task with a name; the name itself is shown anyway."""
    match parts:
        case ["tasks", index, key, *_] if index.isdecimal() and key != "name":
            task = content["tasks"][int(index)]
            name = task.get("name") if isinstance(task, Mapping) else None
            return f", task {name!r}" if isinstance(name, str) else ""
    return ""


def as_spec(spec: str | Path | Mapping[str, Any] | JobSpec) -> JobSpec:
    """A spec from its file, from a dictionary of its keys, or as it is.

    A dictionary may omit the name, the input and the output.
    """
    if isinstance(spec, JobSpec):
        return spec
    return spec_of({**_UNUSED, **spec}) if isinstance(spec, Mapping) else load_spec(spec)


@contextmanager
def opened(spec: str | Path | Mapping[str, Any] | JobSpec) -> Iterator[JobSpec]:
    """As `as_spec`; a SpecError of the block names the line of the spec's file, if it has one."""
    job = as_spec(spec)
    with located(spec) if isinstance(spec, str | Path) else nullcontext():
        yield job


def spec_of(content: Mapping[str, Any], *, folder: str = "") -> JobSpec:
    """The spec with these keys and values; SpecError with one line a problem.

    Relative paths are relative to the folder.
    """
    try:
        return JobSpec.model_validate(dict(content), context={"folder": folder})
    except ValidationError as error:
        raise SpecError(problems_of(error, content)) from error


def with_cascades(spec: JobSpec) -> JobSpec:
    """The spec with `cascade: auto` in each task with a question; SpecError where none can be."""
    content = spec.model_dump(exclude_unset=True)
    for task in content["tasks"]:
        if task.get("question") is not None:
            task["cascade"] = "auto"
    return spec_of(content)
