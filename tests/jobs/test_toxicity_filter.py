"""The demo's corpus, filtered by the job's own rule; answers are seeded, and DuckDB reads all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.toxicity_filter import main as job
from pipeline.cli import main as assay
from pipeline.ledger.cells import committed, record_specs
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.label_rows import label_table
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.sources.source import find_objects, read_documents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

SPEC = Path(__file__).parents[2] / "jobs" / "specs" / "toxicity_filter.yaml"
PARTS = Path(__file__).parents[2] / "jobs" / "corpus" / "parts"
LABELS = ("toxic", "clean")


def label(store: LocalStore, cache: Path) -> None:
    """Answers as a run would leave them; a row in seven has none."""
    version = Fingerprint({"task": "toxic"})
    objects = find_objects(str(PARTS), cache)
    shards = load_or_cut(store, objects, "text", "id", 20_000).shards
    source = np.random.default_rng(0)
    for shard in shards:
        documents = pa.concat_tables(read_documents(shard))
        rows = documents.num_rows
        failed = np.arange(rows) % 7 == 3
        p = source.dirichlet([1, 1], rows).astype(np.float32)
        p[failed] = np.nan
        table = label_table(
            documents.column("doc_id"),
            p=p,
            mass=np.where(failed, np.nan, 0.5).astype(np.float32),
            n_tokens=np.full(rows, 9),
            n_chunks=np.ones(rows, dtype=np.int16),
            status=["error:toy" if each else "ok" for each in failed],
            labels=LABELS,
        )
        commit_shard(store, shard, documents, [LabelFile("toxic", version.id, table, {})])
    fp = {"toxic": version.id}
    record_specs(store, fp, {"toxic": version.json()})
    done = committed(store, fp, [shard.id for shard in shards])
    tasks = {"toxic": SnapshotTask(version.id, LABELS)}
    publish(store, "toxicity_filter", tasks, shards, done, created_at="2026-11-01T00:00:00Z")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's spec, with an output of its own."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    content = SPEC.read_text().replace("jobs/corpus/parts ", f"{PARTS} ")
    file = tmp_path / "spec.yaml"
    file.write_text(content.replace("out/toxicity_filter/labels", str(tmp_path / "labels")))
    assert load_spec(file).filter
    label(LocalStore(tmp_path / "labels"), tmp_path / "cache")
    return file


def ids(query: str) -> set[str]:
    return {identifier for (identifier,) in duckdb.sql(query).fetchall()}


def test_what_is_kept_lies_in_its_own_format(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["filter", str(spec), "--to", str(tmp_path / "clean"), "--json"]
    assert assay([*command, "--by", "id"]) == 0
    told = json.loads(capsys.readouterr().out)
    labels = f"'{tmp_path}/labels/labels/toxic/*/*/*.parquet'"
    wanted = ids(f"select doc_id from {labels} where p.toxic < 0.5")
    kept = told["kept_at"]
    parquet = ids(f"select id from '{kept}/*.parquet'")
    lines = ids(f"select id from read_json('{kept}/*.jsonl.zst', format='nd')")
    assert parquet | lines == wanted and not parquet & lines and parquet and lines
    assert told["counts"]["all"]["kept"]["documents"] == len(wanted)
    assert ids(f"select doc_id from '{told['dropped_at']}/*.parquet'") == (
        ids(f"select doc_id from {labels}") - wanted
    )
    for part in PARTS.glob("*.parquet"):
        for file in Path(kept).glob(f"{part.stem}.*"):
            assert pq.read_schema(file).equals(pq.read_schema(part), check_metadata=True)
    changed = (
        f"select * exclude (filename) from read_parquet('{kept}/*.parquet', filename=true) except "
        f"select * from '{PARTS}/*.parquet'"
    )
    assert not duckdb.sql(changed).fetchall()
    assert assay([*command, "--by", "id"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["created"] == 0 and again["counts"] == told["counts"]


def test_documents_without_an_answer_fail_the_filter_where_asked(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["filter", str(spec), "--to", str(tmp_path / "clean")]
    assert assay([*command, "--on-error", "fail"]) == 1
    assert "documents have no answer (error:toy " in capsys.readouterr().err
    assert assay([*command, "--by", "nothing"]) == 2
    assert "--by: " in capsys.readouterr().err
    assert not list((tmp_path / "clean").rglob("*.parquet"))
    assert assay([*command, "--on-error", "keep"]) == 0
    out = capsys.readouterr().out
    assert "all, kept" in out and "on_error" not in out


def test_the_job_is_its_steps_and_ends_with_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[list[str]] = []

    def assay_ending(codes: dict[str, int]) -> Callable[[list[str]], int]:
        def run(step: list[str]) -> int:
            called.append(step)
            return codes[step[0]]

        return run

    filtered = ["filter", "s.yaml", "--to", "there", "--by", "lang"]
    monkeypatch.setattr("jobs.toxicity_filter.assay", assay_ending({"run": 0, "filter": 3}))
    assert job(["s.yaml", "--to", "there", "--by", "lang"]) == 3
    assert called == [["run", "s.yaml"], filtered]
    called.clear()
    monkeypatch.setattr("jobs.toxicity_filter.assay", assay_ending({"run": 1}))
    assert job(["s.yaml", "--to", "there"]) == 1
    assert called == [["run", "s.yaml"]]


@pytest.mark.parametrize(
    "words",
    [
        ["s.yaml", "--to", "there", "--on-eror", "drop"],
        ["s.yaml", "--to", "there", "--on-error", "dorp"],
        ["s.yaml"],
    ],
)
def test_wrong_words_end_the_job_before_its_first_step(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("jobs.toxicity_filter.assay", called.append)
    with pytest.raises(SystemExit) as ended:
        job(words)
    assert ended.value.code == 2 and not called
    assert "usage: " in capsys.readouterr().err


def test_the_spec_is_found_behind_the_filter_s_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("jobs.toxicity_filter.assay", called.append)
    words = ["--to", "there", "--by", "language", "s.yaml"]
    assert job(words) == 0
    assert called == [["run", "s.yaml"], ["filter", *words]]
