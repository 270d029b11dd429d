"""Hashes: the oracle is hashlib; a cache entry holds for one path, size and time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache import cache_dir
from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, content_hash, content_hashes, parse_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_canonical_json_is_reversible_and_independent_of_the_order_of_keys(
    value: dict[str, object],
) -> None:
    written = canonical_json(value)
    assert json.loads(written) == value and written.isascii()
    assert canonical_json(dict(reversed(value.items()))) == written
    # — fingerprints and shard ids are hashes of these bytes, so the form never changes
    assert written == json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_a_file_is_hashed_by_its_content_and_read_once(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = content_hash(path, tmp_path / "cache")
    assert first == hashlib.sha256(b"one").hexdigest()
    state = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    # — same size and time: only a file that was not read again gives the old hash
    assert content_hash(path, tmp_path / "cache") == first


@pytest.mark.parametrize("content", [b"other!", b"two"], ids=["size", "time"])
def test_a_file_of_another_size_or_time_is_hashed_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    content_hash(path, tmp_path / "cache")
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert content_hash(path, tmp_path / "cache") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b"{}", b"7", b"\xff"])
def test_an_invalid_cache_entry_is_logged_and_replaced(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = tmp_path / "weights", tmp_path / "cache"
    path.write_bytes(b"one")
    expected = content_hash(path, cache)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(broken)
    with caplog.at_level(logging.WARNING):
        assert content_hash(path, cache) == expected
    assert str(entry) in caplog.text
    assert entry.read_bytes() == whole


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere: its content cannot be hashed: .*No such"):
        content_hash(tmp_path / "nowhere", tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_has_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    original = hashlib.file_digest

    def slow(file: BinaryIO, name: str) -> object:
        with path.open("ab") as writer:
            writer.write(b"more")
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    with pytest.raises(StorageError, match="changed while it was read"):
        content_hash(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "[" * 200_000 + "]" * 200_000])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_json_of_any_depth_is_a_value_error(text: str, encode: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(encode(text))


def test_an_empty_variable_does_not_put_the_cache_into_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ASSAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert cache_dir() == tmp_path / ".cache" / "assay"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/assay")
    monkeypatch.setenv("ASSAY_CACHE", "~/models")
    assert cache_dir() == tmp_path / "models"


def test_a_named_cache_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # — of a user without an entry

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("ASSAY_CACHE", "/x/models")
    assert cache_dir() == Path("/x/models")
    monkeypatch.setenv("ASSAY_CACHE", "models")  # — workers have another working folder
    assert cache_dir() == Path.cwd() / "models"


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_text("content")
    cache.write_text("a file in the place of the folder")
    with pytest.raises(StorageError, match=r"the cache cannot be written.*in ASSAY_CACHE"):
        content_hash(file, cache)


def test_several_files_are_hashed_at_once_and_named_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(6)]
    for path in paths:
        path.write_bytes(path.name.encode())
    together, digest = threading.Barrier(3), hashlib.file_digest

    def waiting(*of_file: Any) -> Any:
        together.wait(timeout=30)  # raises, unless three are read at once
        return digest(*of_file)

    monkeypatch.setattr(hashlib, "file_digest", waiting)
    expected = [hashlib.sha256(path.name.encode()).hexdigest() for path in paths]
    assert content_hashes(paths, tmp_path / "cache") == expected
    paths[4].unlink()
    with pytest.raises(StorageError, match=f"{paths[4]}: its content cannot be hashed"):
        content_hashes(paths, tmp_path / "cache")
