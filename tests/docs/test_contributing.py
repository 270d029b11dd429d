"""The code of CONTRIBUTING adds a format and a command: nothing else is needed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from json_outputs import generate
from whole_shards import all_documents

from pipeline.cli import app, main, outputs
from pipeline.errors import SpecError, StorageError
from pipeline.filters.writers import kept_rows
from pipeline.sources import formats, records
from pipeline.sources.formats import READERS, Reader
from pipeline.sources.source import cut, find_objects, first_rows
from pipeline.spec.schema import Columns

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
CODE = {
    first: f"# {first}\n{rest}"
    for first, rest in re.findall(r"^```python\n# (.*?)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
}


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """Writes a block of the page to the file that the page names, for this test."""

    def make(path: str) -> ModuleType:
        name = path.removesuffix(".py").replace("/", ".")
        file = tmp_path / Path(path).name
        file.write_text(CODE[path])
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def verse(module_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("pipeline/sources/verse.py")
    (line,) = re.findall(r"`(Reader\(.*\))`", PAGE.read_text())
    toy = eval(line, {"Reader": Reader, **vars(module)})
    monkeypatch.setattr(formats, "READERS", (*READERS, toy))


@pytest.fixture
def words_verb(
    module_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    (line,) = re.findall(r'`("words": .*?)`', PAGE.read_text())
    monkeypatch.setattr(generate, "OUTPUTS", eval(f"{{{line}}}"))
    module_of("pipeline/verbs/words.py")
    exec(CODE["at the end of pipeline/cli/outputs.py"], dict(vars(outputs)))
    yield
    del app["words"]


@pytest.mark.usefixtures("verse")
def test_a_new_format_is_found_cut_read_previewed_and_filtered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "a.verse"
    path.write_bytes("a|one\r\nb|zwei ü\nwithout\nc|\nd|long".encode() + b" text" * 20)
    (folder / "notes.txt").write_text("of another kind")
    monkeypatch.setattr(records, "BLOCK_BYTES", 5)
    monkeypatch.setattr(records, "MAX_ROW_BYTES", 60)
    (file,) = find_objects(str(folder), tmp_path / "cache")
    shards = cut(file, Columns("text", "id"), 600)
    assert [shard.piece.start_row for shard in shards] == [0, 1, 2, 3, 4]
    rows = [row for shard in shards for row in all_documents(shard).to_pylist()]
    assert [(row["doc_id"], row["text"]) for row in rows[:2]] == [("a", "one"), ("b", "zwei ü")]
    statuses = [row["status"].partition(":")[0] for row in rows]
    assert statuses == ["ok", "ok", "error", "empty", "error"]
    assert [row.values["id"] for row in first_rows(str(path), "verse", {}, 2)] == [b"a", b"b"]
    kept = kept_rows(shards[1], {}, np.array([True]))
    assert json.loads(kept) == {"text": "zwei ü", "id": "b"}
    path.write_bytes(b"a|one\n")
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shards[0])


@pytest.mark.usefixtures("verse")
def test_errors_name_a_new_format_among_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"supported are \.parquet .* \.verse \.verse\.gz"):
        find_objects(str(tmp_path / "none.verse"), tmp_path / "cache")


@pytest.mark.usefixtures("words_verb")
def test_a_new_verb_is_one_module_and_one_function(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text(
        '{"text": "one two"}\n{"text": "three"}\n{"text": null}\n'
    )
    spec = write_spec(input={"path": str(tmp_path / "texts.jsonl"), "text": "text"})
    assert main(["words", str(spec)]) == 0
    assert capsys.readouterr().out == "3 words in 2 documents\n"
    assert main(["words", str(spec), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"documents": 2, "words": 3}
    assert main(["words", "none.yaml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["words", "--help"]) == 0
    assert "Count the words of the input's documents." in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "words" in capsys.readouterr().out
