"""A command whose output is no longer read, as before `head`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from finished import Corpus, finish, toy_fingerprints, toy_spec

from pipeline.cli.app import Exit
from pipeline.stores.local import LocalStore

HEAD = "export SPEC --head 9"


def without_warnings(errors: str) -> str:
    """Without the lines that the toy answers are of another version than the spec's."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if " to an older wording of the spec" not in line)


@pytest.fixture
def labelled(toy_corpus: Corpus, tmp_path: Path) -> Path:
    """The spec of a labelled corpus."""
    store, spec = LocalStore(tmp_path / "out"), tmp_path / "spec.json"
    finish(store, toy_corpus.shards(store), toy_fingerprints())
    content = toy_spec(tmp_path)
    content["input"]["path"] = str(toy_corpus.folder)
    spec.write_text(json.dumps(content))
    return spec


@pytest.mark.parametrize("words", ["--help", f"{HEAD} --json"])
def test_a_closed_pipe_ends_the_command_quietly(words: str, labelled: Path) -> None:
    # — the reader has ended before anything is written
    command = f"{sys.executable} -m pipeline {words.replace('SPEC', str(labelled))}"
    line = f'{{ sleep .2; {command}; }} | true; echo "${{PIPESTATUS[0]}}"'
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, without_warnings(ended.stderr)) == (f"{Exit.CLOSED_PIPE}\n", "")


def shell(words: str, spec: Path, redirected: str, **environment: str) -> tuple[int, str, str]:
    line = f"{sys.executable} -m pipeline {words.replace('SPEC', str(spec))} {redirected}"
    process = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return process.returncode, process.stdout, without_warnings(process.stderr)


FULL, CLOSED = "No space left on device", "Bad file descriptor"


@pytest.mark.parametrize(
    "words, redirected, reason, unbuffered",
    [
        ("--version", ">/dev/full", FULL, ""),
        (f"{HEAD} --json", ">/dev/full", FULL, "1"),
        ("--help", ">&-", CLOSED, "1"),
        (HEAD, ">&-", CLOSED, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_and_a_failure(
    words: str, redirected: str, reason: str, unbuffered: str, labelled: Path
) -> None:
    code, _, errors = shell(words, labelled, redirected, PYTHONUNBUFFERED=unbuffered)
    assert (code, errors) == (1, f"assay: standard output: cannot be written: {reason}\n")


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&- <&-"])
def test_without_standard_error_the_exit_code_still_reports_the_result(
    redirected: str, labelled: Path
) -> None:
    code, shown, _ = shell(HEAD, labelled, redirected)
    assert code == 0 and "toxic" in shown
    assert shell("export nosuch.yaml --head 9", labelled, redirected)[:2] == (2, "")
    page = labelled.with_name("page.html")
    code, shown, _ = shell(f"report SPEC --json --to {page}", labelled, redirected)
    assert code == 0 and json.loads(shown)["snapshot"] == 1 and page.exists()


def test_a_text_that_the_encoding_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("编号,文本\n1,今天全场五折\n2,昨晚的比赛\n", encoding="utf-8")
    words = f"init {tmp_path}/in.csv --to {tmp_path}/new.yaml"
    code, shown, errors = shell(words, tmp_path, "", PYTHONIOENCODING="cp1252")
    assert code == 0 and r"\u6587\u672c" in shown, errors
