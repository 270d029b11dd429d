"""Outputs that earlier code made: later code reads them, verifies them and labels nothing again.

One is in `fixtures/output_v1`; its README says what it holds and how it was made. Four others are
in `fixtures/output_slices.tar.xz`, of a later commit: see `output_slices.md`. These tests use the
command and `pipeline.__all__` alone, so that they hold for any module layout.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from command import ASSAY, FORKED_ASSAY, ONE_PROCESS, SLOW_ON_RAY, WITH_MODEL, start
from fsspec import AbstractFileSystem
from servers import KEY, SECRET, Server, start_moto

from pipeline import open_labels

FIXTURE = Path(__file__).parent / "fixtures" / "output_v1"
BUCKET = "output-v1"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
[FILTERED] = (each for each in EXPECTED if each["arguments"][0] == "filter")
REMOVED = ("tokens_saved", "reuse_ratio")  # from what a run prints
# Later versions of `filter` and `diff` count no groups.
del FILTERED["printed"]["counts"]["groups"]
for each in EXPECTED:
    if each["arguments"][0] == "diff":
        del each["arguments"][4:]  # --by path
        for task in each["printed"]["tasks"].values():
            del task["groups"]
TASKS = ("toxic", "topic", "tone")
COMPLETE, INCOMPLETE = 0, 3  # exit codes
ROUNDING = 1e-9  # two formulas of one statistic
FLOAT32_DP = 1e-4  # the largest difference of a probability that `assay check` allows in float32


@dataclass(frozen=True)
class Copy:
    """The fixture's objects on a server, and the command."""

    server: Server
    files: AbstractFileSystem
    cache: Path
    bucket: str = BUCKET
    folder: Path = FIXTURE  # of the specs
    command: Sequence[str] = FORKED_ASSAY
    exit_codes: Sequence[int] = (COMPLETE,)

    def upload(self, folder: Path, *names: str) -> Copy:
        """This copy, whose bucket now has exactly the files in these folders of the folder."""
        if self.files.exists(self.bucket):
            self.files.rm(self.bucket, recursive=True)
        self.files.call_s3("create_bucket", Bucket=self.bucket)
        paths = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
        objects = {path.relative_to(folder).as_posix(): path for path in paths}
        self.files.pipe({f"{self.bucket}/{k}": path.read_bytes() for k, path in objects.items()})
        return self

    def assay(self, *arguments: str) -> dict[str, Any]:
        """The JSON that the command prints. The specs name their files relative to the fixture."""
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": self.server.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "ASSAY_CACHE": str(self.cache),
        }
        words = (*arguments, "--json")
        process = start(self.command, *words, environment=environment, folder=self.folder)
        out, err = process.communicate(timeout=300)
        assert process.returncode in self.exit_codes, err
        printed: dict[str, Any] = json.loads(out)
        return printed

    def objects(self) -> dict[str, tuple[str, Any]]:
        """Every key with the hash of its bytes and the time at which it was written."""
        found = self.files.find(self.bucket, detail=True)
        return {
            key.removeprefix(f"{self.bucket}/"): (info["ETag"], info["LastModified"])
            for key, info in found.items()
        }

    def download(self, prefix: str, folder: Path) -> Path:
        """The objects below a prefix, as files below the folder."""
        for key in self.objects():
            if key.startswith(prefix):
                path = folder / key.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files.cat_file(f"{BUCKET}/{key}"))
        return folder

    def rows(self, snapshot: int) -> list[dict[str, Any]]:
        """The rows that `open_labels` gives."""
        options = self.server.options
        labels = open_labels(f"s3://{BUCKET}/output", snapshot=snapshot, storage_options=options)
        with duckdb.connect() as connection:
            connection.register("labels", labels)
            return dictionaries(connection.sql("select * from labels"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: the fixture's bucket and keys are fixed."""
    yield from start_moto(tmp_path_factory.mktemp("moto"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def copy(server: Server, cache: Path) -> Copy:
    """The bucket with exactly the fixture's objects."""
    return Copy(server, server.file_system(), cache).upload(FIXTURE, "input", "output", "filtered")


@pytest.fixture
def slices(server: Server, cache: Path, tmp_path: Path) -> Copy:
    """The outputs with slices, in no bucket yet."""
    with tarfile.open(f"{FIXTURE.parent}/output_slices.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "output_slices"
    copy = Copy(server, server.file_system(), cache, "output-slices", folder)
    # — one of them has no answers to some rows
    return replace(copy, exit_codes=(COMPLETE, INCOMPLETE))


def dictionaries(relation: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def approximately(value: object, tolerance: float) -> Any:
    """The JSON value, with floats that equal every number within the tolerance."""
    return json.loads(
        json.dumps(value), parse_float=lambda text: pytest.approx(float(text), abs=tolerance, rel=0)
    )


def published(snapshot: int) -> tuple[list[dict[str, Any]], dict[tuple[str, str | None], str]]:
    """The shards of a snapshot of the fixture, and its keys by shard and task."""
    content = json.loads((FIXTURE / f"output/snapshots/{snapshot:08d}.json").read_text())
    keys = {(file["sid"], file["task"]): f"output/{file['key']}" for file in content["files"]}
    return content["shards"], keys


def rows_in_files(snapshot: int) -> list[dict[str, Any]]:
    """The rows of a snapshot of the fixture: its files as DuckDB reads them, side by side."""
    shards, keys = published(snapshot)
    rows: list[dict[str, Any]] = []
    for shard in shards:
        parts = {
            task: dictionaries(duckdb.sql(f"select * from '{FIXTURE / keys[shard['sid'], task]}'"))
            for task in (None, *TASKS)
        }
        for index, document in enumerate(parts[None]):
            answers = {task: dict(parts[task][index]) for task in TASKS}
            assert {answer.pop("doc_id") for answer in answers.values()} == {document["doc_id"]}
            place = {"path": shard["path"], "row": shard["start_row"] + index}
            rows.append({**document, **place, **answers})
    return rows


@pytest.mark.parametrize(
    "command",
    [each for each in EXPECTED if each is not FILTERED],
    ids=lambda command: " ".join(command["arguments"]),
)
def test_a_command_prints_what_it_printed_and_creates_nothing(
    copy: Copy, command: dict[str, Any]
) -> None:
    before = copy.objects()
    # — the copy is a second old
    age = ["--older-than", "0"] if command["arguments"][0] == "gc" else []
    printed = copy.assay(*command["arguments"], *age)
    printed_then = {k: value for k, value in command["printed"].items() if k not in REMOVED}
    expected = approximately(printed_then, ROUNDING)
    assert expected and {name: printed.get(name) for name in expected} == expected
    assert copy.objects() == before


@pytest.mark.parametrize("snapshot", [1, 2, 3, 4])
def test_open_labels_gives_the_rows_of_the_files(copy: Copy, snapshot: int) -> None:
    rows = copy.rows(snapshot)
    assert len(rows) == 26 and rows == rows_in_files(snapshot)
    (d7,) = (row for row in rows if row["doc_id"] == "d7")
    assert {d7[task]["status"] for task in TASKS} == {"quarantined" if snapshot == 1 else "ok"}
    assert ("calibrated" in d7["tone"]) == (snapshot > 2)


def test_a_filter_writes_the_same_rows_to_a_folder_of_its_own(copy: Copy, tmp_path: Path) -> None:
    """Other versions name the reasons in other words, so their files do not mix."""
    before = copy.objects()
    printed = copy.assay("filter", "spec.yaml", "--to", f"s3://{BUCKET}/filtered")
    assert before.items() <= copy.objects().items()
    old = FILTERED["printed"]["kept_at"].rpartition("/")[2]
    new = printed["kept_at"].rpartition("/")[2]
    assert new != old
    places = {
        name: FILTERED["printed"][name].replace(old, new)
        for name in ("kept_at", "dropped_at", "manifest")
    }
    counts = {**FILTERED["printed"]["counts"], "several": 0}
    expected = {**FILTERED["printed"], **places, "counts": counts, "created": 13}
    assert {name: printed.get(name) for name in expected} == expected

    copy.files.rm(f"{BUCKET}/filtered/current.json")  # — earlier code did not write it
    copy.files.rm([f"{BUCKET}/{key}" for key in before if key.startswith("filtered/")])
    again, written = tmp_path / "again", copy.download("filtered/", tmp_path / "written")
    for file in list(written.rglob("*.*")):
        renamed = again / str(file.relative_to(written)).replace(new, old)
        renamed.parent.mkdir(parents=True, exist_ok=True)
        file.rename(renamed)
    filtered = FIXTURE / "filtered"
    files = {path.relative_to(again) for path in again.rglob("*.*")}
    assert files == {path.relative_to(filtered) for path in filtered.rglob("*.*")}
    suffixes = [file.suffix for file in files if file.parts[0] != "filters"]
    assert sorted(suffixes) == [".jsonl"] * 2 + [".parquet"] * 6
    for file in files:
        if file.suffix == ".parquet":
            assert pq.read_table(again / file).equals(pq.read_table(filtered / file)), file
        elif file.suffix == ".jsonl":
            assert (again / file).read_bytes() == (filtered / file).read_bytes(), file


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_run_that_was_killed_is_resumed_and_gives_the_same_answers(
    command: Sequence[str], copy: Copy
) -> None:
    shards, keys = published(4)
    first, retried = shards[0]["sid"], shards[1]["sid"]  # d0 to d4, of which d4 is empty; d5 to d11
    lost = ["output/snapshots/00000004.json", keys[retried, "tone"]]
    lost += [keys[first, task] for task in TASKS]
    before = copy.objects()
    copy.files.rm([f"{BUCKET}/{key}" for key in lost])
    left = {key: each for key, each in before.items() if key not in lost}
    assert copy.objects() == left and len(left) == len(before) - len(lost)

    printed = replace(copy, command=command).assay("run", "spec.yaml")
    assert printed["snapshot"] == 4 and printed["objects_created"] == 4
    # — a shard of an earlier version of the input has the text of one of d0 to d3
    assert printed["documents_labelled"] == 12 and printed["documents_read_by_model"] == 3
    after = copy.objects()
    # — earlier code wrote no index of texts
    assert after.keys() == {*before, "output/index/00000001.parquet"}
    assert left.items() <= after.items()
    assert copy.rows(4) == approximately(rows_in_files(4), FLOAT32_DP)
    assert copy.assay("verify", "spec.yaml")["intact"] is True


# By output, the options of the run that resumes it.
SLICES = {"sliced": ["--sample", "60%"], "whole": [], "begun": [], "staged": []}


@pytest.mark.parametrize(
    ("name", "command"),
    [*((name, ONE_PROCESS) for name in SLICES), pytest.param("staged", ASSAY, marks=SLOW_ON_RAY)],
)
def test_an_output_with_slices_and_stages_is_resumed_and_nothing_is_asked_again(
    name: str, command: Sequence[str], slices: Copy
) -> None:
    slices.upload(slices.folder / "objects", "model", name)
    spec, before = f"{name}.yaml", slices.objects()
    expected = json.loads((slices.folder / f"{name}.json").read_text())
    resumed = replace(slices, command=command).assay("run", spec, *SLICES[name])
    assert (resumed["complete"], resumed["documents_read_by_model"]) == (True, 0)
    assert before.items() <= slices.objects().items()
    slices.assay("export", spec, "--to", "rows.jsonl")
    lines = (slices.folder / "rows.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == expected["rows"]
    for (verb, *words), printed_then in expected["printed"]:
        printed = slices.assay(verb, spec, *words)
        if verb == "status":  # — earlier code counted the rows of all slices
            rows = [task["done"] + task["failed"] for task in printed["tasks"].values()]
            assert rows == [len(expected["rows"])] * 2
            continue
        if "snapshot" in printed_then:
            printed_then["snapshot"] = resumed["snapshot"]
        for task in printed_then.get("tasks", {}).values():
            del task["groups"]  # of `diff`
        then = approximately(printed_then, ROUNDING)
        assert {key: printed.get(key) for key in then} == then, verb
    slices.assay("gc", spec, "--keep", "1", "--older-than", "0", "--delete")
    assert slices.assay("verify", spec)["intact"] is True
    assert slices.assay("show", spec)["documents"] == len(expected["rows"])
    again = replace(slices, command=command).assay("run", spec, *SLICES[name])
    assert (again["documents_read_by_model"], again["objects_created"]) == (0, 0)
