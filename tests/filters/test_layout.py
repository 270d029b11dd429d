"""Filtered files have the input's layout, and are never where the next run would label them."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from finished import toy_spec

from pipeline.errors import SpecError, StorageError
from pipeline.filters.layout import Layout, refuse_own_places, relative_paths
from pipeline.ledger.snapshot_files import NamedFile, NamedShard
from pipeline.spec.parse import spec_of

HUB = "hf://datasets/org/reviews"


@pytest.mark.parametrize(
    "path_glob, paths, expected",
    [
        ("/in", ["/in/a.jsonl", "/in/b/a.jsonl"], ["a.jsonl", "b/a.jsonl"]),
        ("/in/", ["/in/x/a.jsonl"], ["x/a.jsonl"]),
        ("/in/a.jsonl", ["/in/a.jsonl"], ["a.jsonl"]),
        ("/in/*/a.jsonl", ["/in/x/a.jsonl", "/in/y/a.jsonl"], ["x/a.jsonl", "y/a.jsonl"]),
        ("/in/2026-*/**/*.jsonl", ["/in/2026-11/d/a.jsonl"], ["2026-11/d/a.jsonl"]),
        ("/in/a[1].jsonl", ["/in/a[1].jsonl"], ["a[1].jsonl"]),
        ("memory://c/in/**/*.gz", ["memory:///c/in/x/a.jsonl.gz"], ["x/a.jsonl.gz"]),
        ("memory://c/in", ["memory:///c/in/x/a.jsonl"], ["x/a.jsonl"]),
        (f"{HUB}@refs/convert/parquet/all/*.parquet", [f"{HUB}@1f/all/0.parquet"], ["0.parquet"]),
        ("/in/texts", ["/in/texts"], ["texts"]),
        ("/in/**/*.txt", ["/in/**/*.txt"], ["_.txt"]),
        ("/in/**/*", ["/in/**/*", "/in/x/a.csv"], ["_/_", "x/a.csv"]),
    ],
)
def test_a_file_keeps_its_path_below_the_input(
    path_glob: str, paths: list[str], expected: list[str]
) -> None:
    assert list(relative_paths(path_glob, paths, {}).values()) == expected


def test_data_files_of_a_table_may_be_anywhere_and_are_parquet_whatever_their_names_are() -> None:
    paths = ["s3://a/t/000000_0", "s3://b/t/x.parquet", "s3://b/t/x"]
    hive, parquet, other = relative_paths("iceberg://local/docs.web", paths, {}).values()
    assert re.fullmatch(r"a/t/000000_0~[0-9a-f]{32}\.parquet", hive)
    assert parquet == "b/t/x.parquet" and re.fullmatch(r"b/t/x~[0-9a-f]{32}\.parquet", other)
    paths = ["/1/t/a.parquet", "/2/t/b.parquet"]
    below = relative_paths("iceberg://local/docs.web", paths, {}).values()
    assert [*below] == ["1/t/a.parquet", "2/t/b.parquet"]
    assert relative_paths("delta+/in", [], {}) == {}  # all rows are deleted


def test_a_name_that_no_store_can_hold_is_refused() -> None:
    with pytest.raises(StorageError, match="is not a key"):
        relative_paths("/in", ["/in/a\0b.jsonl"], {})


def test_a_name_with_a_backslash_has_a_key_that_no_other_name_has() -> None:
    parts = ("a", "\\", "%5C", "%", "25", "5C")
    names = {"".join(chosen) for size in (1, 2, 3, 4) for chosen in product(parts, repeat=size)}
    paths = sorted(f"/in/{name}.jsonl" for name in names)
    keys = relative_paths("/in", paths, {})
    assert len({*keys.values()}) == len(keys) == len(paths)
    assert re.fullmatch(r"a_a~[0-9a-f]{32}\.jsonl", keys["/in/a\\a.jsonl"])
    for name in ("a%a", "a%5C", "5C"):  # what is no such name is not changed
        assert keys[f"/in/{name}.jsonl"] == f"{name}.jsonl"


def test_a_path_with_empty_parts_or_dots_has_a_key_that_no_other_path_has() -> None:
    parts = ("", ".", "..", "%2F", "%2E", "%", "25", "a")
    names = {"/".join(chosen) for size in (1, 2, 3) for chosen in product(parts, repeat=size)}
    paths = sorted(f"s3://bucket/in/{name}/a.jsonl" for name in names)
    keys = relative_paths("s3://bucket/in", paths, {})
    assert len({*keys.values()}) == len(keys) == len(paths)
    assert keys["s3://bucket/in/a/%/a.jsonl"] == "a/%/a.jsonl"


@pytest.mark.parametrize(
    "path_glob, path, key",
    [
        ("s3://b/in", "s3://b/in//a.jsonl", None),
        ("s3://b/in", "s3://b/in/x//a.jsonl", None),
        ("s3://b/in//*.jsonl", "s3://b/in//a.jsonl", "a.jsonl"),
        ("s3://b/in", "s3://b/in/./a.jsonl", None),
        ("s3://b/in/**/*.jsonl", "s3://b/in/x/../a.jsonl", None),
        ("s3://b/in//a.jsonl", "s3://b/in//a.jsonl", "a.jsonl"),
    ],
)
def test_a_path_below_the_input_with_double_slashes_or_dots_has_a_name_with_its_hash(
    path_glob: str, path: str, key: str | None
) -> None:
    [name] = relative_paths(path_glob, [path], {}).values()
    assert name == key if key else re.fullmatch(r"a~[0-9a-f]{32}\.jsonl", name)


@pytest.mark.parametrize("format", ["jsonl", "warc.wet.gz", "arrow", "csv.zst"])
@pytest.mark.parametrize("letter", ["a", "é", "語"])
def test_a_file_with_the_longest_name_has_keys_that_a_local_disk_can_hold(
    tmp_path: Path, format: str, letter: str
) -> None:
    end = f".{format}"
    names = [letter * n + end for n in range(1, (255 - len(end)) // len(letter.encode()) + 1)]
    cut = relative_paths("/in", [f"/in/x/{name}" for name in names], {})
    longest = cut[f"/in/x/{names[-1]}"]
    assert longest.startswith(f"x/{letter}{letter}") and longest.endswith(end)
    # — names that look like cut ones, and the same name in another folder
    names += [longest.removeprefix("x/"), f"~{'0' * 32}{end}"]
    paths = [f"/in/{folder}/{name}" for name in names for folder in ("x", "y")]
    relative = relative_paths("/in", paths, {})
    layout = Layout("i" * 16, relative)
    keys = [layout.kept_key(shard(path)) for path in paths]
    keys += [layout.dropped_key(shard(path)) for path in paths]
    assert len(set(keys)) == len(keys) == 2 * len(paths)
    for key in keys:
        (tmp_path / key.rpartition("/")[2]).touch()
    assert all(relative[f"/in/x/{name}"] == f"x/{name}" for name in names[:50])


def shard(path: str, start_row: int = 0) -> NamedShard:
    return NamedShard("s", path, start_row, start_row + 1, 1, NamedFile("k"), {})


def test_no_two_files_have_one_key() -> None:
    names = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.0000000000.jsonl", "A.PARQUET", "b/a.jsonl"]
    names += ["a.arrow", "a.arrow.parquet", "a.warc.wet.gz", "a.warc.wet.gz.jsonl.zst"]
    names += ["a", "_.txt", "a.csv", "a.tsv.gz", "a.json", "a.json.zst"]
    layout = Layout("id", {name: name for name in names})
    shards = [shard(name, row) for name in names for row in (0, 7)]
    keys = [key(each) for each in shards for key in (layout.kept_key, layout.dropped_key)]
    assert len(set(keys)) == len(keys)
    assert layout.kept_key(shard("a.jsonl.gz", 7)) == "kept/id/a.0000000007.jsonl.gz"
    assert layout.kept_key(shard("A.PARQUET")) == "kept/id/A.0000000000.PARQUET"
    assert layout.kept_key(shard("a.arrow")) == "kept/id/a.0000000000.arrow.parquet"
    assert layout.kept_key(shard("a.warc.wet.gz", 7)).endswith("7.warc.wet.gz.jsonl.zst")
    assert layout.kept_key(shard("a", 7)) == "kept/id/a.0000000007.jsonl.zst"
    suffixes = ".PARQUET .csv .json .json.zst .jsonl .jsonl.gz .jsonl.zst .parquet .tsv.gz"
    assert layout.kept_suffixes() == suffixes.split()
    for key in map(layout.kept_key, shards):
        assert [key.endswith(suffix) for suffix in layout.kept_suffixes()].count(True) == 1
    assert layout.dropped_key(shard("b/a.jsonl")) == "dropped/id/b/a.jsonl.0000000000.parquet"


@pytest.mark.parametrize(
    "path_glob, to, fix",
    [
        ("{at}/in", "{at}/in/clean", "is in the input"),
        ("{at}/in", "{at}/in", "is in the input"),
        ("{at}/in/**/*.jsonl", "{at}/in/clean", "is in the input"),
        ("{at}/in/*/a.jsonl", "{at}/in/clean", "is in the input"),
        ("{at}/in", "file://{at}/in/clean", "is in the input"),
        ("file://{at}/in", "{at}/in/clean", "is in the input"),
        ("{at}/in", "{at}/link/clean", "is in the input"),
        ("{at}/link", "{at}/in/clean", "is in the input"),
        ("{at}/link/**/*.jsonl", "{at}/in/clean", "is in the input"),
        ("{at}/in", "{at}/x/../in/clean", "is in the input"),
        ("{at}/in[1]", "{at}/in[1]/clean", "is in the input"),
        ("{at}/in", "{at}/in-clean", None),
        ("{at}/in/*.jsonl", "{at}/in/clean", None),
        ("{at}/in/*.jsonl", "{at}/in/a.jsonl", "is in the input"),
        ("{at}/in/*.jsonl", "{at}/in/a.csv", None),
        ("{at}/in/*.json", "{at}/in", "contains the input"),
        ("{at}/in/a.jsonl", "{at}/in/a.jsonl", "is in the input"),
        ("{at}/in/a.jsonl", "{at}/in", "contains the input"),
        ("{at}/in", "{at}", "contains the input"),
        ("{at}/in", "/", "contains the input"),
        ("{at}/in", "{at}/out", "is in the output"),
        ("{at}/in", "{at}/out/", "is in the output"),
        ("{at}/in", "{at}/out/kept", "is in the output"),
        ("{at}/in", "{at}/to-out/kept", "is in the output"),
        ("{at}/elsewhere/in", "{at}", "contains the input"),
        ("/elsewhere/in", "{at}", "contains the output"),
        ("{at}/in", "s3://bucket/in", None),
        ("s3://bucket/in", "s3a://bucket/in/clean", "is in the input"),
        ("s3://bucket/in", "s3://bucket", "contains the input"),
        ("s3://bucket/in", "s3://bucket/into", None),
        ("memory://c/in", "memory://c/in/clean", "is in the input"),
        ("memory://c/in/*.jsonl", "memory://c/in/clean", None),
        ("memory://c/in", "memory://c/out", None),
    ],
)
def test_what_would_be_labelled_again_is_refused(
    tmp_path: Path, path_glob: str, to: str, fix: str | None
) -> None:
    for name in ("in", "in[1]", "out", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "to-out").symlink_to(tmp_path / "out")
    source, target = (each.format(at=tmp_path) for each in (path_glob, to))
    spec = spec_of(toy_spec(tmp_path, input={"path": source}))
    if fix is None:
        refuse_own_places(spec, target)
        return
    with pytest.raises(SpecError, match=f"to: {fix} of the spec; name another folder"):
        refuse_own_places(spec, target)
