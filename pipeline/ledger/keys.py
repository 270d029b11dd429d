"""The key of every object below an output."""

from __future__ import annotations


def label_key(task: str, fp: str, sid: str, retry: int = 0) -> str:
    """Where a shard's labels for one version of a task are."""
    if retry:
        return f"retries/{task}/{fp}/{sid}/{retry:04d}.parquet"
    return f"labels/{task}/{fp}/{sid[:2]}/{sid}.parquet"


def documents_key(sid: str) -> str:
    """Where a shard's documents file is."""
    return f"documents/{sid}.parquet"


def spec_key(task: str, fp: str) -> str:
    """Where the words that a fingerprint stands for are."""
    return f"specs/{task}/{fp}.json"
