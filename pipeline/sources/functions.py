"""The functions, operators and types that a condition may use. Entry point: `refusal`.

DuckDB bounds neither the time nor the memory of a function, and some functions read a clock, a
file or a random number. Those below depend on their arguments alone. A value is at most as long as
the columns and the constants that the condition names for it, times `2 ** MOST_DOUBLINGS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from pipeline.errors import listed

_FUNCTIONS = {
    # their arguments after the first must be constants: patterns, formats and paths
    "pattern": """regexp_extract regexp_extract_all regexp_replace regexp_split_to_array
        str_split_regex string_split_regex replace translate strftime strptime try_strptime""",
    "json": """-> ->> json_array_length json_contains json_exists json_extract json_extract_path
        json_extract_path_text json_extract_string json_keys json_type json_valid json_value""",
    # they make a list, whose text may be several times as long, as with escaped quotes
    "list": """list_value regexp_extract_all regexp_split_to_array split str_split str_split_regex
        string_split string_split_regex string_to_array json_keys list_cat list_concat array_cat
        array_concat list_append array_append list_prepend array_prepend""",
    "text": """|| ~~ !~~ ~~* !~~* ~~~ ^@ like_escape not_like_escape ilike_escape not_ilike_escape
        ascii bit_length char_length character_length chr concat contains ends_with instr lcase
        left length lower ltrim md5 nfc_normalize octet_length ord position prefix
        regexp_full_match regexp_matches reverse right rtrim sha1 sha256 split_part starts_with
        strip_accents strlen strpos substr substring suffix trim ucase unicode upper""",
    "number": """+ - * / // % ** ^ & | ~ << >> @ abs add cbrt ceil ceiling divide even exp floor
        fmod isfinite isinf isnan ln log log10 log2 mod multiply pi pow power round round_even
        sign sqrt subtract trunc xor""",
    "time": """age century date_add date_diff date_part date_sub date_trunc datediff datepart
        datesub datetrunc day dayname dayofmonth dayofweek dayofyear decade epoch epoch_ms epoch_ns
        epoch_us era hour isodow isoyear last_day make_date make_time make_timestamp microsecond
        millisecond minute month monthname quarter second time_bucket timezone to_centuries
        to_days to_decades to_hours to_microseconds to_milliseconds to_minutes to_months
        to_quarters to_seconds to_timestamp to_weeks to_years week weekday weekofyear year
        yearweek""",
    "of lists": """&& @> <@ array_contains array_distinct array_extract array_has array_has_all
        array_has_any array_indexof array_length array_position array_slice array_sort
        array_unique cardinality element_at len list_any_value list_avg list_bool_and list_bool_or
        list_contains list_count list_distinct list_element list_extract list_first list_has
        list_has_all list_has_any list_indexof list_intersect list_last list_max list_median
        list_min list_mode list_position list_reverse list_slice list_sort list_sum list_unique
        map_contains map_extract map_extract_value map_keys map_values struct_extract""",
    "of any": "greatest if ifnull least nullif typeof",
}
_OF = {kind: frozenset(names.split()) for kind, names in _FUNCTIONS.items()}
ALLOWED = frozenset[str]().union(*_OF.values())
_TYPES = {
    "text": "bpchar char nvarchar string text varchar",
    "number": """bigint bool boolean dec decimal double float float4 float8 hugeint int int1 int128
        int16 int2 int32 int4 int64 int8 integer integral logical long numeric real short signed
        smallint tinyint ubigint uhugeint uint128 uint16 uint32 uint64 uint8 uinteger usmallint
        utinyint uuid""",
    "time": """date datetime interval time timestamp timestamptz timestamp_ms timestamp_ns
        timestamp_s""",
}
_TYPES_OF = {kind: frozenset(names.split()) for kind, names in _TYPES.items()}
# The classes of nodes in DuckDB's parse tree that have no name, and have no effect beyond their
# value.
_CLASSES = frozenset(
    {"BETWEEN", "CASE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "OPERATOR", "TYPE"}
)
# `regexp_replace` may write a character between any two.
MOST_DOUBLINGS = 5
_ONE_DOCUMENT = "write a condition on the columns of one document"


def refusal(tree: Any) -> str | None:
    """Why a parse tree of DuckDB is no condition, and what to write; None if it is one."""
    doublings = 0
    for node in nodes_of(tree):
        kind = node.get("class", "TYPE")
        name, arguments = str(node.get("function_name", "")).lower(), _arguments(node)
        if kind == "LAMBDA" and node["syntax_type"] == "SINGLE_ARROW":
            kind, name, arguments = "FUNCTION", "->", [node["lhs"], node["expr"]]
        if kind == "FUNCTION":
            reason = _refused_call(name, arguments, node)
            doublings += name == "regexp_replace"
        elif kind == "CAST":
            reason = _refused_cast(node)
        else:
            reason = None if kind in _CLASSES else f"has a {kind.lower()}; {_ONE_DOCUMENT}"
        if reason is not None:
            return reason
    if doublings > MOST_DOUBLINGS:
        return f"calls regexp_replace {doublings} times; call it at most {MOST_DOUBLINGS} times"
    return None


def nodes_of(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a parse tree, an object before those inside it, in their order."""
    left = [tree]  # — no recursion, because a rule may be a thousand levels deep
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        if isinstance(part, dict | list):
            left += reversed([*part.values()] if isinstance(part, dict) else part)


def _arguments(node: Any) -> list[Any]:
    return [argument["expression"] for argument in node.get("arguments", ())]


def _refused_call(name: str, arguments: list[Any], node: Any) -> str | None:
    if name not in ALLOWED:
        similar = get_close_matches(name, ALLOWED, n=3, cutoff=0.7)
        hint = f"similar ones are {listed(similar)}" if similar else "docs/filtering.md lists them"
        return f"{name} is not a function that a condition may use; {hint}"
    path = node.get("qualified_name", {}).get("path", [])
    if len(path) > 1:
        return f"calls {'.'.join(path)}; write {name}(...)"
    if name == "age" and len(arguments) == 1:
        return "age of one time reads the clock; give it two times"
    is_json = name in _OF["json"]
    if is_json or name in _OF["pattern"]:
        values = [_constant(argument) for argument in arguments[1:]]
        constants = [value for value in values if value is not None]
        if len(constants) < len(values):
            return f"{name} needs constants after its first argument"
        if is_json and any("*" in path or ".." in path for path in constants):
            return f"{name} needs a path to one value; write it without * and .."
        most = {"replace": len("".join(constants[:1]).encode()), "regexp_replace": 1}.get(name)
        if most is not None and len("".join(constants[1:2]).encode()) > most:
            return f"{name} may make a text longer; write at most {most} bytes in place"
    return _refused_text(name, arguments) if is_json or name in ("||", "concat") else None


def _constant(node: Any) -> str | None:
    """The text of a constant; None of anything else."""
    return str(node["literal"].get("text", "")) if node.get("class") == "CONSTANT" else None


def _refused_cast(node: Any) -> str | None:
    name = str(node["type_expr"].get("type_name", "")).lower()
    if not any(name.removesuffix(" with time zone") in names for names in _TYPES_OF.values()):
        return f"casts to {name}; cast to a number, a text, a time or a boolean"
    return (
        _refused_text(f"a cast to {name}", [node["child"]]) if name in _TYPES_OF["text"] else None
    )


def _refused_text(name: str, arguments: Iterable[Any]) -> str | None:
    """The reason if a text is made of a list that the condition makes, and not only constants."""
    for node in (node for argument in arguments for node in nodes_of(argument)):
        made = str(node.get("function_name", "")).lower()
        if made in _OF["list"] and not all(_constant(a) is not None for a in _arguments(node)):
            return f"{name} makes a text of what {made} gives; compare the list's values instead"
    return None
