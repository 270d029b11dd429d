"""The command: exit codes, and one clear line a problem."""

from __future__ import annotations

import inspect
import io
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import Assay, WriteSpec
from rich.console import Console

import pipeline
from pipeline.cli import app, main
from pipeline.cli.app import ray_reports
from pipeline.cli.parameters import flag_of
from pipeline.options import EvalOptions
from pipeline.runtime.dry_run import planned_output
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.verbs import forecast

COMMANDS = [name for name in app if not name.startswith("-")]
FLAGS = {
    verb: {name for option in app[verb].assemble_argument_collection() for name in option.names}
    for verb in COMMANDS
}


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
        ("help", "VERB: no such verb; `assay --help` shows the usage (got 'help')"),
        ("status s --zzz", "--zzz: no such option; `assay status --help` shows the usage"),
        ("check s --documents x", "--documents: write a whole number (got 'x')"),
        ("check s --documents 1.0", "--documents: write a whole number (got '1.0')"),
        ("run s --price 2", "--price: is for a dry run; add --dry-run, or leave it out (got 2.0)"),
        ("run s --dry-run --address a:1", "--address: a dry run needs no cluster; leave it out"),
        (f"export s --head {10**23}", "--head: write a whole number up to 2147483647 (got"),
        (f"gc s --keep -{10**23}", "--keep: write a whole number up to 2147483647 (got"),
        (f"export s --head {2**63}", "--head: write a whole number up to 2147483647 (got"),
        ("export s", "--to, --head: write --to to write the table, or --head N"),
        ("export s --to x.csv --head 3", "--to, --head: write --to"),
        ("export s --to x.csv --where a", "--where: is for example rows; add --head N (got 'a')"),
        ("export s --head 0", "--head: write a number above 0"),
        ("export s --head 3 --layout dolma", "--layout: is for a folder; write --to FOLDER/"),
        ("export s --to x.csv --why", "--why: is for example rows; add --head N"),
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
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_2(words: str, line: str, assay: Assay) -> None:
    assert assay(*words.split(), code=2).error.startswith(line)


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
    write_spec: WriteSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    """NaN is above no limit, so as a limit it would let everything pass."""
    assert len(NUMBERS) >= 6
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.csv").write_text("id,toxic\na,toxic\n")
    spec = write_spec(filter={"keep": "toxic.p.toxic < 0.5"})
    words = {**NEEDED.get(verb, {}), flag: value}
    printed = assay(verb, spec, *(f"{name}={of}" for name, of in words.items()), code=2)
    number = {"nan": "nan", "-inf": "-inf"}.get(value, "inf")
    [line] = [line for line in printed.err.splitlines() if line.startswith(f"{flag}: ")]
    assert line.endswith(f"(got {number})")


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
def test_help_is_in_sentences(verb: str, assay: Assay) -> None:
    shown = assay(*verb.split(), "--help").words
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


def test_the_version_is_that_of_the_distribution(assay: Assay) -> None:
    assert assay("--version").out.strip() == version("corpus-assay")


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


def test_without_a_verb_the_help_is_shown_and_the_exit_code_is_2(assay: Assay) -> None:
    assert "Usage: assay" in assay(code=2).out


@pytest.mark.parametrize(
    ("changes", "code", "line"),
    [
        ({"tsks": []}, 2, "tsks: no such key; write tasks (got []) in "),
        ({"input": {"path": "/nowhere/*.parquet"}}, 2, "input.path: names no file"),
        ({"input": {"path": "empty.jsonl"}}, 2, "input.path: the file has no row; name a file"),
        ({"input": {"path": "corpus.jsonl", "text": "body"}}, 2, "input.text: "),
        ({"input": {"path": "broken.parquet"}}, 1, "/broken.parquet: cannot be read: "),
        ({"output": "."}, 2, "input.path: "),
        ({"output": "ftp://host/labels"}, 4, "assay: output: ftp:// is not a supported store; "),
        ({"model": {"path": "/nowhere/model.gguf"}}, 2, "model.path: there is no such file"),
        ({"model": {"path": "."}}, 2, "model.path: the folder holds no .safetensors file"),
        (
            {"model": {"path": "x", "device": "tpu"}},
            2,
            "model.device: write 'auto', 'cpu' or 'cuda' (got 'tpu') in ",
        ),
    ],
)
def test_a_wrong_spec_is_one_line_and_an_exit_code(
    changes: dict[str, Any],
    code: int,
    line: str,
    write_spec: WriteSpec,
    tmp_path: Path,
    assay: Assay,
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    pq.write_table(pa.table({"text": ["x"] * 100}), tmp_path / "broken.parquet")
    broken = (tmp_path / "broken.parquet").read_bytes()[:-10]
    (tmp_path / "broken.parquet").write_bytes(broken)
    assert line in assay("run", write_spec(**changes), code=code).error


def test_rays_client_is_refused_with_what_to_write(write_spec: WriteSpec, assay: Assay) -> None:
    error = assay("run", write_spec(), "--address", "ray://127.0.0.1:1", code=2).error
    assert error.startswith("--address: Ray Data does not run through Ray's ")


def test_a_dry_run_counts_and_labels_nothing(
    write_spec: WriteSpec, tmp_path: Path, assay: Assay
) -> None:
    planned = assay("run", write_spec(), "--dry-run", "--json").json
    counts = ("documents", "shards", "missing_documents", "missing_shards", "distinct_texts")
    known = dict.fromkeys([*counts, "documents_for_model"], 1)
    assert {name: value for name, value in planned.items() if value is not None} == known
    assert not (tmp_path / "out").exists()


def test_a_dry_run_with_save_plans_cascades(
    write_spec: WriteSpec, assay: Assay, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[TaskSpec] = []

    def noted(spec: JobSpec, *others: Any) -> Any:
        tasks.extend(spec.tasks)
        return planned_output(spec, *others)

    monkeypatch.setattr(forecast, "planned_output", noted)
    assay("run", write_spec(), "--dry-run", "--save")
    assert len(tasks) == 2 and all(isinstance(task, CascadeTask) for task in tasks)


def test_ray_s_reports_of_workers_that_the_run_ended_are_dropped() -> None:
    stream = io.StringIO()
    reports = ray_reports(stream)
    print("(raylet) a worker died: out of memory", file=reports)
    print("(raylet) Task MapWorker failed.", end=" ", file=reports)
    print("The actor is dead because it was killed by `ray.kill`.", file=reports)
    print("last", end="", file=reports)
    assert stream.getvalue() == "(raylet) a worker died: out of memory\n"
    reports.close()
    assert stream.getvalue() == "(raylet) a worker died: out of memory\nlast\n"
