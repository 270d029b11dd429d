"""The keys of all objects of an output. Entry points: the `*_key` functions and `parse_key`.

    specs/<task>/<fp>.json                       what a task's fingerprint was computed from
    documents/<sid>.parquet                      one file per shard: ids, hashes, status
    labels/<task>/<fp>/<sid[:2]>/<sid>.parquet   one file per shard and task
    retries/<task>/<fp>/<sid>/<0001>.parquet     the same rows with the failed ones tried again
    inputs/<00000001>.parquet                    how input files were cut into shards
    index/<00000001>.parquet                     which shards have a text, by its hash
    counts/<00000001>.parquet                    counts of finished files
    snapshots/<00000001>.json                    a consistent view; the highest number is current
    snapshots/<00000001>.parquet                 its files
    cascades/<task>/<00000001>.json              a certificate: what a run proved about a cascade
    cascades/<task>/<hash>.safetensors           a readout that a run fitted; of several labels
    cascades/<task>/<hash>/<label>.safetensors   a file for each
    attempts/<hash of fps>/<sid>/...             work that has started and not finished
    attempts/in-use/...                          a run is active

`sid` is a shard's id, `fp` a task's fingerprint.

Law: `parse_key` accepts exactly the keys that these functions build, so an object with any other
key was not written by assay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.spec.labels import part_file
from pipeline.stores.store import ATTEMPTS

SPECS = "specs/"
DOCUMENTS = "documents/"
LABELS = "labels/"
RETRIES = "retries/"
INPUTS = "inputs/"
INDEX = "index/"
COUNTS = "counts/"
SNAPSHOTS = "snapshots/"
CASCADES = "cascades/"

_TASK, _FP, _SID = r"(?P<task>[a-z][a-z0-9_]*)", r"(?P<fp>[0-9a-f]{16})", r"(?P<sid>[0-9a-f]{32})"
_NUMBER_8 = r"(?P<number>(?!0+\.)(?:\d{8}|[1-9]\d{8,}))"
_NUMBER_4 = r"(?P<number>(?!0+\.)(?:\d{4}|[1-9]\d{4,}))"
_PATTERNS = {
    SPECS: re.compile(rf"{SPECS}{_TASK}/{_FP}\.json"),
    DOCUMENTS: re.compile(rf"{DOCUMENTS}{_SID}\.parquet"),
    LABELS: re.compile(rf"{LABELS}{_TASK}/{_FP}/(?P<first>..)/(?=(?P=first)){_SID}\.parquet"),
    RETRIES: re.compile(rf"{RETRIES}{_TASK}/{_FP}/{_SID}/{_NUMBER_4}\.parquet"),
    INPUTS: re.compile(rf"{INPUTS}{_NUMBER_8}\.parquet"),
    INDEX: re.compile(rf"{INDEX}{_NUMBER_8}\.parquet"),
    COUNTS: re.compile(rf"{COUNTS}{_NUMBER_8}\.parquet"),
    SNAPSHOTS: re.compile(rf"{SNAPSHOTS}{_NUMBER_8}\.(?:json|parquet)"),
    CASCADES: re.compile(rf"{CASCADES}{_TASK}/(?:{_NUMBER_8}\.json|{_FP}(?:/[^/]+)?\.safetensors)"),
    ATTEMPTS: re.compile(rf"{ATTEMPTS}.+"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """The parts of a key; a part that keys of this folder do not have is empty."""

    folder: str  # the first part with its slash: "labels/"
    task: str = ""
    fp: str = ""
    sid: str = ""
    number: int = 0  # of a retry, an entry of a log, an index object or a snapshot


def parse_key(key: str) -> Key | None:
    """The parts of the key, or None if no version of assay writes it."""
    folder = key.partition("/")[0] + "/"
    pattern = _PATTERNS.get(folder)
    match = pattern.fullmatch(key) if pattern else None
    if match is None:
        return None
    parts: dict[str, Any] = match.groupdict("")
    parts.pop("first", None)
    return Key(folder, **{**parts, "number": int(parts.get("number") or 0)})


def spec_key(task: str, fp: str) -> str:
    """The file with the content of a task's fingerprint."""
    return f"{SPECS}{task}/{fp}.json"


def documents_key(sid: str) -> str:
    """The documents file of a shard."""
    return f"{DOCUMENTS}{sid}.parquet"


def label_key(task: str, fp: str, sid: str, retry: int = 0) -> str:
    """The label file of a shard for one version of a task; with `retry`, that retry's file."""
    if retry:
        return f"{RETRIES}{task}/{fp}/{sid}/{retry:04d}.parquet"
    return f"{LABELS}{task}/{fp}/{sid[:2]}/{sid}.parquet"


def label_folders(task: str, fp: str) -> tuple[str, str]:
    """The prefixes of all label files of one version of a task, and of all its retries."""
    return f"{LABELS}{task}/{fp}/", f"{RETRIES}{task}/{fp}/"


def _table_key(folder: str, number: int) -> str:
    return f"{folder}{number:08d}.parquet"


cuts_key = partial(_table_key, INPUTS)  # an entry of the log of how input files were cut
index_key = partial(_table_key, INDEX)  # an object of the index of texts
counts_key = partial(_table_key, COUNTS)  # an entry of the log of counts
manifest_key = partial(_table_key, SNAPSHOTS)  # the files that the snapshot of this number names


def snapshot_key(number: int) -> str:
    """The snapshot with this number."""
    return f"{SNAPSHOTS}{number:08d}.json"


def certificate_key(task: str, number: int) -> str:
    """The certificate of a task's cascade with this number."""
    return f"{CASCADES}{task}/{number:08d}.json"


def fitted_key(task: str, digest: str, label: str = "") -> str:
    """A readout that a run fitted for a task, or for a label of a task of kind `multi`."""
    folder = f"{CASCADES}{task}/{digest}"
    return part_file(folder, label) if label else f"{folder}.safetensors"
