"""The recipes' specs are valid, and the job of a filter is `assay run`, then `assay filter`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filtered import ids, labelled
from finished import toy_spec

from jobs.toxicity_filter import main as job
from pipeline.ledger.cells import Committed
from pipeline.ledger.cuts import Cuts
from pipeline.options import FilterOptions, RunOptions
from pipeline.runtime.plan import Plan
from pipeline.spec.parse import load_spec
from pipeline.verbs.forecast import Forecast

SPECS = Path(__file__).parents[2] / "jobs" / "specs"
KEEP = "toxic.p.toxic < 0.5"
Steps = list[tuple[str, Any, bool]]


@pytest.mark.parametrize("spec", [file.name for file in sorted(SPECS.glob("*.yaml"))])
def test_a_spec_of_the_recipes_is_valid(spec: str) -> None:
    assert load_spec(SPECS / spec).tasks


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps that the job takes, in place of their work; a spec `broken.yaml` fails."""
    taken: Steps = []

    def step(verb: str, code: int) -> Any:
        def call(spec: str, *, options: Any, as_json: bool, dry_run: bool = False) -> int:
            taken.append((verb, options, dry_run))
            print(json.dumps({"of": verb}) if as_json else f"table of {verb}")
            return 1 if spec == "broken.yaml" else code

        return call

    monkeypatch.setattr("jobs.toxicity_filter.run", step("run", 0))
    monkeypatch.setattr("jobs.toxicity_filter.filter_corpus", step("filter", 3))
    return taken


@pytest.mark.parametrize(
    "words",
    ["s.yaml --to there --on-error drop --max-hours 2", "--to there --on-error drop s.yaml"],
)
def test_the_job_labels_and_then_filters(
    words: str, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(words.split()) == 3
    bound = RunOptions(max_hours=2 if "hours" in words else None)
    filtering = FilterOptions(to="there", on_error="drop")
    assert steps == [("run", bound, False), ("filter", filtering, False)]
    assert capsys.readouterr().out == "table of run\ntable of filter\n"


def test_with_json_the_job_prints_one_value_and_a_step_that_fails_ends_it(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(["s.yaml", "--to", "there", "--json"]) == 3 and len(steps) == 2
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"run": {"of": "run"}, "filter": {"of": "filter"}}
    assert job(["broken.yaml", "--to", "there", "--json"]) == 1 and len(steps) == 3
    assert json.loads(capsys.readouterr().out) == {"run": {"of": "run"}, "filter": None}


def test_a_dry_run_of_the_job_labels_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec has no model: the plan of the labelling is a stand-in."""
    planned = Plan(Cuts((), {}), Committed({}, {}, {}, {}), ())
    names = ("documents", "shards", "missing_documents", "missing_shards", "documents_for_model")
    unknown = ("distinct_texts", "tokens_per_document", "docs_per_s", "price")
    counts: dict[str, Any] = dict.fromkeys(names, 0) | dict.fromkeys(unknown)
    forecast = Forecast(plan=planned, **counts)
    monkeypatch.setattr("pipeline.verbs.forecast.forecast", lambda *_, **__: forecast)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    folder = labelled(tmp_path / "corpus", ["en", "de", None])
    for name, output in (("labelled", "out"), ("new", "none")):
        rule = {"keep": KEEP, "on_error": "drop"}
        content = toy_spec(folder, filter=rule, output=str(folder / output))
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    before = sorted(folder.rglob("*"))
    dry_run = ["--dry-run", "--json"]
    assert job([str(tmp_path / "labelled.json"), *dry_run]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["missing_documents"] == 0
    assert shown["filter"]["sizes"]["kept"]["documents"] == len(ids(folder, KEEP)) > 0
    assert job([str(tmp_path / "new.json"), *dry_run]) == 0
    assert json.loads(capsys.readouterr().out)["filter"] is None
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["s.yaml", "--to", "there", "--on-eror", "drop"], "--on-eror: no such option"),
        (["s.yaml", "--to", "there", "--on-error", "dorp"], "--on-error: "),
        (["s.yaml"], "--to: missing; name a folder"),
    ],
)
def test_wrong_arguments_end_the_job_before_its_first_step(
    words: list[str],
    line: str,
    steps: Steps,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert job(words) == 2 and not steps
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line)
