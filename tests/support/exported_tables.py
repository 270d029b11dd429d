"""Exports to tables: what they have, and what others do in the middle of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest
from finished import Corpus, finish_folder, toy_spec
from pyiceberg.utils.config import Config

from pipeline.options import ExportOptions
from pipeline.spec.parse import parse_spec
from pipeline.verbs import table_exports
from pipeline.verbs.export import export
from pipeline.verbs.hub_dataset import write_export

Row = tuple[Any, ...]


def labelled_with_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A labelled corpus of 90 documents, and a catalog `local` of Iceberg."""
    Corpus(tmp_path / "in", tmp_path / "cache").write()
    finish_folder(tmp_path)
    for name, value in settings(tmp_path).items():
        monkeypatch.setenv(name, value)
    # — which pyiceberg reads when it is imported
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return tmp_path


def settings(folder: Path) -> dict[str, str]:
    """The catalog in pyiceberg's own configuration."""
    prefix = "PYICEBERG_CATALOG__LOCAL__"
    return {
        f"{prefix}TYPE": "sql",
        f"{prefix}URI": f"sqlite:///{folder}/catalog.db",
        f"{prefix}WAREHOUSE": f"file://{folder}/warehouse",
    }


def run(folder: Path, to: str, spec: Mapping[str, Any] | None = None, **options: Any) -> Any:
    parsed = parse_spec(json.dumps(spec or toy_spec(folder)))
    chosen = ExportOptions(to, **options)
    return write_export(parsed, chosen, cache_dir=folder / "cache", command="assay export")


def expected(folder: Path, **options: Any) -> list[Row]:
    """The rows of a plain export, with its columns by name."""
    to = ExportOptions(str(folder / "plain.parquet"), overwrite=True, **options)
    export(parse_spec(json.dumps(toy_spec(folder))), to, cache_dir=folder / "cache")
    return rows_of([str(folder / "plain.parquet")])


def rows_of(files: list[str]) -> list[Row]:
    """The rows of Parquet files, with their columns by name."""
    described = duckdb.sql(f"describe from read_parquet({files})").fetchall()
    names = ", ".join(f'"{name}"' for name in sorted(name for name, *_ in described))
    return duckdb.sql(f"select {names} from read_parquet({files}) order by doc_id, path").fetchall()


def in_the_middle(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object], before: str = "own_errors"
) -> list[int]:
    """Acts when an export has read the table, and has not written it; the attempts so far."""
    attempts: list[int] = []
    acts: list[bool] = []
    real = getattr(table_exports, before)

    def acting(*words: Any) -> Any:
        if not acts:  # — what acts may be an export, too
            acts.append(True)
            attempts.append(len(attempts))
            act(attempts[-1])
            acts.clear()
        return real(*words)

    monkeypatch.setattr(table_exports, before, acting)
    return attempts


KILLED = """
import os, signal, sys
from importlib import import_module
module, owner, name = sys.argv[1:4]
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if owner == "LabelTable":  # all rows are with the library
    rows = import_module(module).LabelTable.rows
    kill_after = lambda labels: (row for part in (rows(labels), map(kill, [0])) for row in part)
    import_module(module).LabelTable.rows = kill_after
else:
    setattr(getattr(import_module(module), owner), name, kill)
from pipeline.cli import main
main(sys.argv[4:])
"""
COMMITS = {
    "delta": ("pipeline.verbs.label_table", "LabelTable", "rows"),
    "iceberg": ("pyiceberg.catalog.sql", "SqlCatalog", "commit_table"),
    "lance": ("lance", "LanceDataset", "commit"),
}


def kill_before_the_commit(folder: Path, to: str) -> None:
    """Runs the command in a process that is killed when the rows are written."""
    (folder / "spec.json").write_text(json.dumps(toy_spec(folder)))
    [words] = [words for kind, words in COMMITS.items() if to.startswith(kind)]
    command = [sys.executable, "-c", KILLED, *words, "export", str(folder / "spec.json")]
    environment = {**os.environ, **settings(folder), "ASSAY_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ended = subprocess.run([*command, "--to", to], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
