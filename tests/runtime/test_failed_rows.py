"""Documents that kill their worker, and a limit on rows that fail, by the command itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from changing_corpus import TOPIC, Corpus
from command import COMMANDS
from command import assay as run_assay

from pipeline.ledger.snapshots import snapshot_numbers

# A death, and an error, which `test_deadly_inputs` has without Ray.
FAULTS = ["document a-7=die", pytest.param("document a-7=fail", marks=pytest.mark.slow)]
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
