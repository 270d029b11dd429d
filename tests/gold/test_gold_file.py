"""A file of people's labels that a crash cut, or that another program changed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from calls import WriteSpec
from gold_lines import QUALITY, THEMES, TOPIC, line, written

from pipeline.errors import SpecError, StorageError
from pipeline.gold.labels import read_gold
from pipeline.gold.people import GoldFile
from pipeline.spec.parse import load_spec
from pipeline.spec.tasks import TaskSpec


@pytest.mark.parametrize("task", [TOPIC, THEMES, QUALITY])
def test_a_last_line_without_a_line_break_stays(path: Path, task: TaskSpec) -> None:
    label = {"topic": "art", "themes": ("art",), "quality": "1"}[task.name]
    lines = [line("a", label, task=task), line("b", label, task=task)]
    whole = written(path, *lines, task=task).read_bytes()
    path.write_bytes(whole.removesuffix(b"\n"))
    with GoldFile.open(path, task) as gold:
        assert gold.lines == tuple(lines)
        gold.append(line("c", label, task=task))
    assert path.read_bytes().startswith(whole)
    with GoldFile.open(path, task) as gold:
        assert [each.doc_id for each in gold.lines] == ["a", "b", "c"]


def test_what_a_crash_leaves_of_a_line_is_removed_wherever_it_is_cut(
    path: Path, write_spec: WriteSpec, caplog: pytest.LogCaptureFixture
) -> None:
    odd, spec = line('é"\\\n\u0001😀'), load_spec(write_spec(tasks=[TOPIC.model_dump(mode="json")]))
    whole = written(path, line("a"), odd).read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_gold(str(path), spec).keys == ("hash-a",) and path.read_bytes() == whole[:end]
        with GoldFile.open(path, TOPIC) as gold:
            assert len(gold.lines) == 1, whole[start:end]
        assert path.read_bytes() == whole[:start]
    assert "the last line was unfinished" in caplog.text


def test_a_blank_line_is_no_line(path: Path) -> None:
    whole = written(path, line("a"), line("b")).read_bytes()
    path.write_bytes(whole.replace(b"\n", b"\r\n\n") + b"  \n")
    with GoldFile.open(path, TOPIC) as gold:
        assert [each.doc_id for each in gold.lines] == ["a", "b"]


def replace_by_editor(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b'"ann"', b'"eve"'))
    other.rename(path)


def edit_in_place(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"ann"', b'"eve"'))


def append_by_another(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(line("z"))) + "\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": replace_by_editor,
    "replaced by an older copy": lambda path: (
        path.with_suffix(".old").write_bytes(path.read_bytes().splitlines(keepends=True)[0]),
        path.with_suffix(".old").rename(path),
    ),
    "edited in place": edit_in_place,
    "truncated": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, 40),
    "deleted": Path.unlink,
    "a second writer": append_by_another,
    "a folder of that name": lambda path: (path.unlink(), path.mkdir()),
    "folder deleted": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_is_refused_if_another_program_changed_the_file(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "folder" / "gold.jsonl"
    with GoldFile.open(path, TOPIC) as gold:
        for document in "abc":
            gold.append(line(document))
        CHANGES[change](path)
        content = path.read_bytes() if path.is_file() else None
        for _ in range(2):
            with pytest.raises(StorageError, match="your answer was not written; end the review"):
                gold.append(line("d"))
        assert len(gold.lines) == 3
    assert (path.read_bytes() if path.is_file() else None) == content


@pytest.mark.parametrize("how", ["copied", "touched", "restored", "moved and back"])
def test_an_equal_file_takes_the_next_answer(path: Path, how: str) -> None:
    with GoldFile.open(path, TOPIC) as gold:
        gold.append(line("a"))
        content = path.read_bytes()
        if how in ("copied", "restored"):
            path.unlink()
            path.write_bytes(content)
        elif how == "touched":
            os.utime(path, (1, 1))
        else:
            path.rename(path.with_suffix(".moved"))
            with pytest.raises(StorageError, match="it is not there any more"):
                gold.append(line("b"))
            path.with_suffix(".moved").rename(path)
        gold.append(line("b"))
        with pytest.raises(SpecError, match="another process has this file open"):
            GoldFile.open(path, TOPIC)
    with GoldFile.open(path, TOPIC) as gold:
        assert [each.doc_id for each in gold.lines] == ["a", "b"]
