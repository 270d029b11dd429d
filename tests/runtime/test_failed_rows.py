"""Documents that kill their worker, rows that fail, and a limit on them, by the command itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from changing_corpus import TOPIC, Corpus
from command import COMMANDS
from command import assay as run_assay

from pipeline.ledger.snapshots import snapshot_numbers

FAULTS = ["document a-7=die", "document a-7=fail"]  # a death, and an error
DOCUMENTS = 40


@pytest.fixture
def corpus(modelled: Corpus) -> Corpus:
    modelled.others, modelled.shard_bytes = [TOPIC], 15_000
    texts = [f"Text {number} says hello. " * (1 + number % 5) for number in range(DOCUMENTS)]
    modelled.write("a", texts)
    return modelled


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_that_kills_its_worker_is_set_aside_counted_and_tried_again(
    command: Sequence[str], fault: str, corpus: Corpus
) -> None:
    assay = partial(run_assay, command=command)
    code, result, errors = assay(corpus.spec_file, fault=fault)
    assert code == 0, errors
    assert result["status"] == {"ok": DOCUMENTS - 1, "quarantined": 1}
    first = corpus.rows()
    assert [name for name, row in first.items() if row["status"] != "ok"] == ["a-7"]
    assert first["a-7"]["label"] is first["a-7"]["p"] is None
    attempts = (corpus.store.root / "attempts").rglob("*-*-*")
    assert not [file for file in attempts if "probe" not in file.name]

    corpus.settings = {"max_error_rate": 0.02}
    code, result, errors = assay(corpus.spec_file)
    assert code == 1 and result == {}
    assert errors.splitlines()[-1].startswith(
        "assay: 1 of 40 rows failed, more than max_error_rate"
    )
    assert snapshot_numbers(corpus.store) == [1]

    code, result, errors = assay(corpus.spec_file, "--retry-failed")
    assert code == 0, errors
    assert (result["documents_read_by_model"], result["objects_created"]) == (1, 2)
    assert result["snapshot"] == 2
    second = corpus.rows()
    assert second["a-7"]["status"] == "ok" and sum(second["a-7"]["p"].values()) > 0.999
    assert all(second[name] == row for name, row in first.items() if name != "a-7")
    corpus.settings = {}
    code, result, errors = assay(corpus.spec_file, "--retry-failed")
    assert code == 0 and result["documents_read_by_model"] == 0 and result["snapshot"] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_above_its_limit_stops_and_unreadable_rows_count(
    command: Sequence[str], corpus: Corpus
) -> None:
    assay = partial(run_assay, command=command)
    lines = (corpus.input / "a.jsonl").read_text().splitlines()
    lines[3] = lines[30] = '{"id": "broken'
    (corpus.input / "a.jsonl").write_text("\n".join(lines))
    corpus.settings = {"max_error_rate": 0.04}
    code, _, errors = assay(corpus.spec_file, "--publish-partial")
    assert code == 1
    assert "2 of 40 rows failed" in errors and "error:not JSON 2" in errors
    assert "Traceback" not in errors
    assert not [*corpus.store.list("snapshots/")]
    corpus.settings = {"max_error_rate": 0.05}
    code, result, errors = assay(corpus.spec_file)
    assert code == 0, errors
    assert result["documents_labelled"] == 0 and result["snapshot"] == 1
    corpus.settings = {}
    code, result, _ = assay(corpus.spec_file, "--retry-failed")
    assert code == 0 and result["objects_created"] == 0  # what cannot be read stays so
