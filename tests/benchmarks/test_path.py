"""The list of functions that a document passes."""

from __future__ import annotations

from benchmarks.path import passed
from pipeline.hashes import canonical_json, short_hash


def test_the_functions_of_the_package_are_listed_once_in_the_order_of_their_first_calls() -> None:
    calls = passed(lambda: [short_hash(canonical_json({"a": number})) for number in range(3)])
    functions = [name for _, name in calls]
    assert functions.index("canonical_json") < functions.index("short_hash")
    assert {file for file, _ in calls} == {"pipeline/hashes.py"}
    short_hash(b"later")
    assert [name for _, name in calls] == functions
