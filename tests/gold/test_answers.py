"""Which documents of an output the rows of gold are."""

from __future__ import annotations

import json
from pathlib import Path

from finished import Corpus, finish, toy_fingerprints, toy_spec

from pipeline.gold.answers import answers_for
from pipeline.ledger.snapshots import contents
from pipeline.spec.parse import spec_of
from pipeline.stores.store import open_store


def test_an_id_finds_its_document_also_where_another_program_spelled_it(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.folder.mkdir()
    ids = [1, 2, 2.5, "3.0"]
    rows = [{"id": own, "text": f"text {own}"} for own in ids]
    (corpus.folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(toy_spec(tmp_path))
    store = open_store(spec.output, {})
    number = finish(store, corpus.shards(store), toy_fingerprints())
    gold = ["1.0", "2", "2.5", "3", "4.0"]
    answers = answers_for(spec, contents(store, number), "doc_id", gold, ["toxic"])
    assert answers.doc_ids.tolist() == ["1", "2", "2.5", "3.0", None]
    assert answers.in_corpus.tolist() == [True] * 4 + [False]
