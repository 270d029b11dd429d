"""A spec with a finished output, and gold for some of its documents: fixture `bench`."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from calls import Assay, Printed
from finished import FILES, Corpus, finish

from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.spec.parse import load_spec, spec_of
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore

Row = dict[str, Any]
# As the spec has them, whose YAML is written in order; the label files have them otherwise, and
# columns are found by name.
LABELS = {"toxic": ("clean", "toxic"), "topic": ("art", "law", "sport")}


def with_gold(spec: JobSpec, **gold: Any) -> JobSpec:
    """The spec with these keys of `gold`."""
    return spec_of({**spec.model_dump(mode="json", exclude_defaults=True), "gold": gold})


def write_rows(path: Path, rows: Sequence[Row]) -> str:
    """Writes a file of gold in the format of its name; returns its path."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@dataclass(frozen=True)
class Bench:
    """A spec with a finished output, and gold for some of its documents."""

    spec: Path
    output: Path
    folder: Path
    documents: Sequence[Mapping[str, str]]
    finish_as: Callable[..., int]
    assay: Assay

    def gold(self, seed: int = 0) -> list[Row]:
        """60 documents of the corpus and 4 others; every fifth has no label for `topic`."""
        source = random.Random(seed)
        rows: list[Row] = []
        others = [{"id": f"other-{n}", "text": f"another text {n}"} for n in range(4)]
        for number, document in enumerate([*source.sample(self.documents, 60), *others]):
            topic = None if number % 5 == 0 else source.choice(LABELS["topic"])
            rows.append({**document, "toxic": source.choice(LABELS["toxic"]), "topic": topic})
        return rows

    def write(self, rows: Sequence[Row], name: str = "gold.jsonl") -> str:
        return write_rows(self.folder / name, rows)

    def set_keys(self, **keys: Any) -> None:
        """Writes these keys of the spec."""
        content = yaml.safe_load(self.spec.read_text())
        self.spec.write_text(yaml.safe_dump({**content, **keys}))

    def evaluate(self, gold: object, *options: object, code: int = 0) -> Printed:
        return self.assay("eval", self.spec, "--gold", gold, *options, code=code)

    def answers(self, task: str) -> dict[str, Row]:
        """The raw label files' rows by document, read with DuckDB."""
        rows = duckdb.sql(f"from '{self.output}/labels/{task}/*/*/*.parquet'").to_arrow_table()
        return {row["doc_id"]: row for row in rows.to_pylist()}


@pytest.fixture
def bench(write_spec: Callable[..., Path], tmp_path: Path, assay: Assay) -> Bench:
    cache = tmp_path / "cache"
    corpus = Corpus(tmp_path / "corpus", cache)
    corpus.write()

    def spec(**changes: Any) -> Path:
        return write_spec(input={"path": str(corpus.folder), "id": "id"}, **changes)

    def finish_as(**changes: Any) -> int:
        written = load_spec(spec(**changes))
        job = make_job(written, Placement("cpu", "float32", 1, 1), cache)
        store = LocalStore(Path(written.output))
        return finish(store, corpus.shards(store), job.fingerprints, written.name)

    assert finish_as() == 1
    files = [(corpus.folder / f"{n}.jsonl").read_text() for n in range(FILES)]
    lines = [line for file in files for line in file.splitlines()]
    documents = list(map(json.loads, lines))
    return Bench(spec(), tmp_path / "out", tmp_path, documents, finish_as, assay)
