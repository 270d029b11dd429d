"""Which documents of an output the rows of gold are."""

from __future__ import annotations

import json
from pathlib import Path

from finished import finish_folder, toy_spec

from pipeline.gold.answers import answers_for
from pipeline.ledger.snapshots import contents
from pipeline.spec.parse import spec_of
from pipeline.stores.store import open_store


def test_an_id_finds_its_document_also_where_another_program_spelled_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    ids = [1, 2, 2.5, "3.0"]
    rows = [{"id": own, "text": f"text {own}"} for own in ids]
    (tmp_path / "in" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(toy_spec(tmp_path))
    number, store = finish_folder(tmp_path), open_store(spec.output, {})
    gold = ["1.0", "2", "2.5", "3", "4.0"]
    answers = answers_for(spec, contents(store, number), "doc_id", gold, ["toxic"])
    assert answers.doc_ids.tolist() == ["1", "2", "2.5", "3.0", None]
    assert answers.in_corpus.tolist() == [True] * 4 + [False]
