"""Verification: an intact output passes, and each kind of damage that is planted is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from changing_corpus import Corpus as ChangingCorpus
from finished import (
    FILES,
    LABELS,
    ROWS,
    Corpus,
    read_parquet,
    rewrite,
    sealed_parquet,
    toy_fingerprints,
    write_files,
)

from pipeline.cli import main
from pipeline.integrity.verify import VerifyResult, verify
from pipeline.ledger.label_files import sealed_hash
from pipeline.ledger.snapshots import contents
from pipeline.sources.source import InputObject, find_objects
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

FP = {task: fingerprint.id for task, fingerprint in toy_fingerprints().items()}


@pytest.fixture
def look(toy_corpus: Corpus) -> Callable[[Store], VerifyResult]:
    return lambda store: verify(store, contents(store), toy_corpus.cache_dir, {})


Look = Callable[[Store], VerifyResult]


def accept(store: Store) -> None:
    """Writes into the snapshot the hashes that are there now, so that only the content shows it."""
    write_files(store, lambda file: sealed_hash(store.read(file["key"])) or file["hash"])


def edit(store: Store, key: str, changed: Callable[[pa.Table], pa.Table | bytes]) -> None:
    """Replaces a file by a changed one, as if assay itself had written and published it."""
    content = changed(read_parquet(store, key))
    rewrite(store, key, content if isinstance(content, bytes) else sealed_parquet(content))
    accept(store)


def swapped(table: pa.Table) -> pa.Table:
    """The rows, of which the first two have changed places."""
    return table.take([1, 0, *range(2, table.num_rows)])


def damages(verified: VerifyResult) -> list[tuple[str, str]]:
    return [(damage.key, damage.what) for damage in verified.damages]


def keys_of(store: Store, task: str = "toxic") -> list[str]:
    """The task's label files in the input's order."""
    return [shard.labels[task].key for shard in contents(store).shards]


def test_an_intact_output_is_found_intact_and_counted(finished: LocalStore, look: Look) -> None:
    shards = len(list(finished.list("documents/")))
    assert look(finished) == VerifyResult(
        output=finished.url,
        snapshot=1,
        spec="job",
        shards=shards,
        files=3 * shards,
        rows=ROWS * FILES,
        cells=2 * ROWS * FILES,
        documents_read_again=ROWS * FILES,
        inputs_changed=0,
        damages=(),
    )


def test_each_input_file_is_looked_up_once_however_many_shards_it_has(
    finished: LocalStore, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []

    def find(path: str, **options: Any) -> list[InputObject]:
        looked_up.append(path)
        return find_objects(path, **options)

    monkeypatch.setattr("pipeline.integrity.verify.find_objects", find)
    shards = contents(finished).shards
    assert look(finished).documents_read_again == ROWS * FILES and len(shards) > 2 * FILES
    assert sorted(looked_up) == sorted({shard.path for shard in shards})


CHANGED = "its content was changed after it was written"


OTHER = {"assay.task": "topic", "assay.fp": "f" * 16, "assay.shard": "{}"}
NOT_READ = "does not exist in schema"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (swapped, ["doc_id is not in the order of ", "differs in row 0 and 1 more"]),
        (lambda table: table.slice(1), ["has {less} rows"]),
        (lambda table: pa.table({"doc_id": ["x"]}), [NOT_READ]),
        (lambda table: b"PAR1", [CHANGED]),
        (
            lambda table: table.replace_schema_metadata(OTHER),
            [f"its metadata has {name}" for name in ("task 'topic'", "fp 'ffff", "shard None")],
        ),
    ],
    ids=["another order", "a lost row", "other columns", "no parquet", "another version"],
)
def test_a_label_file_with_other_content_is_named_with_what_is_wrong(
    finished: LocalStore, look: Look, change: Callable[[pa.Table], Any], parts: list[str]
) -> None:
    key = keys_of(finished)[0]
    rows = read_parquet(finished, key).num_rows
    edit(finished, key, change)
    result = damages(look(finished))
    assert {named for named, _ in result} == {key}
    for part in parts:
        assert part.format(less=rows - 1) in "; ".join(reason for _, reason in result)


def test_all_files_of_a_shard_in_another_order_are_caught_by_the_input(
    finished: LocalStore, look: Look
) -> None:
    shard = next(iter(contents(finished).shards))
    for file in (shard.documents, *shard.labels.values()):
        edit(finished, file.key, swapped)
    result = damages(look(finished))
    assert [named for named, _ in result] == [shard.documents.key] * 2
    assert all(f"differs from {shard.path}, from row 0" in reason for _, reason in result)


def test_inputs_that_changed_or_are_gone_are_counted_and_not_failed(
    finished: LocalStore, toy_corpus: Corpus, look: Look
) -> None:
    toy_corpus.write_file(0, seed=4)
    (toy_corpus.folder / "1.jsonl").unlink()
    result = look(finished)
    assert (result.intact, result.inputs_changed, result.documents_read_again) == (True, 2, ROWS)
    for path in toy_corpus.folder.iterdir():
        path.unlink()
    toy_corpus.folder.rmdir()
    result = look(finished)
    assert (result.intact, result.inputs_changed, result.documents_read_again) == (True, FILES, 0)


def test_a_file_whose_quotes_are_read_as_the_spec_says_is_no_other_file(
    plain: ChangingCorpus,
) -> None:
    rows = ["id\ttext", *(f'{number}\t"the ""text"" {number}"' for number in range(20))]
    (plain.input / "one.tsv").write_text("\n".join(rows) + "\n")
    plain.settings = {"input": {"path": str(plain.input), "id": "id", "quoted": True}}
    plain.run()
    verified = verify(plain.store, contents(plain.store), plain.cache, {})
    assert (verified.inputs_changed, verified.documents_read_again) == (0, 20)


def test_texts_around_the_output_are_read_again(plain: ChangingCorpus, tmp_path: Path) -> None:
    plain.settings, plain.cache = {"input": {"path": str(plain.folder)}}, tmp_path
    for number in range(3):
        (plain.folder / f"{number}.txt").write_text(f"Text {number}.")
    plain.run()
    assert plain.store.root.is_relative_to(plain.folder)
    verified = verify(plain.store, contents(plain.store), plain.cache, {})
    assert (verified.inputs_changed, verified.documents_read_again) == (0, 3)


def test_shards_are_taken_in_windows(
    finished: LocalStore, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = look(finished)
    monkeypatch.setattr("pipeline.integrity.verify.WINDOW_SHARDS", 1)
    assert look(finished) == whole


def test_the_command_prints_the_damages_and_fails(
    finished: LocalStore,
    toy_corpus: Corpus,
    write_spec: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(toy_corpus.cache_dir))
    spec = str(write_spec(input={"path": str(toy_corpus.folder)}, output=str(finished.root)))
    assert main(["verify", spec]) == 0
    assert "intact" in capsys.readouterr().out
    key = keys_of(finished)[0]
    finished.delete([key])
    assert main(["verify", spec]) == 1
    assert (
        f"{key}: cannot be read: No such file or directory; restore it" in capsys.readouterr().out
    )
    assert main(["verify", spec, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["intact"] is False and [d["key"] for d in result["damages"]] == [key]
    assert (result["rows"], result["cells"]) == (ROWS * FILES, len(LABELS) * ROWS * FILES)
