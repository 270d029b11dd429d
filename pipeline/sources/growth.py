"""How long a value of an SQL expression can be. Entry point: `check_sizes`.

DuckDB bounds neither the time nor the memory of a function, and it cannot be interrupted inside
one. So sizes are bounded before, from the parse tree, with columns of a nominal size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

# A value may be this many times as long as a document: enough to escape a text for HTML.
MOST = 100
_COLUMN = 1e6  # characters, so that the product of two columns is above the limit
_MOST_LAMBDAS = 5  # inside each other, because each is computed twice
# Functions that make a value of any size from a few bytes.
_UNBOUNDED = frozenset(
    {"repeat", "range", "generate_series", "list_resize", "array_resize", "list_reduce", "reduce"}
    | {"array_reduce", "bitstring", "equi_width_bins", "lpad", "rpad", "printf", "format"}
    | {"json_pretty"}
)
# How many characters a function or a cast may write for one.
_FACTORS = (
    {"bin": 8, "to_binary": 8, "hex": 2, "to_hex": 2, "base64": 2, "to_base64": 2, "strftime": 8}
    | {"url_encode": 3, "nfc_normalize": 3, "regexp_escape": 4, "to_json": 6, "json_quote": 6}
    | {"json_array": 6, "json_object": 6, "array_to_json": 6, "row_to_json": 6}
    | {"bit": 8, "blob": 2, "json": 6, "varchar": 2, "text": 2, "string": 2}
)
# The place of an argument that a function may use once for each character or element of the others.
_REPEATED = (
    {"replace": 2, "regexp_replace": 2, "concat_ws": 0, "list_select": 1, "array_select": 1}
    | {"list_string_agg": 1, "array_to_string": 1, "array_to_string_comma_default": 1}
    | dict.fromkeys(("list_aggregate", "list_aggr", "aggregate"), 2)
    | dict.fromkeys(("array_aggregate", "array_aggr"), 2)
    | dict.fromkeys(("levenshtein", "editdist3", "damerau_levenshtein"), 1)
    | dict.fromkeys(("jaro_similarity", "jaro_winkler_similarity"), 1)
)
# The same, where the argument is a list, or a JSON path with `..`.
_REPEATED_LISTS = {"regexp_extract": 2} | dict.fromkeys(
    ("json_extract", "json_extract_path", "json_extract_string", "json_extract_path_text", "->>"), 1
)
# Functions that give a part of their first argument, and those that give what their lambda does.
_PARTS = {"struct_extract", "list_extract", "array_extract", "element_at", "list_element"}
_PARTS |= {"list_filter", "array_filter", "filter"}
_MAPS = {"list_transform", "array_transform", "list_apply", "array_apply", "apply"}
_LENGTHS = {"left": 1, "right": 1, "substr": 2, "substring": 2}  # the place of a number
_SCALAR_TYPE = re.compile(r"u?\w*int(eger)?|double|float|real|decimal|bool\w*|date|time\w*")


class TooLongError(Exception):
    """The name of a function whose value may be too long."""


def check_sizes(
    node: Any,
    scalar: Collection[str],
    known: Mapping[str, float] | None = None,
    times: float = 1,
) -> float:
    """The most characters of a node's value; TooLongError if that is above `MOST` columns.

    `scalar` are the functions that give numbers, dates or booleans. `known` are the parameters of
    the lambdas around the node, which is computed for each of `times` elements.
    """
    known = known or {}
    kind, name = node.get("class"), str(node.get("function_name", "")).lower()
    if kind == "COLUMN_REF":
        return known.get(node["column_names"][0].lower(), _COLUMN)
    if kind == "CONSTANT":
        return len(_literal(node))
    parts, sizes = _children(node), list[float]()
    for part in parts:  # — no generator, which would take one more level of the stack
        if kind == "FUNCTION" and part.get("class") == "LAMBDA" and sizes:
            if len(known) > _MOST_LAMBDAS:
                raise TooLongError(name)
            sizes.append(_size_of_lambda(part, parts[0], sizes[0], scalar, known, times))
        else:
            sizes.append(check_sizes(part, scalar, known, times))
    if kind == "CAST":
        to = node["type_expr"].get("type_name", "").lower()
        return 1 if _SCALAR_TYPE.fullmatch(to) else max(sizes) * _FACTORS.get(to, 1)
    if kind not in ("FUNCTION", "LAMBDA"):
        return 1 if kind in ("COMPARISON", "CONJUNCTION", "BETWEEN") else max(sizes, default=1)
    name = name or "json_extract"  # — `json -> path` has the form of a lambda
    size = _size_of_call(name, sizes, parts)
    if size * times > MOST * _COLUMN:
        raise TooLongError(name)
    return 1 if name in scalar else size


def _size_of_call(name: str, sizes: list[float], parts: list[Any]) -> float:
    if name in _UNBOUNDED or not sizes:
        return inf if name in _UNBOUNDED else 1
    if name in _PARTS or not re.search(r"\w|\|\||->", name):  # — numbers do not grow
        return sizes[0] if name in _PARTS else max(sizes)
    whole = sum(sizes[name in _MAPS :])
    place = _REPEATED.get(name, _REPEATED_LISTS.get(name, _LENGTHS.get(name, len(sizes))))
    if place >= len(sizes):
        return whole * _FACTORS.get(name, 1)
    argument, literal = sizes[place], _literal(parts[place])
    if name in _LENGTHS:
        return min(sizes[0], int(literal)) if literal.isdecimal() else sizes[0]
    if name in _REPEATED_LISTS and literal:
        return sizes[0] * (sizes[0] if ".." in literal else 1)
    if name == "replace" and (found := len(_literal(parts[1]))):
        return sizes[0] * max(1, argument / found)
    return whole + (whole - argument) * argument


def _size_of_lambda(
    part: Any,
    of: Any,
    size: float,
    scalar: Collection[str],
    known: Mapping[str, float],
    times: float,
) -> float:
    """The size of all values of a lambda for the elements of a list of this size.

    It is the largest for one long element or for as many elements as there can be.
    """
    is_written = of.get("function_name") == "list_value"
    count = max(1, min(size, len(_children(of)) if is_written else size))
    refs = [part["lhs"]] if "column_names" in part["lhs"] else _children(part["lhs"])
    names = [ref["column_names"][0].lower() for ref in refs]
    largest = 0.0
    for element, elements in ((size, 1.0), (size / count, count)):
        inner = {**known, **dict.fromkeys(names, max(1, element))}
        body = check_sizes(part["expr"], scalar, inner, times * elements)
        largest = max(largest, body * elements)
    return largest


def _literal(node: Any) -> str:
    """The text of a constant; "" of anything else."""
    return str(node.get("literal", {}).get("text", "")) if node.get("class") == "CONSTANT" else ""


def _children(node: Any) -> list[Any]:
    """The nodes right below a node. Of `text.lower()`, the first argument is in the path."""
    path = node.get("qualified_name", {}).get("path", [""])
    is_method = node.get("class") == "FUNCTION" and len(path) > 1
    found = [{"class": "COLUMN_REF", "column_names": path}] if is_method else []
    left = list(node.values())[::-1]
    while left:
        part = left.pop()
        if isinstance(part, dict) and "class" in part:
            found.append(part)
        elif isinstance(part, dict | list):
            left += [*(part.values() if isinstance(part, dict) else part)][::-1]
    return found
