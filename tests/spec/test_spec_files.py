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
    assert str(caught.value) == (
        f"{path}: there is no such file; write the path of the spec, a YAML file"
    )


def test_a_folder_is_not_read_as_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a folder; write the path of the spec"):
        load_spec(tmp_path)


def test_a_file_that_is_not_utf8_is_one_line_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == f"{path}: is not UTF-8; save the file as UTF-8"


def test_of_another_file_only_the_start_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "documents.csv"
    path.write_text("id,text\n" + "1,Some text\n" * 1_000)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: write a mapping of keys to values (got 'id,text 1,Some text ")
    assert line.endswith("…)") and len(line) < 300 + len(str(path))
