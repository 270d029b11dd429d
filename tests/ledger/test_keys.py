"""The keys of an output: what is built is parsed back, and nothing else is taken for a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ledger.keys import (
    Key,
    certificate_key,
    cuts_key,
    documents_key,
    fitted_key,
    label_folders,
    label_key,
    manifest_key,
    parse_key,
    snapshot_key,
    spec_key,
)
from pipeline.stores.store import PROBE_KEY

FP, SID = "0f" * 8, "ab" * 16
TASKS = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)
FPS = st.text("0123456789abcdef", min_size=16, max_size=16)
SIDS = st.text("0123456789abcdef", min_size=32, max_size=32)
NUMBERS = st.integers(1, 10**9)


def test_keys_have_the_form_of_the_output_format() -> None:
    assert spec_key("toxic", FP) == f"specs/toxic/{FP}.json"
    assert documents_key(SID) == f"documents/{SID}.parquet"
    assert label_key("toxic", FP, SID) == f"labels/toxic/{FP}/ab/{SID}.parquet"
    assert label_key("toxic", FP, SID, 2) == f"retries/toxic/{FP}/{SID}/0002.parquet"
    assert cuts_key(3) == "inputs/00000003.parquet"
    assert snapshot_key(42) == "snapshots/00000042.json"
    assert manifest_key(42) == "snapshots/00000042.parquet"


@given(TASKS, FPS, SIDS, NUMBERS)
def test_a_key_that_was_built_is_parsed_into_its_parts(
    task: str, fp: str, sid: str, number: int
) -> None:
    labels, retries = label_folders(task, fp)
    label, retry = label_key(task, fp, sid), label_key(task, fp, sid, number)
    assert label.startswith(labels) and retry.startswith(retries)
    assert parse_key(label) == Key("labels/", task, fp, sid)
    assert parse_key(retry) == Key("retries/", task, fp, sid, number)
    assert parse_key(spec_key(task, fp)) == Key("specs/", task, fp)
    assert parse_key(documents_key(sid)) == Key("documents/", sid=sid)
    assert parse_key(cuts_key(number)) == Key("inputs/", number=number)
    assert parse_key(snapshot_key(number)) == Key("snapshots/", number=number)
    assert parse_key(manifest_key(number)) == Key("snapshots/", number=number)
    assert parse_key(certificate_key(task, number)) == Key("cascades/", task, number=number)
    for readout in (fitted_key(task, fp), fitted_key(task, fp, "a label")):
        assert parse_key(readout) == Key("cascades/", task, fp)


def test_the_probe_of_conditional_create_is_below_attempts() -> None:
    assert parse_key(PROBE_KEY) == Key("attempts/")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "README",
        "other/00000001.json",
        f"documents/{SID}.parquet.copy",
        f"documents/{SID[:-1]}.parquet",
        f"labels/toxic/{FP}/cd/{SID}.parquet",
        f"labels/toxic/{FP}/{SID}.parquet",
        f"labels/Toxic/{FP}/ab/{SID}.parquet",
        f"labels/toxic/{FP}0/ab/{SID}.parquet",
        f"documents/{SID}.{FP}.parquet",
        f"labels/toxic/{FP}/ab/{SID}.{FP}.parquet",
        f"retries/toxic/{FP}/{SID}.{FP}/0001.parquet",
        f"labels/toxic/{FP}/ab/{SID}..parquet",
        f"labels/toxic/{FP}/ab/{SID}.{FP[1:]}.parquet",
        f"labels/toxic/{FP}/ab/{SID}.{FP}.{FP}.parquet",
        f"retries/toxic/{FP}/{SID}./0001.parquet",
        f"retries/toxic/{FP}/{SID}/0000.parquet",
        f"retries/toxic/{FP}/{SID}/00001.parquet",
        f"retries/toxic/{FP}/{SID}/1.parquet",
        f"specs/toxic/{FP}.yaml",
        "snapshots/00000000.json",
        "snapshots/000000001.json",
        "snapshots/1.json",
        "inputs/00000001.parquet~",
        "attempts/",
    ],
)
def test_a_key_that_no_function_builds_is_not_assays(key: str) -> None:
    assert parse_key(key) is None
