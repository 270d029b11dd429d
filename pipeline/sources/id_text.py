"""The text of an id: equal for equal values, whichever format or type a file has them in.

Entry points: `plain_values` for a column of a table, `id_text` for a value, and `spellings` to find
the documents of gold labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types

# Below this, each whole number has a float of its own.
_EXACT = 2**53
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0+)?")


def plain_values(column: pa.Array) -> list[object]:  # [rows]
    """The values of a column: texts, numbers, booleans, lists and objects; None for null.

    A float32 has its few digits. Times are ISO 8601 with a space before the hour, in UTC with `Z`
    where the type has a zone. Durations are counts of their unit. Bytes are their text in UTF-8, or
    hex digits.
    """
    kind = column.type
    if types.is_dictionary(kind):
        return plain_values(column.dictionary_decode())
    if types.is_float16(kind) or types.is_float32(kind):
        return [None if text is None else float(text) for text in _cast(column, pa.string())]
    if types.is_temporal(kind) and not types.is_interval(kind):
        zone = "Z" if types.is_timestamp(kind) and kind.tz is not None else ""
        column = column.cast(pa.timestamp(kind.unit)) if zone else column
        texts = _cast(column, pa.string())
        return [None if text is None else text + zone for text in texts]
    values: list[object] = column.to_pylist()
    return [_bytes_text(value) if isinstance(value, bytes) else value for value in values]


def id_text(value: object) -> str:
    """An id as a string: a whole number as its digits, an object, a list or a boolean as JSON.

    Bytes of a text that is not UTF-8 are escaped, so that two ids stay different.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return str(int(value))
    if isinstance(value, Decimal):
        return str(int(value)) if value == int(value) else f"{value:f}"
    if isinstance(value, bool | dict | list):
        value = json.dumps(value, ensure_ascii=False, sort_keys=True, default=id_text)
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def spellings(keys: Iterable[str]) -> dict[str, str]:
    """The key of each text that may be the id of its document: itself, and a number as a float.

    Programs write the id 1 of a column with a missing value as 1.0.
    """
    keys = list(keys)
    numbers = {key: whole[1] for key in keys if (whole := _WHOLE.fullmatch(key)) is not None}
    others = {other: key for key, number in numbers.items() for other in (number, f"{number}.0")}
    return others | {key: key for key in keys}


def _cast(column: pa.Array, kind: pa.DataType) -> list[Any]:
    values: list[Any] = column.cast(kind).to_pylist()
    return values


def _bytes_text(data: bytes) -> str:
    with suppress(UnicodeDecodeError):
        if (text := data.decode("utf-8")).isprintable():  # — the bytes of a number may be UTF-8
            return text
    return data.hex()
