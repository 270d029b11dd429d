"""The demo's corpus, filtered by the job's own rule; answers are seeded, and DuckDB reads all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from label_tables import label_rows

from jobs.toxicity_filter import main as job
from pipeline.cli import main as assay
from pipeline.ledger.cells import Committed, committed, record_specs
from pipeline.ledger.cuts import Cuts, load_or_cut
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.options import FilterOptions, RunOptions
from pipeline.runtime.job import Plan
from pipeline.sources.source import find_objects, read_documents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore

SPEC = Path(__file__).parents[2] / "jobs" / "specs" / "toxicity_filter.yaml"
PARTS = Path(__file__).parents[2] / "jobs" / "corpus" / "parts"
LABELS = ("toxic", "clean")


def label(store: LocalStore, cache: Path) -> None:
    """Answers as a run would leave them; a row in seven has none."""
    version = Fingerprint({"task": "toxic"})
    objects = find_objects(str(PARTS), cache)
    shards = load_or_cut(store, objects, Columns("text", "id"), 20_000).shards
    source = np.random.default_rng(0)
    for shard in shards:
        documents = pa.concat_tables(read_documents(shard))
        rows = documents.num_rows
        failed = np.arange(rows) % 7 == 3
        p = source.dirichlet([1, 1], rows).astype(np.float32)
        p[failed] = np.nan
        answers = label_rows(
            p=p,
            status=["error:toy" if each else "ok" for each in failed],
            labels=LABELS,
        )
        commit_shard(
            store, shard, documents, [LabelFile("toxic", version.id, shard.id, answers, {})]
        )
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
    assert assay(command) == 0
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
    assert assay(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["created"] == 0 and again["counts"] == told["counts"]


def test_documents_without_an_answer_fail_the_filter_where_asked(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["filter", str(spec), "--to", str(tmp_path / "clean")]
    assert assay([*command, "--on-error", "fail"]) == 1
    assert "documents have no answer (error:toy " in capsys.readouterr().err
    assert assay([*command, "--by", "nothing"]) == 2
    assert "--by: no such option; assay report --by counts" in capsys.readouterr().err
    assert not list((tmp_path / "clean").rglob("*.parquet"))
    assert assay([*command, "--on-error", "keep"]) == 0
    out = capsys.readouterr().out
    assert "all, kept" in out and "on_error" not in out


Steps = list[tuple[str, Any, bool]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps that the job takes, in place of their work; a spec `broken.yaml` fails."""
    taken: Steps = []

    def step(verb: str, code: int) -> Any:
        def call(spec: str, *, options: Any, as_json: bool, dry_run: bool = False) -> int:
            taken.append((verb, options, dry_run))
            print(json.dumps({"of": verb}) if as_json else f"table of {verb}")
            return 1 if spec == "broken.yaml" else code

        return call

    monkeypatch.setattr("jobs.toxicity_filter.run", step("run", 0))
    monkeypatch.setattr("jobs.toxicity_filter.filter_corpus", step("filter", 3))
    return taken


@pytest.mark.parametrize(
    "words",
    ["s.yaml --to there --on-error drop --max-hours 2", "--to there --on-error drop s.yaml"],
)
def test_the_job_labels_and_then_filters(
    words: str, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(words.split()) == 3
    bound = RunOptions(max_hours=2 if "hours" in words else None)
    filtering = FilterOptions(to="there", on_error="drop")
    assert steps == [("run", bound, False), ("filter", filtering, False)]
    assert capsys.readouterr().out == "table of run\ntable of filter\n"


def test_with_json_the_job_prints_one_value_and_a_step_that_fails_ends_it(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(["s.yaml", "--to", "there", "--json"]) == 3 and len(steps) == 2
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"run": {"of": "run"}, "filter": {"of": "filter"}}
    assert job(["broken.yaml", "--to", "there", "--json"]) == 1 and len(steps) == 3
    assert json.loads(capsys.readouterr().out) == {"run": {"of": "run"}, "filter": None}


def test_a_dry_run_of_the_job_labels_and_writes_nothing(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of the spec is not here: the plan of the labelling is given."""
    planned = Plan(Cuts((), {}), Committed({}, {}, {}, {}), ())
    monkeypatch.setattr("pipeline.runtime.dry_run.dry_run", lambda *_, **__: planned)
    before = sorted(tmp_path.rglob("*"))
    assert job([str(spec), "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["missing_documents"] == 0
    labels = f"'{tmp_path}/labels/labels/toxic/*/*/*.parquet'"
    (wanted,) = duckdb.sql(f"select count(*) from {labels} where p.toxic < 0.5").fetchall()
    assert shown["filter"]["kept"] == wanted[0]
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts] == [
        path for path in before if "cache" not in path.parts
    ]
    unlabelled = tmp_path / "new.yaml"
    unlabelled.write_text(spec.read_text().replace(f"{tmp_path}/labels", f"{tmp_path}/none"))
    assert job([str(unlabelled), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["filter"] is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["s.yaml", "--to", "there", "--on-eror", "drop"], "--on-eror: no such option"),
        (["s.yaml", "--to", "there", "--on-error", "dorp"], "--on-error: "),
        (["s.yaml"], "--to: missing; name a folder"),
    ],
)
def test_wrong_arguments_end_the_job_before_its_first_step(
    words: list[str],
    line: str,
    steps: Steps,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert job(words) == 2 and not steps
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line)
