"""Datasets of the Hub, on a server that has its routes: one commit, a card, and the errors."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from calls import Assay
from fake_hub import FakeHub
from filtered import SCORE, command_of, content_of, filtered_with, kept, labelled, spec_of
from finished import finish_folder
from fsspec.utils import glob_translate
from huggingface_hub import constants

import pipeline
from pipeline.errors import SpecError, UnavailableError
from pipeline.options import ExportOptions, FilterOptions
from pipeline.spec.parse import parse_spec
from pipeline.stores.hub import upload
from pipeline.verbs import hub_dataset
from pipeline.verbs.export import export
from pipeline.verbs.hub_dataset import write_export, write_filter
from pipeline.verbs.label_table import ExportResult

URL, REPO = "hf://datasets/org/labels", "datasets/org/labels"
KEEP = f"{SCORE} < 0.6"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return labelled(tmp_path / "corpus", ("en", "de"))


def exported(folder: Path, url: str = URL, **options: Any) -> ExportResult:
    spec, chosen = spec_of(folder, keep=KEEP), ExportOptions(url, **options)
    command = f"assay export my.yaml --to {url}"
    return write_export(spec, chosen, cache_dir=folder / "cache", command=command)


def filtered(folder: Path, keep: str) -> Any:
    spec, options = spec_of(folder, keep=keep), FilterOptions(URL)
    return pipeline.filter(spec, options=options, cache_dir=folder / "cache")


def split_of(files: Mapping[str, bytes], config: str = "default") -> list[str]:
    """The files of the split of a configuration, as the card has them."""
    header = yaml.safe_load(files["README.md"].decode().split("---")[1])
    [own] = [each for each in header["configs"] if each["config_name"] == config]
    [split] = own["data_files"]
    assert split["split"] == "train"
    globs = [re.compile(glob_translate(glob)) for glob in split["path"]]  # as the Hub reads them
    return sorted(path for path in files if any(glob.fullmatch(path) for glob in globs))


def test_an_export_is_one_commit_with_a_card(folder: Path, hub: FakeHub, tmp_path: Path) -> None:
    result = exported(folder)
    assert len(hub.commits[REPO]) == 2 and REPO in hub.private  # the first one is empty
    _, files = hub.files(REPO, "main")
    assert {*files} == {"README.md", *split_of(files)} and result.to == URL
    read = pa.concat_tables(pq.read_table(io.BytesIO(files[path])) for path in split_of(files))
    to = ExportOptions(str(tmp_path / "plain.parquet"))
    export(spec_of(folder, keep=KEEP), to, cache_dir=folder / "cache")
    plain = pq.read_table(tmp_path / "plain.parquet")
    assert read.sort_by("doc_id").equals(plain.sort_by("doc_id"))
    card = files["README.md"].decode()
    assert "90 documents, snapshot 1 of `job`" in card and "- `toxic` (toxic, clean)" in card
    assert f"assay export my.yaml --to {URL}" in card
    exported(folder)
    assert len(hub.commits[REPO]) == 2  # nothing has changed
    exported(folder, layout="dolma")
    assert {path.split("/")[0] for path in hub.files(REPO, "main")[1]} == {
        "README.md",
        "documents",
        "attributes",
    }


def test_a_filter_has_what_is_kept_and_another_one_takes_its_place(
    folder: Path, hub: FakeHub
) -> None:
    result = filtered(folder, KEEP)
    _, files = hub.files(REPO, "main")
    lines = [line for path in split_of(files) for line in files[path].splitlines()]
    expected = filtered_with(folder, keep=KEEP)
    assert len(lines) == len(kept(expected)) == result.documents - result.dropped
    dropped = [pq.read_table(io.BytesIO(files[p])) for p in split_of(files, "dropped")]
    assert sum(table.num_rows for table in dropped) == result.dropped
    assert {*files} == {"README.md", *split_of(files), *split_of(files, "dropped")}
    card = files["README.md"].decode()
    assert f"keep is false: {KEEP}" in card and str(folder) not in card
    filtered(folder, f"{SCORE} < 0.5")
    after = hub.files(REPO, "main")[1]
    assert len(hub.commits[REPO]) == 3 and not {*split_of(files)} & {*after}


@pytest.mark.parametrize("url", ["hf://org/model", "hf://datasets/org", f"{URL}/data/x.parquet"])
def test_another_place_of_the_hub_is_refused(folder: Path, hub: FakeHub, url: str) -> None:
    with pytest.raises(SpecError, match=r"to: write hf://datasets/ORG/NAME"):
        exported(folder, url)
    assert not hub.requests


@pytest.mark.parametrize("path", ["", "/data/*.parquet", "@main/**/*.parquet"])
def test_the_dataset_that_is_the_input_is_refused(folder: Path, hub: FakeHub, path: str) -> None:
    own = {**content_of(folder, keep=KEEP), "input": {"path": URL + path, "id": "id"}}
    spec, places = parse_spec(json.dumps(own)), {"cache_dir": folder, "command": "assay"}
    with pytest.raises(SpecError, match=r"^to: (is in|contains) the input of the spec"):
        write_export(spec, ExportOptions(URL), **places)
    with pytest.raises(SpecError, match=r"^to: (is in|contains) the input of the spec"):
        write_filter(spec, FilterOptions(f"{URL}@main"), **places)
    assert not hub.requests


def test_a_filter_goes_to_the_hub_that_its_own_options_name(
    folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(folder, keep=KEEP, storage_options={"endpoint": hub.url})
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    pipeline.filter(spec, options=FilterOptions(URL), cache_dir=folder / "cache")
    assert len(hub.commits[REPO]) == 2


def test_a_card_has_the_hashes_of_all_classifiers_and_the_whole_command(
    folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    hashes = {"toxic": {"onnx": "1f"}, "topic": {"onnx": "2e"}}
    stored = lambda _store, _contents, task: {"models": {}, "model": hashes[task]}  # noqa: E731
    monkeypatch.setattr(hub_dataset, "what_answered", stored)
    spec_file = command_of(folder, keep=KEEP)[1]
    words = "export", spec_file, "--to", URL, "--columns", "id", "--columns", "lang"
    assay(*words, "--layout", "dolma")
    card = hub.files(REPO, "main")[1]["README.md"].decode()
    assert "- classifier, onnx: `1f`\n- classifier, onnx: `2e`\n" in card
    options = f"--to={URL} --columns=id --columns=lang --layout=dolma"
    assert f"assay export {spec_file} {options}\n" in card


def test_a_card_has_what_the_snapshot_leaves_out(folder: Path, hub: FakeHub) -> None:
    left_out = "The snapshot leaves out 0 documents and 2 files of the input."
    exported(folder)
    assert "leaves out" not in hub.files(REPO, "main")[1]["README.md"].decode()
    finish_folder(folder, missing_files=2)
    exported(folder)
    assert left_out in hub.files(REPO, "main")[1]["README.md"].decode()
    filtered(folder, KEEP)
    card = hub.files(REPO, "main")[1]["README.md"].decode()
    assert left_out in card and "The rule keeps documents where" in card


def test_a_branch_that_does_not_exist_is_a_mistake_of_the_option(
    folder: Path, hub: FakeHub
) -> None:
    with pytest.raises(SpecError, match=r"to: the repository on the Hub has no such branch"):
        exported(folder, f"{URL}@absent")


def test_a_conflict_is_retried_and_a_token_that_may_not_write_is_one_line(
    folder: Path, hub: FakeHub, assay: Assay
) -> None:
    hub.conflicts = 1
    exported(folder)
    assert len(hub.commits[REPO]) == 2
    hub.conflicts = 99
    with pytest.raises(UnavailableError, match="others keep committing to it; run again"):
        exported(folder, with_text=True)
    hub.closed.add(REPO)
    words = "export", command_of(folder, keep=KEEP)[1], "--to", URL, "--with-text"
    line = assay(*words, code=2).err.splitlines()[-1]
    assert line.startswith("--to: the token may not write to org/labels; set HF_TOKEN")
    assert len(hub.commits[REPO]) == 2


def test_many_files_are_one_commit(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "to" / "data").mkdir(parents=True)
    (tmp_path / "to" / "no.txt").write_text("is not of the dataset")
    for number in range(300):
        (tmp_path / "to" / "data" / f"{number}.csv").write_text(str(number))
    hub.push(REPO, {"data/old.csv": b"old", "of others.txt": b"stays"})
    upload(tmp_path / "to", URL, {}, message="Labels", replaces=["data/*"])
    _, files = hub.files(REPO, "main")
    assert len(hub.commits[REPO]) == 2
    assert {*files} == {"of others.txt", *(f"data/{number}.csv" for number in range(300))}
