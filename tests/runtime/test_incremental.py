"""Each change costs what it changes: documents that reach the model, and objects written.

One output lives through a year of changes. What the model read is counted in tokens, which the
engine counts where they enter the model; an oracle works out which texts are new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

TOXIC = {"name": "toxic", "question": "Rude?", "labels": {"toxic": ["Yes", "yes"], "clean": ["No"]}}
TOPIC = {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]}
MOOD = {"name": "mood", "question": "Happy?", "labels": ["glad", "sad"]}
CALM = {"name": "calm", "question": "Calm?", "labels": ["calm", "angry"]}


@dataclass
class Life:
    """An output, its input, and the spec as it is now."""

    folder: Path
    content: dict[str, Any]
    files: dict[str, list[str]] = field(default_factory=dict)  # texts by file name

    def write(self, name: str, texts: list[str]) -> None:
        self.files[name] = texts
        lines = (json.dumps({"id": f"{name}-{t[:9]}", "text": t}) for t in texts)
        (self.folder / "in" / name).write_text("\n".join(lines))

    def delete(self, name: str) -> None:
        del self.files[name]
        (self.folder / "in" / name).unlink()

    def spec(self, **changes: Any) -> JobSpec:
        return parse_spec(yaml.safe_dump({**self.content, **changes}))

    def run(self, **changes: Any) -> Outcome:
        spec = self.spec(**changes)
        return run(spec, cache_dir=self.folder / "cache")

    def snapshot(self, outcome: Outcome) -> dict[str, Any]:
        name = f"{outcome.snapshot:08d}.json"
        snapshot: dict[str, Any] = json.loads(
            (Path(outcome.output) / "snapshots" / name).read_text()
        )
        return snapshot

    def rows(self, outcome: Outcome, task: str) -> list[dict[str, Any]]:
        keys = [e["key"] for e in self.snapshot(outcome)["files"] if e["task"] == task]
        tables = [pq.read_table(Path(outcome.output) / key) for key in keys]
        rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        return rows

    def objects(self) -> int:
        out = Path(self.content["output"])
        return sum(1 for top in ("documents", "labels") for _ in out.glob(f"{top}/**/*.parquet"))


def texts(name: str, count: int = 24) -> list[str]:
    return [f"{i:03d} of {name} " + "says a little. " * (1 + i % 7) for i in range(count)]


@pytest.fixture(scope="module")
def life(on_ray: bool, tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Life:
    folder = tmp_path_factory.mktemp("life")
    (folder / "in").mkdir()
    content = {
        "name": "life",
        "model": {"path": str(model_folder), "dtype": "float32"},
        "input": {"path": str(folder / "in"), "id": "id", "shard_bytes": 6_000},
        "output": str(folder / "out"),
        "documents": {"max_tokens": 512},
        "tasks": [TOXIC, TOPIC],
    }
    made = Life(folder, content)
    made.write("a.jsonl", texts("a"))
    made.write("b.jsonl", texts("b"))
    return made


def read_tokens(files: Mapping[str, list[str]]) -> int:
    return sum(len(text.encode()) for of_file in files.values() for text in of_file)


@pytest.mark.usefixtures("runner")
def test_each_change_costs_what_it_changes(
    life: Life,
    tmp_path: Path,
    make_network: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    table: list[tuple[str, int, int]] = []
    edited = texts("b")
    edited[3], edited[20] = "003 of b is new", "020 of b is new as well"
    edited = [*edited[1:], "024 of b is added"]

    def step(change: str, expected: dict[str, list[str]], new: bool, **changes: Any) -> Outcome:
        """Runs, and compares with what ought to have been read."""
        before = life.objects()
        outcome = life.run(**changes)
        asked = sum(len(of_file) for of_file in expected.values())
        assert outcome.complete and outcome.tally.asked_rows == asked, change
        assert outcome.tally.cost.prefix_tokens_computed == read_tokens(expected), change
        assert outcome.tally.created == life.objects() - before, change
        assert bool(outcome.tally.created) == new, change
        snapshot = life.snapshot(outcome)
        assert snapshot["rows"] == outcome.rows == sum(map(len, life.files.values())), change
        table.append((change, asked, outcome.tally.created))
        return outcome

    first = step("first run", life.files, new=True)
    assert step("nothing", {}, new=False).snapshot == first.snapshot == 1
    life.write("c.jsonl", texts("c"))
    step("a new file", {"c": texts("c")}, new=True)
    life.write("b.jsonl", edited)
    outcome = step(
        "3 of 24 documents edited or added, 1 dropped",
        {"b": [edited[2], edited[19], edited[-1]]},
        new=True,
    )
    assert outcome.tally.rows == len(edited)
    life.delete("a.jsonl")
    outcome = step("a file deleted", {}, new=False)
    assert not [row for row in life.rows(outcome, "topic") if row["doc_id"].startswith("a.")]
    life.write("a.jsonl", texts("a"))
    step("the same file again", {}, new=False)
    life.content["tasks"] = [{**TOXIC, "question": "Is it rude?"}, TOPIC]
    step("one task reworded", life.files, new=True)
    life.content["tasks"] += [MOOD]
    step("a task added", life.files, new=True)
    life.content["tasks"] = life.content["tasks"][1:]
    outcome = step("a task removed", {}, new=False)
    assert set(life.snapshot(outcome)["tasks"]) == {"topic", "mood"}
    step("another spec asks one of the tasks", {}, new=False, name="other", tasks=[TOXIC])
    revision = tmp_path / "revision"
    network = make_network("llama")
    network.lm_head.weight.data.neg_()
    network.save_pretrained(revision)
    byte_tokenizer.save_pretrained(revision)
    step(
        "another revision of the model",
        life.files,
        new=True,
        model={"path": str(revision), "dtype": "float32"},
    )
    step("the old revision", {}, new=False)
    short = {name: [text[:40] for text in of_file] for name, of_file in life.files.items()}
    step("another truncation", short, new=True, documents={"max_tokens": 40})
    life.write("c.jsonl", texts("c")[:-1])
    step("a document dropped", {}, new=True)
    edited_again = [*life.files["c.jsonl"][:-1], "023 of c is edited"]
    life.write("c.jsonl", edited_again)
    life.content["tasks"] += [CALM]
    # — the edited text is read once, for the old tasks and the new one
    outcome = step("a document edited and a task added", life.files, new=True)
    assert outcome.tally.rows == outcome.tally.status.total() == outcome.rows
    assert_as_if_computed_anew(life)
    print(
        "\n".join(f"{change}: {asked} documents, {made} objects" for change, asked, made in table)
    )


def assert_as_if_computed_anew(life: Life) -> None:
    """What was taken over is what a run on an empty output computes."""
    lived, anew = life.run(), life.run(output=str(life.folder / "anew"))
    for task in ("topic", "mood"):
        old, new = life.rows(lived, task), life.rows(anew, task)
        assert [row["doc_id"] for row in old] == [row["doc_id"] for row in new]
        for left, right in zip(old, new, strict=True):
            assert left["label"] == right["label"] and left["n_tokens"] == right["n_tokens"]
            assert np.allclose(list(left["p"].values()), list(right["p"].values()), atol=1e-6)
            assert abs(left["mass"] - right["mass"]) < 1e-6
