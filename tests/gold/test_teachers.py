"""Gold from another run's answers: its rows are read a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from filtered import labelled, spec_of

from pipeline.gold.labels import read_gold
from pipeline.ledger.dataset import LabelDataset, open_labels


def test_the_answers_of_an_output_are_read_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(tmp_path, ["en"])
    output, spec, count = str(tmp_path / "out"), spec_of(tmp_path, keep="true"), 40
    rows = open_labels(output).to_table()
    held_bytes = list[int]()

    def batches(_own: LabelDataset, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for number in range(count):
            of_batch = rows.select(columns).combine_chunks()
            hashes = pa.array([f"{number}-{row}" for row in range(rows.num_rows)])
            place = columns.index("content_hash")
            [batch] = of_batch.set_column(place, "content_hash", hashes).to_batches()
            held_bytes.append(pa.total_allocated_bytes())
            yield batch

    monkeypatch.setattr(LabelDataset, "to_batches", batches)
    gold = read_gold(output, spec)
    answered = rows["toxic"].combine_chunks().field("label").drop_null()
    assert gold.rows == count * len(answered)
    toxic = gold.tasks["toxic"]
    assert [toxic.labels[at] for at in toxic.truth] == answered.to_pylist() * count
    assert toxic.soft is not None
    np.testing.assert_array_equal(toxic.soft.argmax(axis=1), toxic.truth)
    assert max(held_bytes[2:]) - held_bytes[1] < rows.nbytes
