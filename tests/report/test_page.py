"""A page is written whole to any URL, and what is missing for it is named before the work."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.cli import main
from pipeline.errors import SpecError, StorageError
from pipeline.report.page import page_target, write


def test_a_page_is_written_to_a_url_and_replaces_the_one_before() -> None:
    for html in ("<p>one</p>", "<p>二</p>"):
        write(html, page_target("memory://pages/report.html", {}, flag="--to", plots=True))
        assert fsspec.filesystem("memory").cat("/pages/report.html").decode() == html


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "report.html"
    write("<p>one</p>", page_target(str(path), {}, flag="--to", plots=False))

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"report\.html: cannot be written: .*the disk is full"):
        write("<p>two</p>", page_target(str(path), {}, flag="--to", plots=False))
    assert path.read_text() == "<p>one</p>" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("url", ["memory://pages/", "{folder}", "{folder}/sub/"])
def test_a_folder_is_no_page(url: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--html: is a folder; name a file \(got '"):
        page_target(url.format(folder=tmp_path), {}, flag="--html", plots=False)


@pytest.mark.parametrize("words", [["report", "--to"], ["eval", "--html"]])
def test_without_matplotlib_a_page_with_plots_is_refused_before_any_work(
    words: list[str],
    write_spec: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def without(name: str) -> object:
        return None if name == "matplotlib" else find_spec(name)

    monkeypatch.setattr("pipeline.report.page.find_spec", without)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    verb, flag = words
    command = [verb, str(write_spec()), flag, str(tmp_path / "page.html")]
    assert main([*command, "--gold", "nowhere.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{flag}: the plots of the page need matplotlib: pip install 'corpus-a")
    if verb == "report":  # without gold there are no plots: the next error is another
        assert main(command) == 1
        assert "has no snapshot" in capsys.readouterr().err
