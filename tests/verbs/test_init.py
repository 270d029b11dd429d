"""A new spec: its columns are those that a person would choose, and it is never in the way."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import Assay
from encoders import write_encoder
from hypothesis import given
from hypothesis import strategies as st
from stages import run_without_ray

from pipeline.filters.run import preview
from pipeline.options import FilterOptions, InitOptions, PresetName
from pipeline.spec.parse import load_spec, parse_spec
from pipeline.verbs.init import _yaml, init
from pipeline.verbs.run import judged_run

PROSE = [f"This is sentence {n} of a longer text, and it has words." for n in range(30)]
UUIDS = [f"{n:08x}-00aa-4bcd-9eff-{n * 7919:012x}" for n in range(30)]
TITLES = [f"Title {n}" for n in range(30)]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def table(name: str, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), name)
    return name


def test_every_format_gets_its_columns_and_a_spec_that_is_valid(corpus: Path) -> None:
    proposal = init(str(corpus), InitOptions(to="new.yaml"))
    assert (proposal.text, proposal.id, proposal.files) == ("text", "id", 1)
    spec = load_spec("new.yaml")
    assert (spec.input.path, spec.input.text, spec.input.id) == (str(corpus), "text", "id")
    assert spec.name in ("corpus", "file", "lines", "stream") and spec.output == f"out/{spec.name}"


def test_a_folder_of_text_files_gets_the_columns_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "my notes").mkdir()
    for number in range(3):
        (tmp_path / "my notes" / f"{number}.txt").write_text("Some words.")
    proposal = init("my notes", InitOptions())
    spec = load_spec("spec.yaml")
    assert (spec.name, spec.input.text, spec.input.id) == ("my_notes", "text", "id")
    assert (proposal.files, proposal.size_bytes, proposal.formats) == (3, 33, ("txt",))


def test_a_tar_file_gets_the_columns_of_its_members_that_hold_text() -> None:
    with tarfile.open("t.tar", "w") as archive:
        for key, prose in zip(UUIDS, PROSE, strict=True):
            for name, data in (("jpg", b"\xff\xd8\xff" * 2000), ("txt", prose.encode())):
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    proposal = init("t.tar", InitOptions())
    assert (proposal.text, proposal.id, proposal.sample_rows) == ("txt", "__key__", 30)
    assert [column.name for column in proposal.columns] == ["__key__", "txt"]


@pytest.mark.parametrize(
    ("columns", "text", "id"),
    [
        ({"title": TITLES, "body": PROSE, "id": list(range(30))}, "body", "id"),
        ({"headline": TITLES, "story": PROSE}, "story", None),
        ({"comment_text": TITLES, "reply": PROSE[:1] * 30}, "comment_text", None),
        ({"hash": ["f" * 64] * 30, "sms": PROSE}, "sms", None),
        ({"post_id": list(range(30)), "price": list(range(30)), "text": PROSE}, "text", "post_id"),
        ({"price": list(range(30)), "text": PROSE}, "text", None),
        ({"id": [1] * 30, "row": UUIDS, "text": PROSE}, "text", None),
        ({"id": [None, *range(29)], "text": PROSE}, "text", None),
        ({"userId": list(range(30)), "f": [0.5] * 30, "文": ["日本語です"] * 30}, "文", "userId"),
        ({"text": PROSE, "id": PROSE}, "text", "id"),
        ({"nested": [["a"]] * 30, "raw": [b"a b"] * 30, "text": PROSE}, "text", None),
    ],
)  # fmt: skip
def test_columns_are_proposed_by_name_and_length(
    columns: dict[str, list[Any]], text: str, id: str | None
) -> None:
    proposal = init(table("data.parquet", **columns), InitOptions())
    assert (proposal.text, proposal.id) == (text, id)
    spec = load_spec("spec.yaml")
    assert (spec.input.text, spec.input.id) == (text, id)


def test_the_caller_names_columns_and_model() -> None:
    data = table("data.parquet", a=PROSE, b=PROSE, c=[1] * 30)
    init(data, InitOptions(text="b", id="c", model="org/model: 2"))
    spec = load_spec("spec.yaml")
    assert (spec.input.text, spec.input.id, spec.model.path) == ("b", "c", "org/model: 2")


KINDS_OF_TOXICITY = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
# The forms of the published classifiers, which are not at hand: random ones have the same.
HEADS: dict[str, dict[str, Any]] = {
    "edu": {"num_labels": 1, "id2label": None, "label2id": None, "problem_type": "regression"},
    "toxicity": {
        "id2label": dict(enumerate(KINDS_OF_TOXICITY)),
        "label2id": None,
        "problem_type": "multi_label_classification",
    },
}
HEADS["web"] = HEADS["edu"]


@pytest.mark.parametrize("preset", get_args(PresetName))
def test_a_preset_is_a_spec_that_runs_with_a_head_of_its_form(
    preset: PresetName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = table("data.parquet", text=PROSE), None
    if preset in HEADS:
        model = str(write_encoder(tmp_path / "head", max_position_embeddings=512, **HEADS[preset]))
    init(data, InitOptions(preset=preset, model=model))
    spec = load_spec("spec.yaml")
    run_without_ray(monkeypatch)
    assert judged_run(spec, cache_dir=tmp_path / "cache").complete
    judged = preview(spec, FilterOptions(), cache_dir=tmp_path / "cache")
    assert judged.documents == len(PROSE) and not judged.failed
    init(data, InitOptions(preset=preset, to="published.yaml"))
    published = load_spec("published.yaml").model.path
    assert (published == "") == (model is None)
    above = Path("published.yaml").read_text().split("input:")[0]
    licences = {"edu": ["Apache"], "toxicity": ["Apache"], "language": ["CC BY-SA"]}
    for name in licences.get(preset, ["Apache", "CC BY-SA"]):
        assert name in above
    assert published in above


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("data.parquet --preset all", "--preset: "),
        (
            "data.parquet --preset language --model m",
            "--model: preset language needs no model; leave",
        ),
        ("data.parquet --to old.yaml", "--to: exists; write another name, or add --overwrite"),
        ("data.parquet --text body", "--text: no such column; the columns are: text"),
        ("data.parquet --id key", "--id: no such column; the columns are: text"),
        ("nothing.csv", "DATA: names no file; supported are "),
        ("old.yaml", "DATA: this kind of file is not supported; supported are .parquet "),
        (
            "numbers.parquet",
            "DATA: no column seems to hold texts; name one with --text; the columns are: n",
        ),
        ("semicolons.csv", "DATA: its columns are separated by ';'; separate them by commas in "),
        ("empty.csv", "DATA: the file has no row; name a file with rows"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_exit_2(words: str, line: str, assay: Assay) -> None:
    table("data.parquet", text=PROSE)
    table("numbers.parquet", n=[1, 2])
    Path("empty.csv").write_text("")
    Path("semicolons.csv").write_text("id;text\n1;some text\n")
    Path("old.yaml").write_text("mine")
    assert assay("init", *words.split(), code=2).error.startswith(line)
    assert Path("old.yaml").read_text() == "mine" and not Path("spec.yaml").exists()


def test_what_was_found_is_shown_with_the_next_commands_and_is_in_the_json(assay: Assay) -> None:
    data = table("data.parquet", text=PROSE)
    shown = assay("init", data, "--to", "new.yaml").out
    assert "none found; the id of a document is the hash of its text" in shown
    assert all(f"assay {verb} new.yaml" in shown for verb in ("review", "fit", "run"))
    value = assay("init", table("data.parquet", text=PROSE, id=UUIDS), "--json").json
    expected = {"file": "spec.yaml", "path": data, "formats": ["parquet"], "files": 1, "id": "id"}
    assert value | expected == value
    assert [column["name"] for column in value["columns"]] == ["text", "id"]


def test_the_output_is_outside_the_documents(tmp_path: Path) -> None:
    table("data.parquet", text=PROSE)
    init(".", InitOptions())
    assert not Path(load_spec("spec.yaml").output).resolve().is_relative_to(tmp_path)


def test_paths_are_relative_to_the_folder_of_the_spec(tmp_path: Path, model_folder: Path) -> None:
    data = table("data.parquet", text=PROSE)
    Path("model").symlink_to(model_folder)
    proposal = init(data, InitOptions(to="specs/new.yaml", model="model"))
    assert (proposal.path, proposal.output) == ("../data.parquet", "out/data")
    of_url = init(f"file://{tmp_path}/*.parquet", InitOptions(to="specs/url.yaml"))
    assert of_url.path == load_spec("specs/url.yaml").input.path == f"{tmp_path}/*.parquet"
    spec = load_spec("specs/new.yaml")
    for path, expected in (
        (spec.input.path, "data.parquet"),
        (spec.output, "specs/out/data"),
        (spec.model.path, "model"),
    ):
        assert os.path.abspath(path) == str(tmp_path / expected)


@given(st.text(min_size=1, max_size=30))
def test_any_string_is_the_same_in_the_spec(text: str) -> None:
    spec = (
        "{name: a, model: {path: m}, input: {path: i}, output: o, tasks: [{name: a, question: q, "
        f"labels: [x, y]}}], prompt: {{system: {_yaml(text)}}}}}"
    )
    assert parse_spec(spec).prompt.system == text


def test_a_run_of_the_new_spec_says_that_the_readout_is_to_be_fitted_first(
    model_folder: Path, assay: Assay
) -> None:
    Path("data.csv").write_text('id,text\n1,one line\n2,"two\nlines"\n')
    assay("init", "data.csv", "--model", model_folder)
    assert [*load_spec("spec.yaml").tasks[0].labels] == ["toxic", "clean"]
    line = assay("run", "spec.yaml", "--dry-run", code=2).err.splitlines()[-1]
    assert line.startswith("tasks.0.readout: the file cannot be read: ")
    assert "`assay fit` makes one" in line
