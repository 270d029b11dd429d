"""The numbers of a report equal what DuckDB counts in the same labels, and its page shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import duckdb
import pytest
from browsers import fits_into_its_window, opened_browser, serious_findings
from calls import Assay, WriteSpec
from finished import ROWS, Corpus, finish, toy_fingerprints, toy_spec
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pipeline.ledger.dataset import open_labels
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

HOSTILE = "<script>alert(1)</script>\x1b[31m"
TOP = {"share": 0.2, "of": "toxic.p.toxic", "by": "doc.source", "smallest": 5}
RULE = {"drop_top": TOP, "on_error": "keep"}
Report = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def folder(tmp_path: Path, write_spec: WriteSpec) -> Path:
    """Ninety documents of three sources in two snapshots; the last one is of the spec's model."""
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    for file in corpus.folder.glob("*.jsonl"):
        rows = list(map(json.loads, file.read_text().splitlines()))
        for number, row in enumerate(rows):
            row["source"] = ("web", "books", HOSTILE)[number % 3]
            row["text"] = f"{HOSTILE} {row['text']}" if row["text"].strip() else row["text"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = load_spec(spec_file(tmp_path, write_spec))
    job = make_job(spec, Placement("cpu", "float32", 1, 1), tmp_path / "cache")
    store = LocalStore(tmp_path / "out")
    for fingerprints in (toy_fingerprints(), job.fingerprints):
        finish(store, corpus.shards(store), fingerprints)
    return tmp_path


def spec_file(folder: Path, write_spec: WriteSpec, **changes: Any) -> Path:
    """Writes the spec, with a rule or other changes."""
    content = {key: value for key, value in toy_spec(folder).items() if key != "model"}
    return write_spec(**content, **{"filter": RULE, **changes})


@pytest.fixture
def report(folder: Path, write_spec: WriteSpec, assay: Assay) -> Report:
    """Reports on the spec with these changes: the JSON and the page."""

    def call(*words: object, **changes: Any) -> tuple[dict[str, Any], str]:
        spec, page = spec_file(folder, write_spec, **changes), folder / "report.html"
        printed = assay("report", spec, "--to", page, *words, "--overwrite", "--json")
        return printed.json, page.read_text()

    return call


def write_gold(folder: Path) -> str:
    """Gold by which every document of `books` is clean, whatever the answer is."""
    rows = open_labels(str(folder / "out")).to_table().to_pylist()
    lines, rows_by_id = [], {row["doc_id"]: row for row in rows}
    for file in (folder / "in").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            answer = rows_by_id[row["id"]]["toxic"]["label"]
            truth = "clean" if row["source"] == "books" else answer
            lines.append(json.dumps({"id": row["id"], "text": row["text"], "toxic": truth}))
    path = folder / "gold.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def counted(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """What DuckDB counts in the labels, joined with the input's sources."""
    labels = open_labels(str(folder / "out")).to_table()  # noqa: F841 — DuckDB reads it by name
    source = f"(select id, source from '{folder}/in/*.jsonl')"
    return duckdb.sql(f"with t as (from labels join {source} on id = doc_id) {query}").fetchall()


def test_the_counts_of_tasks_are_those_of_duckdb(report: Report, folder: Path) -> None:
    result, _ = report()
    assert result["scores"][0]["label"] == "toxic"  # what the rule limits
    tasks = {task["task"]: task for task in result["tasks"]}
    for task in ("toxic", "topic"):
        labels = dict(counted(folder, f"select {task}.label, count(*) from t group by all"))
        labels.pop(None)
        assert tasks[task]["labels"] == labels
        statuses = dict(counted(folder, f"select {task}.status, count(*) from t group by all"))
        assert tasks[task]["statuses"] == statuses
    assert result["drift"]["before"] == "snapshot 00000001"


def test_the_page_states_the_rule_what_it_drops_and_runs_nothing_of_a_text(
    report: Report, folder: Path
) -> None:
    result, page = report("--gold", write_gold(folder))
    kept, dropped = (each["documents"] for each in result["whole"])
    assert f"{kept} of {kept + dropped} documents are kept, {dropped} are dropped " in unescape(
        page
    )
    rule = "toxic.p.toxic is at most the threshold of the highest 20 % of its group by doc.source"
    assert f"Rule: <code>{rule}</code>" in page
    assert result["quality"]["tasks"]["toxic"]["rows"]["evaluated"] == 3 * (ROWS - 1)
    assert "AUROC" in page
    assert any(HOSTILE in (each["text"] or "") for each in result["examples"])
    assert "<script>alert" not in page and "\x1b" not in page
    assert {each["example"]["kind"] for each in result["examples"]} == {
        *("kept", "dropped", "least sure")
    }
    assert "blurred" in page and page.count("class='text'") == len(result["examples"])


def test_without_a_filter_all_is_kept_and_without_gold_there_is_no_quality(report: Report) -> None:
    result, page = report("--by", "topic", filter=None)
    assert [each["documents"] for each in result["whole"]] == [3 * ROWS, 0]
    assert result["filter"] is None and result["quality"] is None
    assert set(result["groups"]) == {"art", "law", "sport", "null"}
    assert "The spec has no filter" in page and "There are no gold labels" in page
    assert "Documents by group" in page and "dropped</th>" not in page


def test_groups_do_not_change_the_thresholds_of_the_rule(report: Report, folder: Path) -> None:
    """Documents without a group, here those without a topic, count for the thresholds."""
    rule = {"drop_top": {"share": 0.2, "of": "n_chars"}, "on_error": "keep"}
    plain, _ = report(filter=rule)
    grouped, page = report("--by", "topic", "--by", "doc.source", filter=rule)
    assert grouped["whole"] == plain["whole"]
    pairs = counted(folder, "select distinct coalesce(topic.label, 'null'), source from t")
    assert set(grouped["groups"]) == {f"{topic}, {source}" for topic, source in pairs}
    assert grouped["by"] == "topic.label, doc.source" and grouped["by"] in page


def test_a_rule_that_stops_at_missing_answers_is_reported(report: Report) -> None:
    _, page = report(filter={"keep": "toxic.p.toxic < 0.5"})
    assert "The filter stops, because 3 of 90 documents have no answer (empty 3)" in page
    assert "on_error is fail" in page


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--by +", "--by: is not one SQL expression"),
        ("--by doc.nothing", "--by: "),
        ("--by toxic.p", "--by: has several values; name one, such as toxic.label"),
        ("--gold nowhere.csv", "nowhere.csv: there is no such file"),
        ("--to ftpp://host/x.html", "--to: cannot be opened: "),
        ("--to .", "--to: is a folder; name a file (got '.')"),
        ("--to spec.yaml", "--to: exists; write another name, or add --overwrite"),
    ],
)
def test_a_wrong_option_is_one_line_and_no_page_is_written(
    words: str,
    line: str,
    folder: Path,
    write_spec: WriteSpec,
    assay: Assay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    spec = spec_file(folder, write_spec)
    error = assay("report", spec, *words.split(), code=2).error
    assert error.startswith(line) and not list(folder.rglob("*.html"))


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    with opened_browser() as opened:
        yield opened


@pytest.mark.slow
def test_in_a_browser_the_page_works_with_keyboard_and_screen_reader_and_asks_no_server(
    browser: webdriver.Chrome, report: Report, folder: Path
) -> None:
    report("--gold", write_gold(folder))
    browser.get(f"file://{folder}/report.html")
    for width in (400, 1_280):
        browser.set_window_size(width, 900)
        assert fits_into_its_window(browser)

    browser.find_element(By.CSS_SELECTOR, "details:has(.text) summary").send_keys(Keys.ENTER)
    text = browser.find_element(By.CSS_SELECTOR, ".text")
    blurred = "return getComputedStyle(arguments[0]).filter"
    assert browser.execute_script(blurred, text) == "blur(6px)"
    browser.execute_script("arguments[0].focus()", text)
    assert browser.execute_script(blurred, text) == "none"
    browser.find_element(By.ID, "show-texts").send_keys(Keys.SPACE)
    last = browser.find_elements(By.CSS_SELECTOR, ".text")[-1]
    assert browser.execute_script(blurred, last) == "none"

    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert last.value_of_css_property("display") == "block"
    browser.execute_script("document.getElementById('show-texts').checked = false")
    assert last.value_of_css_property("display") == "none"
    bar = browser.find_element(By.CSS_SELECTOR, ".bar span")
    assert bar.value_of_css_property("print-color-adjust") == "exact"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

    asked = {
        message["params"]["request"]["url"].partition(":")[0]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    }
    assert asked <= {"file", "data"}
    assert browser.get_log("browser") == []  # neither errors nor what the policy refused
    assert serious_findings(browser) == []
