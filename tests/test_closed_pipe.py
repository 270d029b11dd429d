"""A command whose output is no longer read, as before `head`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from finished import Corpus, finish, toy_fingerprints, toy_spec

from pipeline.cli.app import EXIT_CLOSED_PIPE
from pipeline.stores.local import LocalStore


@pytest.mark.parametrize("words", ["--help", "show SPEC", "show SPEC --json", "check SPEC --help"])
def test_a_closed_pipe_ends_the_command_quietly(
    words: str, toy_corpus: Corpus, tmp_path: Path
) -> None:
    store, spec = LocalStore(tmp_path / "out"), tmp_path / "spec.json"
    finish(store, toy_corpus.shards(store), toy_fingerprints())
    content = toy_spec(tmp_path)
    content["input"]["path"] = str(toy_corpus.folder)
    spec.write_text(json.dumps(content))
    # — the reader has ended before anything is written
    line = (
        f"{{ sleep .2; {sys.executable} -m pipeline {words.replace('SPEC', str(spec))}; }} | true"
    )
    line += '; echo "${PIPESTATUS[0]}"'
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == (f"{EXIT_CLOSED_PIPE}\n", "")
