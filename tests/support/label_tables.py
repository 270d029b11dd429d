"""Shards, and rows of label files from given probabilities, without an input or a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.label_rows import probability_columns, reading_columns
from pipeline.sources.shards import ObjectVersion, Piece, Shard


def toy_shard(
    start: int = 0,
    rows: int = 3,
    *,
    path: str = "/a.jsonl",
    etag: str = "etag",
    id: str | None = None,
) -> Shard:
    """These rows of a file that does not exist."""
    version = ObjectVersion(path, 10, etag, "jsonl", "text", id)
    return Shard(version, Piece(start, start + rows, 8, 0, 10))


def label_rows(
    p: NDArray[np.float32],  # [docs, labels]; a row of NaN is a document without an answer
    labels: Sequence[str],
    *,
    mass: NDArray[np.float32] | None = None,  # [docs]; NaN where there is none (default: a half)
    n_tokens: NDArray[np.integer] | None = None,  # [docs] (default: as the chunks)
    n_chunks: NDArray[np.integer] | None = None,  # [docs] (default: 1 with an answer, else 0)
    status: Sequence[str] | None = None,  # (default: `ok` with an answer, else `empty`)
) -> pa.StructArray:
    """[docs] rows with one probability for each label."""
    answered = ~np.isnan(p).any(axis=1)
    chunks = answered.astype(np.int16) if n_chunks is None else n_chunks
    masses = np.where(answered, 0.5, np.nan).astype(np.float32) if mass is None else mass
    statuses = ["ok" if each else "empty" for each in answered] if status is None else status
    assert len(statuses) == len(p), (len(statuses), len(p))
    tokens = chunks if n_tokens is None else n_tokens
    columns = probability_columns(p, labels) | reading_columns(masses, tokens, chunks, statuses)
    ordered = [columns[name] for name in ANSWER_COLUMNS]
    return pa.StructArray.from_arrays(ordered, names=ANSWER_COLUMNS)
