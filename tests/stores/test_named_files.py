"""A file under a user's name is there whole or not at all, on a disk and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import Server

from pipeline.errors import SpecError, StorageError
from pipeline.stores.named_files import Target, new_file, open_target


@pytest.fixture(params=["disk", "moto", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A file two folders below one that does not exist."""
    if request.param == "moto":
        server: Server = request.getfixturevalue("moto")
        return open_target(f"{server.new_url()}/a/b.txt", server.options)
    url = f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path)
    return open_target(f"{url}/to/a/b.txt", {})


def write(target: Target, data: bytes) -> None:
    with target.replaced() as path:
        path.write_bytes(data)


def test_a_file_is_replaced_in_one_step(target: Target) -> None:
    assert not target.exists()
    write(target, b"one")
    assert target.exists() and target.read() == b"one"
    write(target, b"two")
    assert target.read() == b"two"
    folder = Target("", target.file_system, target.place.removesuffix("/a/b.txt"))
    assert folder.files() == {"a/b.txt"} and folder.below("a/b.txt").read() == b"two"
    target.delete()
    assert not target.exists() and folder.files() == set()


def test_after_an_error_the_file_is_as_before(target: Target) -> None:
    write(target, b"one")
    with pytest.raises(RuntimeError), target.replaced() as path:
        path.write_bytes(b"half of tw")
        raise RuntimeError
    folder = Target("", target.file_system, target.place.removesuffix("/b.txt"))
    assert target.read() == b"one" and folder.files() == {"b.txt"}


def test_an_error_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/a: cannot be written"):
        write(open_target(str(tmp_path / "file" / "a"), {}), b"")
    with pytest.raises(StorageError, match=f"{tmp_path}/none: cannot be read"):
        open_target(str(tmp_path / "none"), {}).read()
    with pytest.raises(SpecError, match="to: cannot be opened"):
        open_target("nosuch://a", {})


@pytest.mark.parametrize("protocol", ["", "memory:/"])
def test_a_file_that_exists_is_refused_unless_it_may_be_overwritten(
    protocol: str, tmp_path: Path
) -> None:
    url = f"{protocol}{tmp_path}/a.txt"
    new_file(url, {}, overwrite=False).write(b"one")
    with pytest.raises(SpecError) as refused:
        new_file(url, {}, overwrite=False)
    (problem,) = refused.value.problems
    assert (problem.place, problem.value) == ("to", url) and "--overwrite" in problem.fix
    new_file(url, {}, overwrite=True).write(b"two")
    assert open_target(url, {}).read() == b"two"
