"""The command: exit codes, and one clear line a problem."""

from __future__ import annotations

import inspect
import io
import json
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import pipeline
from pipeline.cli import app, main
from pipeline.cli.app import _RayReports
from pipeline.cli.parameters import flag_of
from pipeline.options import EvalOptions

COMMANDS = [name for name in app if not name.startswith("-")]
FLAGS = {
    verb: {name for option in app[verb].assemble_argument_collection() for name in option.names}
    for verb in COMMANDS
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def failing(file: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code of `assay run`, and its lines on standard error."""
    code = main(["run", str(file)])
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("frob", "VERB: no such verb; `assay --help` shows the usage (got 'frob')"),
        ("chek s.yaml", "VERB: no such verb; write check (got 'chek')"),
        ("diff", "SPEC: missing; add it: `assay diff --help` shows the usage"),
        ("status s extra", "assay status: takes fewer arguments; "),
        (
            "check s --docments 3",
            "--docments: no such option; write --documents (got '--docments')",
        ),
        ("run --hlep", "--hlep: no such option; write --help (got '--hlep')"),
        ("help", "VERB: no such verb; write --help (got 'help')"),
        ("status s --zzz", "--zzz: no such option; `assay status --help` shows the usage"),
        ("check s --documents x", "--documents: write a whole number (got 'x')"),
        ("check s --documents 1.0", "--documents: write a whole number (got '1.0')"),
        ("run s --price 2", "--price: is for a dry run; add --dry-run, or leave it out (got 2.0)"),
        ("run s --dry-run --address a:1", "--address: a dry run needs no cluster; leave it out"),
        (f"export s --head {10**23}", "--head: write a whole number up to 2147483647 (got"),
        (f"gc s --keep -{10**23}", "--keep: write a whole number up to 2147483647 (got"),
        (f"export s --head {2**63}", "--head: write a whole number up to 2147483647 (got"),
        ("review s --task t --to g --port 65536", "--port: write a whole number from 0 to 65535"),
        (f"review s --task t --to g --port {10**20}", "--port: write a whole number up to"),
        ("review s --task t --to g --seed -1", "--seed: write a whole number from 0 to"),
        ("run s --price x", "--price: write a number (got 'x')"),
        ("status s --json=3", "--json: write no value (got '3')"),
        ("run s --max-hours 0", "--max-hours: write a number above 0 (got 0.0)"),
        ("review s --to x --documents 0", "--documents: write a number above 0 (got 0)"),
        ("gc s --keep", "--keep: missing; add it: "),
        ("filter s", "--to: missing; name a folder"),
        ("filter s --to x --on-error dorp", "--on-error: write one of fail, keep, drop (got"),
        ("audit s", "VERB: audit was removed; `assay review --by audit` draws the sample, `assay "),
        (
            "eval s --gate q",
            "--gate: is a key of the spec; write publish: {gates: [TASK.METRIC >= ",
        ),
        ("fit s --gold g --column a=b", "--column: is a key of the spec; write gold: {columns: {"),
        ("report s --id=x", "--id: is a key of the spec; write gold: {id: COLUMN} (got '--id')"),
        ("run s --gold g", "--gold: is a key of the spec; write gold: {path: FILE} (got '--gold')"),
        ("run s --max-psi=1", "--max-psi: is a key of the spec; write publish: {max_psi: NUMBER}"),
        ("show s", "VERB: show was removed; write `assay export SPEC --head N` (got 'show')"),
        ("cascade s", "VERB: cascade was removed; write `assay fit SPEC --recall X --precision X`"),
        ("fit s --document", "--document: was removed; leave it out: `assay fit` tries the"),
        ("fit s --recall 0.9", "--precision: missing; write a number above 0 and below 1"),
        (
            "fit s --recall .9 --precision .9 --gold g",
            "--gold: is for readouts; leave it out for a",
        ),
        ("plan s", "VERB: plan was removed; write `assay run SPEC --dry-run` (got 'plan')"),
        ("pull s", "VERB: pull was removed; `assay check` fetches the model (got 'pull')"),
        ("calibrate s --task t", "VERB: calibrate was removed; fit thresholds or a readout with"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_2(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line)


NUMBERS = [
    (verb, option.name)
    for verb in COMMANDS
    for option in app[verb].assemble_argument_collection()
    if float in (option.hint, *get_args(option.hint))
]
NEEDED = {
    "eval": {"--gold": "gold.csv"},
    "fit": {"--gold": "gold.csv"},
    "gc": {"--keep": "1"},
}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(("verb", "flag"), NUMBERS)
def test_a_number_that_is_not_finite_is_refused_by_each_option(
    verb: str,
    flag: str,
    value: str,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NaN is above no limit, so as a limit it would let everything pass."""
    assert len(NUMBERS) >= 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.csv").write_text("id,toxic\na,toxic\n")
    spec = str(write_spec(filter={"keep": "toxic.p.toxic < 0.5"}))
    words = {**NEEDED.get(verb, {}), flag: value}
    assert main([verb, spec, *(f"{name}={of}" for name, of in words.items())]) == 2
    number = {"nan": "nan", "-inf": "-inf"}.get(value, "inf")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{flag}: ")]
    assert len(lines) == 1 and lines[0].endswith(f"(got {number})")


def test_each_option_that_an_error_names_has_a_flag() -> None:
    sources = "".join(path.read_text() for path in Path(*pipeline.__path__).glob("**/*.py"))
    calls = re.findall(r'\b(?:Option|option_error)\(\s*"(\w+)"(?:, "(\w+)"\))?', sources)
    names = {name for call in calls for name in call if name}
    assert {"gold", "tasks", "older_than_days", "before"} <= names
    assert {flag_of(name) for name in names} <= set().union(*FLAGS.values())


def test_a_verb_that_writes_a_file_replaces_one_only_with_overwrite() -> None:
    writing = {verb for verb, flags in FLAGS.items() if "--to" in flags}
    without = writing - {v for v, f in FLAGS.items() if "--overwrite" in f}
    assert without == {"filter", "review"}  # a filter writes a new folder; a review adds lines


def test_options_may_be_repeated_and_a_single_value_is_the_last() -> None:
    words = "eval s --gold g --task a --task b --recall .5 --recall .6"
    _, bound, _ = app.parse_args(words.split())
    assert bound.arguments["options"] == EvalOptions("g", ("a", "b"), recall=0.6)


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_is_in_sentences(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Usage: assay" in shown and (not verb or "--json" in shown) and "None" not in shown


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_names_each_default_that_is_a_value_and_no_other(verb: str) -> None:
    text = io.StringIO()
    app([verb, "--help"], console=Console(file=text, width=400))
    shown = text.getvalue()
    options = [o for o in app[verb].assemble_argument_collection() if o.name.startswith("--")]
    values = {str(option.field_info.default) for option in options}
    values -= {"None", "False", "()", str(inspect.Parameter.empty)}
    assert set(re.findall(r"\[default: (.*?)\]", shown)) == values
    assert "default: no " not in shown and "default: none" not in shown


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("corpus-assay")


def test_the_shell_completes_verbs_and_options_after_the_completion_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["--install-completion", "--shell", "bash"]) == 0
    script = tmp_path / ".local/share/bash-completion/completions/assay"
    asked = """source "$1"; complete() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _assay assay "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}"; }
        complete assay che; complete assay run --retry"""
    shown = subprocess.check_output(["bash", "-c", asked, "bash", str(script)], text=True)
    assert shown.split() == ["check", "--retry-failed"]


def test_without_a_verb_the_help_is_shown_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "Usage: assay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tsks": []}, "tsks: no such key; write tasks (got []) in "),
        ({"input": {"path": "/nowhere/*.parquet"}}, "input.path: names no file"),
        ({"model": {"path": "/nowhere/model.gguf"}}, "model.path: there is no such file"),
        ({"model": {"path": "."}}, "model.path: the folder holds no .safetensors file"),
        (
            {"model": {"path": "x", "device": "tpu"}},
            "model.device: write 'auto', 'cpu' or 'cuda' (got 'tpu') in ",
        ),
    ],
)
def test_a_wrong_spec_is_one_line_and_exit_2(
    changes: dict[str, Any],
    line: str,
    write_spec: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, errors = failing(write_spec(**changes), capsys)
    assert code == 2 and len(errors) == 1 and errors[0].startswith(line), errors


def test_rays_client_is_refused_with_what_to_write(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_spec()), "--address", "ray://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("--address: Ray Data does not run through Ray's ")


def test_a_missing_spec_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = failing("/nowhere/spec.yaml", capsys)
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(
        "/nowhere/spec.yaml: cannot be read: No such file or directory; write "
    )


def test_a_missing_column_is_named_with_those_there_are(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "corpus.jsonl")
    code, errors = failing(write_spec(input={"path": path, "text": "body"}), capsys)
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith("input.text: ") and "it has: id, text" in errors[0]


def test_an_empty_corpus_is_a_spec_error(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    code, errors = failing(write_spec(input={"path": str(empty)}), capsys)
    assert code == 2 and len(errors) == 1 and "has no row" in errors[0]


def test_an_unreadable_file_is_named_and_exit_1(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"text": ["x"] * 100}), broken)
    broken.write_bytes(broken.read_bytes()[:-10])
    code, errors = failing(write_spec(input={"path": str(broken)}), capsys)
    assert code == 1 and len(errors) == 1 and str(broken) in errors[0]


def test_a_store_that_cannot_be_written_is_refused_with_exit_4(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = failing(write_spec(output="ftp://host/labels"), capsys)
    assert code == 4 and len(errors) == 1 and "ftp://" in errors[0]


def test_an_output_that_holds_the_input_is_not_labelled_itself(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = failing(write_spec(output=str(tmp_path)), capsys)
    assert code == 2 and len(errors) == 1 and errors[0].startswith("input.path: ")


def test_a_dry_run_counts_and_labels_nothing(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_spec()), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned == {
        "documents": 1,
        "shards": 1,
        "missing_documents": 1,
        "missing_shards": 1,
        "distinct_texts": 1,
        "missing_cells": 2,
        "documents_for_model": 1,
        "tokens_per_document": None,
        "docs_per_s": None,
        "price": None,
        "tokens": None,
        "seconds": None,
        "cost": None,
    }
    assert not (tmp_path / "out").exists()


def test_check_gives_prompts_that_a_plain_forward_agrees_with(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert main(["check", str(write_spec()), "--prompts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exactness"]["answers"] == 2 and found["exactness"]["argmax_flips"] == 0
    assert found["exactness"]["max_abs_dp"] <= 1e-4
    assert [prompt["task"] for prompt in found["prompts"]] == ["toxic", "topic"]
    network = AutoModelForCausalLM.from_pretrained(found["model"]["path"], dtype=torch.float32)
    for prompt in found["prompts"]:
        assert "Hello." in prompt["text"] and prompt["doc_id"] == "a"
        logits = network(torch.tensor([prompt["token_ids"]])).logits[0, -1]
        for first in prompt["labels"].values():
            assert 0 < logits.softmax(-1)[first].sum() < 1


def test_check_shows_people_the_labels_tokens_and_the_prompts(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_spec()), "--prompts"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("exact: ")
    assert "art 'a', law 'l', sport 's'" in shown and "in float32  p differs by at most" in shown
    assert "Hello." in shown and "Rude?" in shown


def test_ray_s_reports_of_workers_that_the_run_ended_are_dropped() -> None:
    stream = io.StringIO()
    reports = _RayReports(stream)
    print("(raylet) a worker died: out of memory", file=reports)
    print("(raylet) Task MapWorker failed.", end=" ", file=reports)
    print("The actor is dead because it was killed by `ray.kill`.", file=reports)
    print("last", end="", file=reports)
    assert stream.getvalue() == "(raylet) a worker died: out of memory\n"
    reports.close()
    assert stream.getvalue() == "(raylet) a worker died: out of memory\nlast\n"
