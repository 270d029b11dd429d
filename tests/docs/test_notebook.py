"""The notebook of the manual runs from the first cell to the last.

A small random model answers; in `make test-slow`, the demo's model does.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stages import run_without_ray

from pipeline.cli import main

REPOSITORY = Path(__file__).parents[2]
MODEL, LAYERS = "../../models/smollm2-135m-instruct.gguf", "--layers 8"
NOTEBOOK = json.loads((REPOSITORY / "docs" / "quickstart.ipynb").read_text())


def cells(kind: str) -> Iterator[str]:
    """The source of each cell of one kind."""
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == kind:
            yield "".join(cell["source"])


def run_cell(source: str, names: dict[str, Any]) -> object:
    """What the cell shows: the value of its last line. A command runs in this process."""
    if source.startswith("!"):
        assay, *words = shlex.split(source[1:].replace("\\\n", ""))
        assert assay == "assay" and main(words) == 0
        return None
    *lines, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        exec(source, names)
        return None
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a checkout, with the current folder where Jupyter starts a notebook."""
    (tmp_path / "jobs").symlink_to(REPOSITORY / "jobs")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    run_without_ray(monkeypatch)
    return tmp_path


def run_cells(sources: Iterable[str]) -> dict[str, Any]:
    """The names that the cells define, after the last one has run."""
    names: dict[str, Any] = {}
    shown = [run_cell(source, names) for source in sources]
    assert (120, True, 1) in shown  # rows, complete, snapshot
    assert len(names["labels"].to_table()) == 120
    return names


@pytest.mark.usefixtures("checkout")
def test_the_notebook_runs_in_order_with_a_random_model(model_folder: Path) -> None:
    code = "\0".join(cells("code"))
    assert code.count(MODEL) == code.count(LAYERS) == 1
    code = code.replace(MODEL, str(model_folder)).replace(LAYERS, "--layers 2")
    run_cells(code.split("\0"))


@pytest.mark.slow
def test_the_notebook_fits_a_good_readout_of_the_demo_s_model(
    checkout: Path, smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "models").mkdir()
    (checkout / "models" / Path(MODEL).name).symlink_to(smollm2_gguf)
    names = run_cells(cells("code"))
    rows = names["labels"].to_table().to_pylist()
    assert {row["toxic"]["label"] for row in rows} == {"toxic", "clean"}
    printed = capsys.readouterr().out
    auroc = re.search(r"^ *AUROC +(\d\.\d+)", printed, re.MULTILINE)
    assert auroc is not None and float(auroc[1]) > 0.8, printed


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_the_links_of_the_notebook_open() -> None:
    links = [link for text in cells("markdown") for link in re.findall(r"\]\(([^)#]+)", text)]
    assert links and all((REPOSITORY / "docs" / link).exists() for link in links)
