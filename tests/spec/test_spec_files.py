"""A spec's file: what cannot be read is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import load_spec


def test_a_missing_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "no.yaml"
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: cannot be read: ")
    assert "No such file" in line


def test_a_folder_is_not_read_as_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path)


def test_a_file_that_is_not_utf8_is_one_line_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: cannot be read: 'utf-8' codec")
