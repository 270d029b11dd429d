"""Datasets of the Hub: every shard is of a commit, and a branch that moved is another version.

The Hub here is a stand-in on this machine (`fake_hub`): the real one cannot be reached by a test.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from data_fixtures import parquet_bytes
from fake_hub import FakeHub, use_endpoint
from whole_shards import all_documents

from pipeline.cli import main
from pipeline.errors import SpecError, UnavailableError
from pipeline.filters.layout import relative_paths
from pipeline.sources.source import cut, find_objects
from pipeline.spec.schema import Columns

REPO = "datasets/org/reviews"


@pytest.fixture
def hub(hub: FakeHub) -> FakeHub:
    hub.push(REPO, {"data/a.parquet": parquet(["one", "two"]), "README.md": b"# card"})
    return hub


def parquet(texts: list[str]) -> bytes:
    return parquet_bytes(pa.table({"text": texts, "id": [text.upper() for text in texts]}))


def texts_of(url: str, cache_dir: Path) -> list[str]:
    objects = find_objects(url, cache_dir)
    shards = [shard for each in objects for shard in cut(each, Columns("text", "id"), 10**6)]
    return [text for s in shards for text in all_documents(s).column("text").to_pylist()]


@pytest.mark.parametrize(
    "path", ["/data/*.parquet", "/data", "", "@main/**/*.parquet", "@main/data/a.parquet"]
)
def test_a_branch_becomes_its_commit_in_every_path(
    hub: FakeHub, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.branches[REPO]["main"]
    caplog.set_level(logging.INFO)
    (item,) = find_objects(f"hf://{REPO}{path}", tmp_path / "cache")
    assert item.path == f"hf://{REPO}@{commit}/data/a.parquet"
    assert f"main is commit {commit}" in caplog.text
    assert texts_of(f"hf://{REPO}{path}", tmp_path / "cache") == ["one", "two"]


def test_a_moved_branch_is_another_version_and_the_old_shards_stay_readable(
    hub: FakeHub, tmp_path: Path
) -> None:
    url = f"hf://{REPO}/data/*.parquet"
    (before,) = find_objects(url, tmp_path / "cache")
    (old,) = cut(before, Columns("text", "id"), 10**6)
    first = hub.branches[REPO]["main"]
    hub.push(REPO, {"data/a.parquet": parquet(["three"])})
    (after,) = find_objects(url, tmp_path / "cache")
    (new,) = cut(after, Columns("text", "id"), 10**6)
    assert old.id != new.id
    assert all_documents(old).column("text").to_pylist() == ["one", "two"]
    assert all_documents(new).column("text").to_pylist() == ["three"]
    assert texts_of(f"hf://{REPO}@{first}/data/*.parquet", tmp_path / "cache") == ["one", "two"]


def test_a_filtered_corpus_has_the_folders_of_the_dataset(hub: FakeHub, tmp_path: Path) -> None:
    (item,) = find_objects(f"hf://{REPO}/**/*.parquet", tmp_path / "cache")
    relative = relative_paths(f"hf://{REPO}/**/*.parquet", [item.path], {})
    assert relative == {item.path: "data/a.parquet"}


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("hf://datasets/org/none/*.parquet", "no such repository on the Hub; check the name, or"),
        (
            f"hf://{REPO}@v9/*.parquet",
            "the repository on the Hub has no such branch, tag or commit",
        ),
        ("hf://datasets/reviews", "write hf://datasets/ORG/NAME@REVISION/*.parquet: "),
        (f"hf://{REPO}/*.csv", "names no file; supported are "),
    ],
)
def test_a_dataset_that_is_not_available_is_one_line(
    hub: FakeHub, tmp_path: Path, url: str, line: str
) -> None:
    with pytest.raises(SpecError) as raised:
        find_objects(url, tmp_path / "cache")
    (problem,) = raised.value.problems
    assert problem.place == "input.path" and problem.fix.startswith(line)
    assert "\n" not in str(raised.value)


def test_a_hub_out_of_reach_is_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    line = r"^input\.path: the Hub at http://127.* check the network.*; run again to go on$"
    with pytest.raises(UnavailableError, match=line):
        find_objects(f"hf://{REPO}/*.parquet", tmp_path / "cache")


def test_init_proposes_a_spec_for_a_dataset(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", f"hf://{REPO}", "--to", str(tmp_path / "new.yaml"), "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["id"], shown["output"]) == ("text", "id", "out/reviews")
