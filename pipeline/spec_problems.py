"""What a validator finds wrong with a spec, as problems with a place, a fix and a value.

Knows pydantic's errors and what may be secret. Knows nothing of the spec's keys.
"""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import Problem
from pipeline.storage_options import masked


def problems_of(error: ValidationError) -> list[Problem]:
    """One for each cause."""
    details = error.errors()
    places = [".".join(str(part) for part in detail["loc"]) for detail in details]
    return [
        Problem(place or "spec", _fix(detail["msg"]), _value(detail))
        for place, detail in zip(places, details, strict=True)
        # A wrong element also makes its list "too short": say the cause, not the echo.
        if not (detail["type"] == "too_short" and any(p.startswith(f"{place}.") for p in places))
    ]


def _value(detail: ErrorDetails) -> object:
    """What stands at the place; a key that is missing has no value to show."""
    if "storage_options" in detail["loc"]:  # the names alone: a value may be a secret
        given = detail["input"]
        return sorted(given) if isinstance(given, dict) else type(given).__name__
    # — with its key: a misspelt place of a secret is still one
    key = str(detail["loc"][-1]) if detail["loc"] else ""
    shown = masked({key: detail["input"]})
    assert isinstance(shown, dict)
    return None if detail["type"] == "missing" else shown[key]


def _fix(message: str) -> str:
    known = {
        "Extra inputs are not permitted": "no such key; remove it or correct its spelling",
        "Field required": "missing; add it",
    }
    return known.get(message, message.removeprefix("Value error, "))
