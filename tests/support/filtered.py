"""A labelled corpus with languages, and what a filter of it wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
from finished import Corpus, finish_folder, toy_spec

from pipeline.filters.result import FilterResult
from pipeline.filters.run import filter_corpus, preview
from pipeline.ledger.dataset import open_labels
from pipeline.options import FilterOptions
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

ANSWERED = "toxic.status = 'ok' and topic.status = 'ok'"
SCORE = "toxic.p.toxic"


def labelled(folder: Path, languages: Sequence[str | None]) -> Path:
    """Three files of thirty documents with a language each, labelled; one is in a subfolder."""
    corpus = Corpus(folder / "in", folder / "cache")
    corpus.write()
    for file in list(corpus.folder.glob("*.jsonl")):
        chosen = random.Random(file.name)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [json.dumps(row | {"lang": chosen.choice(languages)}) for row in rows]
        file.write_text("".join(f"{line}\n" for line in lines))
    (corpus.folder / "deep").mkdir()
    (corpus.folder / "1.jsonl").rename(corpus.folder / "deep" / "1.jsonl")
    finish_folder(folder)
    return folder


def content_of(folder: Path, **rule: Any) -> dict[str, Any]:
    return toy_spec(folder, filter={"on_error": "drop", **rule})


def spec_of(folder: Path, **rule: Any) -> JobSpec:
    return parse_spec(json.dumps(content_of(folder, **rule)))


def filtered_with(folder: Path, to: str = "to", **rule: Any) -> FilterResult:
    options = FilterOptions(str(folder / to))
    return filter_corpus(spec_of(folder, **rule), options, cache_dir=folder / "cache")


def previewed(folder: Path, **rule: Any) -> FilterResult:
    options = FilterOptions(dry_run=True)
    return preview(spec_of(folder, **rule), options, cache_dir=folder / "cache")


def command_of(folder: Path, **rule: Any) -> list[str]:
    """The beginning of `assay filter` with a spec that has this rule."""
    (folder / "spec.yaml").write_text(json.dumps(content_of(folder, **rule)))
    return ["filter", str(folder / "spec.yaml")]


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query over the labels, with the language as `lang` and as `doc.lang`."""
    columns = "columns = {id: 'varchar', lang: 'varchar'}"
    with duckdb.connect() as database:
        database.register("answers", open_labels(str(folder / "out")).to_table())
        database.sql(
            f"""create view labels as select answers.*, lang, {{lang: lang}} as doc
            from answers join read_json('{folder}/in/**/*.jsonl', {columns}) on id = doc_id"""
        )
        return database.sql(sql).fetchall()


def ids(folder: Path, condition: str) -> set[str]:
    """The documents for which a condition is true."""
    return {id for (id,) in query(folder, f"select doc_id from labels where {condition}")}


def dropped(filtered: FilterResult) -> dict[str, str]:
    assert filtered.written is not None
    [files] = filtered.written.dropped.globs
    return dict(duckdb.sql(f"select doc_id, _dropped_by from '{files}'").fetchall())


def kept(filtered: FilterResult) -> set[str]:
    files = kept_folder(filtered).rglob("*.jsonl")
    return {json.loads(line)["id"] for file in files for line in file.read_text().splitlines()}


def kept_folder(filtered: FilterResult) -> Path:
    assert filtered.written is not None
    return Path(filtered.written.kept.folder)
