"""The numbers of a report equal what DuckDB counts in the same labels, and its page shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import duckdb
import pytest
from finished import LABELS, ROWS, Corpus, finish, toy_fingerprints

from pipeline.cli import main
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

HOSTILE = "<script>alert(1)</script>\x1b[31m"
TOP = {"share": 0.2, "of": "toxic.p.toxic", "by": "doc.source", "smallest": 5}
RULE = {"drop_top": TOP, "on_error": "keep"}
ALL_SIZES = "count(*), sum(n_chars), sum(greatest(toxic.n_tokens, topic.n_tokens))"


@pytest.fixture
def folder(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Ninety documents of three sources in two snapshots; the last one is of the spec's model."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    for file in corpus.folder.glob("*.jsonl"):
        rows = list(map(json.loads, file.read_text().splitlines()))
        for number, row in enumerate(rows):
            row["source"] = ("web", "books", HOSTILE)[number % 3]
            row["text"] = f"{HOSTILE} {row['text']}" if row["text"].strip() else row["text"]
        rows[1]["text"] += " a special word"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": n, "question": "?", "labels": list(of)} for n, of in LABELS.items()]
    source = {"path": str(corpus.folder), "id": "id"}
    spec = load_spec(
        write_spec(name="job", tasks=tasks, input=source, output=str(tmp_path / "out"))
    )
    job = make_job(spec, Placement("cpu", "float32", 1, 1), tmp_path / "cache")
    store = LocalStore(tmp_path / "out")
    for fingerprints in (toy_fingerprints(), job.fingerprints):
        finish(store, corpus.shards(store), fingerprints)
    return tmp_path


@pytest.fixture
def spec(folder: Path, write_spec: Callable[..., Path]) -> Callable[..., str]:
    """Writes the spec, with a rule or other changes."""
    tasks = [{"name": n, "question": "?", "labels": list(of)} for n, of in LABELS.items()]

    def write(**changes: Any) -> str:
        source = {"path": str(folder / "in"), "id": "id"}
        content = {"name": "job", "tasks": tasks, "input": source, "output": str(folder / "out")}
        return str(write_spec(**content, **{"filter": RULE, **changes}))

    return write


def write_gold(folder: Path) -> str:
    """Gold by which every document of `books` is clean, whatever the answer says."""
    lines = []
    for file in (folder / "in").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            answer = answers(folder)[row["id"]]["toxic"]["label"]
            truth = "clean" if row["source"] == "books" else answer
            lines.append(json.dumps({"id": row["id"], "text": row["text"], "toxic": truth}))
    path = folder / "gold.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def answers(folder: Path) -> Mapping[str, Any]:
    rows = open_labels(str(folder / "out")).to_table().to_pylist()
    return {row["doc_id"]: row for row in rows}


def counted(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """What DuckDB counts in the labels, joined with the input's sources."""
    labels = open_labels(str(folder / "out")).to_table()  # noqa: F841 — DuckDB reads it by name
    source = f"(select id, source from '{folder}/in/*.jsonl')"
    return duckdb.sql(f"with t as (from labels join {source} on id = doc_id) {query}").fetchall()


def report(
    spec: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, Any], str]:
    """The JSON and the page."""
    page = folder / "report.html"
    assert main(["report", spec, "--to", str(page), *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result, page.read_text()


def test_the_counts_are_those_of_duckdb(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = report(spec(), folder, capsys)
    clean = {HOSTILE: HOSTILE, "web": "web", "books": "books"}
    limits = dict(
        counted(
            folder,
            """select source, quantile_disc(toxic.p.toxic::double, 0.8) from t
            where toxic.status = 'ok' group by all""",
        )
    )
    assert limits.keys() == clean.keys()
    dropped = " or ".join(
        f"(source = '{source}' and toxic.p.toxic > {limit!r})" for source, limit in limits.items()
    )
    [whole] = counted(folder, f"select {ALL_SIZES} from t")
    [gone] = counted(folder, f"select {ALL_SIZES} from t where {dropped}")
    kept = [each["documents"] for each in result["whole"]]
    assert kept == [whole[0] - gone[0], gone[0]] and sum(kept) == 3 * ROWS
    assert result["whole"][1] == dict(zip(("documents", "chars", "tokens"), gone, strict=True))
    for source in clean:
        [there] = counted(
            folder, f"select {ALL_SIZES} from t where ({dropped}) and source = '{source}'"
        )
        measures = dict(zip(("documents", "chars", "tokens"), there, strict=True))
        assert result["groups"][source][1] == measures
    tasks = {task["task"]: task for task in result["tasks"]}
    for task in ("toxic", "topic"):
        labels = dict(counted(folder, f"select {task}.label, count(*) from t group by all"))
        labels.pop(None)
        assert tasks[task]["labels"] == labels
        statuses = dict(counted(folder, f"select {task}.status, count(*) from t group by all"))
        assert tasks[task]["statuses"] == statuses
    assert f"{gone[0]:,}" in page and result["drift"]["before"] == "snapshot 00000001"


def test_every_position_of_the_threshold_counts_what_duckdb_counts(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = report(spec(), folder, capsys)
    first = result["scores"][0]
    assert (first["task"], first["label"]) == ("toxic", "toxic")  # what the rule limits
    in_page = re.search(r"<script type='application/json' id='counts'>(.*?)</script>", page)
    assert in_page is not None
    assert [each["sizes"] for each in json.loads(in_page[1])] == [
        each["sizes"] for each in result["scores"]
    ]
    for of in result["scores"]:
        score = f"{of['task']}.p.{of['label']}::double"
        for n in (0, 1, 200, 500, 501, 777, 999, 1_000):
            above = [sum(cells[n + 1 :]) for cells in of["sizes"]]
            rows = counted(
                folder,
                f"""select count(*), coalesce(sum(n_chars), 0),
                coalesce(sum(greatest(toxic.n_tokens, topic.n_tokens)), 0)
                from t where {score} > {n / 1000!r}""",
            )
            assert [tuple(above)] == rows
            groups = counted(
                folder,
                f"""select source, count(*) filter ({score} > {n / 1000!r}) from t
                where {of["task"]}.status = 'ok' group by all""",
            )
            assert {s: sum(c[n + 1 :]) for s, c in of["counts"].items()} == dict(groups)


def test_a_group_with_many_mistakes_is_flagged(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = write_gold(folder)
    result, page = report(
        spec(), folder, capsys, "--gold", gold, "--text", "text", "--term", "Special"
    )
    [of_toxic] = result["subgroups"]
    rates = {each["name"]: each for each in of_toxic["rates"]}
    assert [name for name, each in rates.items() if each["flagged"]] == ["group books"]
    called = sum(
        row["toxic"]["label"] == "toxic"
        for row in answers(folder).values()
        if int(row["doc_id"].partition("-")[2]) % 3 == 1
    )
    assert rates["group books"]["false_positives"] == called > 0
    assert rates["group web"]["rate"] == 0
    assert rates["contains Special"]["negatives"] == 3
    assert "group books</strong>: " in page and "AUROC" in page
    assert result["quality"]["tasks"]["toxic"]["rows"]["evaluated"] == 3 * (ROWS - 1)


def test_the_page_runs_nothing_of_a_text_and_fetches_nothing(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = report(spec(), folder, capsys)
    assert any(HOSTILE in (each["text"] or "") for each in result["examples"])
    assert "<script>alert" not in page and "\x1b" not in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)='(?!#|data:)", page) == []
    for kind in ("kept", "dropped", "sure", "borderline"):
        assert any(each["example"]["kind"] == kind for each in result["examples"])
    assert "blurred" in page and page.count("class='text'") == len(result["examples"])


def test_texts_to_publish_have_the_numbers_of_the_report(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = report(spec(), folder, capsys)
    kept, dropped = (each["documents"] for each in result["whole"])
    words = f"It keeps {kept} of {kept + dropped} documents and drops {dropped} "
    for text in (result["public_summary"], result["dataset_card"]):
        assert words in text
    assert words in unescape(page)
    card = result["dataset_card"]
    assert card.startswith("## Labels of job\n") and "| toxic | ? | " in card
    assert "`drop_top of toxic.p.toxic by doc.source`" in card


def test_without_a_filter_all_is_kept_and_without_gold_there_is_no_quality(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = report(spec(filter=None), folder, capsys, "--by", "topic")
    assert [each["documents"] for each in result["whole"]] == [3 * ROWS, 0]
    assert result["filter"] is None and result["quality"] is None
    assert set(result["groups"]) == {"art", "law", "sport", "null"}
    assert "The spec has no filter" in page and "--gold FILE" in page


def test_the_page_of_an_evaluation_is_this_page_with_its_gates(
    spec: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, gold = folder / "eval.html", write_gold(folder)
    command = ["eval", spec(), "--gold", gold, "--resamples", "20"]
    gates = ["--gate", "toxic.f1 >= 0", "--gate", "toxic.auroc > 1", "--precision", "0.5"]
    assert main([*command, *gates, "--html", str(page)]) == 1
    assert "FAILED: toxic.auroc > 1" in capsys.readouterr().out
    written = page.read_text()
    assert "FAILED" in written and "precision 0.5" in written and "What the filter does" in written


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--term", "x"], "--term: false positives need gold labels; write --gold FILE (got 'x')"),
        (["--by", "nothing +"], "--by: is not one SQL expression"),
        (["--by", "doc.nothing"], "filter: "),
        (["--gold", "nowhere.csv"], "--gold: "),
        (["--to", "no/such/folder/page.html"], "assay: --to: "),
    ],
)
def test_a_wrong_option_is_one_line_and_no_page_is_written(
    words: list[str],
    line: str,
    spec: Callable[..., str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["report", spec(), *words]) in (1, 2)
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(line)
    assert not list(folder.rglob("*.html"))
