from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import SpecError
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer
from pipeline.runtime.assembly import DocumentReader
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import Columns, JobSpec
from pipeline.verbs import check
from pipeline.verbs.check import take_samples

Written = tuple[list[Shard], DocumentReader, JobSpec]


@pytest.fixture
def written(write_spec: Callable[..., Path], tmp_path: Path) -> Callable[[list[object]], Written]:
    """Shards of two rows each, with the spec's tokenizer and the spec."""

    def write(texts: list[object]) -> Written:
        corpus = tmp_path / "few.jsonl"
        rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
        corpus.write_text("\n".join(rows) + "\n")
        spec = load_spec(write_spec(input={"path": str(corpus), "id": "id"}))
        objects = find_objects(str(corpus), tmp_path / "cache")
        shards = [s for o in objects for s in cut(o, Columns("text", "id"), 2 * len(rows[0]))]
        tokenizer = load_tokenizer(Path(spec.model.path))
        return shards, DocumentReader(DocumentTokenizer(tokenizer), spec.documents), spec

    return write


def test_samples_are_spread_over_the_shards(written: Callable[[list[object]], Written]) -> None:
    shards, reader, spec = written([f"text {i}" for i in range(8)])
    ids = [sample.doc_id for sample in take_samples(shards, reader, spec, 4)]
    assert len(shards) >= 4 and len(set(ids)) == 4 and ids[0] == "d0"
    assert int(ids[-1][1:]) >= 4


def test_no_shard_is_opened_once_there_are_enough(
    written: Callable[[list[object]], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, reader, spec = written([f"text {i}" for i in range(20)])
    opened: list[Shard] = []

    def read(shard: Shard, options: Options) -> Iterator[pa.Table]:
        opened.append(shard)
        return read_documents(shard, options)

    monkeypatch.setattr(check, "read_documents", read)
    assert len(take_samples(shards, reader, spec, 3)) == 3 < len(shards)
    assert len(opened) == 3
    assert take_samples(shards, reader, spec, 0) == [] and len(opened) == 3


def test_documents_that_cannot_be_read_are_passed_over(
    written: Callable[[list[object]], Written],
) -> None:
    shards, reader, spec = written([None, "", "a", "  ", 7, "b", None, None])
    ids = [sample.doc_id for sample in take_samples(shards, reader, spec, 4)]
    assert sorted(ids) == ["d2", "d5"]


def test_a_corpus_without_any_text_is_named_by_its_column(
    written: Callable[[list[object]], Written],
) -> None:
    shards, reader, spec = written([None, ""])
    with pytest.raises(SpecError, match=r"no document has readable text .*first row: no text"):
        take_samples(shards, reader, spec, 4)
