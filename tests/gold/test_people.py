"""People's labels: a crash loses nothing, and the current answer is a person's last one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gold_lines import QUALITY, THEMES, TOPIC, line, written
from hypothesis import given
from hypothesis import strategies as st
from judged import with_gold

from pipeline.errors import AssayError, SpecError, StorageError
from pipeline.gold.labels import read_gold
from pipeline.gold.people import GoldFile, GoldLine, Shown
from pipeline.spec.parse import load_spec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

WriteSpec = Callable[..., Path]


@pytest.fixture
def spec_file(write_spec: WriteSpec) -> Path:
    names = {"name", "kind", "question", "labels"}
    tasks = [task.model_dump(include=names, mode="json") for task in (TOPIC, THEMES, QUALITY)]
    return write_spec(tasks=tasks)


def test_what_was_appended_is_read_again(path: Path) -> None:
    lines = [line("a"), line("b", "law"), line("b", None, action="skip", by="bob")]
    written(path, *lines)
    with GoldFile.open(path, TOPIC) as gold:
        assert gold.lines == tuple(lines)
        assert list(gold.answers.items()) == [(each.key, each) for each in lines]
    fields = json.loads(path.read_bytes().splitlines()[0])
    assert fields["shown"] == {
        "question": "Which?",
        "labels": ["art", "law"],
        "fp": None,
        "p": None,
        "blind": False,
        "chosen": "",
        "audit": None,
    }


ACTIONS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["ann", "bob"]),
    st.sampled_from(["art", "law", "skip", "flag", "undo"]),
)


@given(st.lists(ACTIONS, max_size=30), st.integers(0, 30))
def test_current_answers_equal_a_model_in_memory(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, str, str]], reopened: int
) -> None:
    path = tmp_path_factory.mktemp("gold") / "gold.jsonl"
    history: dict[tuple[str, str], list[str]] = {}
    gold = GoldFile.open(path, TOPIC)
    for number, (document, by, word) in enumerate(actions):
        if number == reopened:
            gold.close()
            gold = GoldFile.open(path, TOPIC)
        is_label = word in TOPIC.labels
        action = "label" if is_label else word
        gold.append(line(document, word if is_label else None, by=by, action=action))
        words = history.setdefault((f"hash-{document}", by), [])
        words.append(word)
        if word == "undo":
            del words[-2:]
    gold.close()
    with GoldFile.open(path, TOPIC) as gold:
        assert len(gold.lines) == len(actions)
        answers = {key: each.label or each.action for key, each in gold.answers.items()}
    assert answers == {key: words[-1] for key, words in history.items() if words}


WRITER = """
import sys
from pipeline.gold.people import GoldFile
from tests.support.gold_lines import TOPIC, line
with GoldFile.open(sys.argv[1], TOPIC) as gold:
    for number in range(10_000):
        gold.append(line(str(number)))
        print(number, flush=True)
"""


def test_a_killed_writer_loses_no_line_that_it_reported(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for reported in writer.stdout:
            if int(reported) == 20:
                with pytest.raises(SpecError, match="another process has this file open"):
                    GoldFile.open(path, TOPIC)
                writer.kill()
                break
        numbers = writer.stdout.read().split()
    assert writer.returncode == -signal.SIGKILL
    last = int(numbers[-1]) if numbers else 20
    with GoldFile.open(path, TOPIC) as gold:  # — the lock ended with the process
        documents = [each.doc_id for each in gold.lines]
        assert documents == list(map(str, range(len(documents)))) and len(documents) > last
        gold.append(line("after"))


def test_a_full_disk_leaves_the_file_as_it_was(path: Path) -> None:
    written(path, line("a"))
    whole = path.read_bytes()
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pipeline.errors import StorageError
from pipeline.gold.people import GoldFile
from tests.support.gold_lines import TOPIC, line
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(whole) + 40}, {len(whole) + 40}))
with GoldFile.open({str(path)!r}, TOPIC) as gold:
    try:
        gold.append(line("b"))
    except StorageError as error:
        print(error, len(gold.lines))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot be written" in result.stdout and result.stdout.endswith(" 1\n"), result
    assert path.read_bytes() == whole


def test_lines_of_other_tasks_stay_as_they_are(path: Path) -> None:
    written(path, line("a", ("law",), task=THEMES), task=THEMES)
    before = path.read_bytes()
    reworded = QuestionTask(name="topic", question="Other?", labels=["art", "law"])
    written(path, replace(line("a"), shown=Shown.of(reworded)), task=reworded)
    with GoldFile.open(path, THEMES) as gold:
        assert [each.label for each in gold.lines] == [("law",)]
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": "sport"}, "is not a label of task topic, which has art, law"),
        ({"label": ["art"]}, "write one label"),
        ({"label": None}, "is not an action of a person"),
        ({"action": "delete"}, "action: Input should be 'label'"),
        ({"at": "2026-01-31T09:00:00+01:00"}, "write the time in UTC"),
        ({"by": ""}, "by is empty"),
        ({"shown": {"question": "Old?", "labels": ["art", "law"]}}, "question was another"),
        ({"shown": {"question": "Which?", "labels": ["law", "art"]}}, "labels was another"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_with_its_number(
    path: Path, spec_file: Path, change: dict[str, Any], reason: str
) -> None:
    written(path, line("a"), line("b"))
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes() + b'{"torn'
    path.write_bytes(before)
    with pytest.raises(SpecError) as refused:
        GoldFile.open(path, TOPIC)
    assert f"to {path}, line 2: " in str(refused.value) and reason in str(refused.value)
    assert path.read_bytes() == before
    with pytest.raises(SpecError) as refused:
        read_gold(str(path), load_spec(spec_file))
    assert f"{path}, row 2: " in str(refused.value) and reason in str(refused.value)


@pytest.mark.parametrize(
    ("bad", "task"),
    [
        (line("a", "sport"), TOPIC),
        (line("a", ("art", "art"), task=THEMES), THEMES),
        (line("a", "art", task=THEMES), THEMES),
        (line("a", "3", task=QUALITY), QUALITY),
        (line("a"), QUALITY),
    ],
)
def test_a_bad_line_is_not_appended(path: Path, bad: GoldLine, task: TaskSpec) -> None:
    with GoldFile.open(path, task) as gold, pytest.raises(SpecError):
        gold.append(bad)
    assert path.read_bytes() == b""


def test_a_file_that_cannot_be_opened_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "gold.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot be opened as a gold file"):
        GoldFile.open(tmp_path / "gold.jsonl", TOPIC)


def test_verbs_read_the_current_labels_of_all_tasks_by_content_hash(
    path: Path, spec_file: Path
) -> None:
    written(
        path,
        line("a", "art"),
        line("a", "law", by="bob"),  # — contradicts
        line("b", "art"),
        line("b", "art", by="bob"),  # — repeats
        line("c", None, action="skip"),
        line("d", "art"),
        line("d", None, action="undo"),
        line("d", "law"),
        line("e", "law"),
        line("e", None, action="flag"),
    )
    written(path, line("d", "2", task=QUALITY), task=QUALITY)
    spec = load_spec(spec_file)
    gold = read_gold(str(path), spec)
    assert gold.counts.joined_by == "content_hash" and gold.kind("topic") == "people"
    assert gold.keys == ("hash-a", "hash-b", "hash-d")
    assert gold.tasks["topic"].truth.tolist() == [-1, 0, 1]
    assert gold.tasks["quality"].truth.tolist() == [-1, -1, 2]
    assert (gold.counts.repeated, gold.counts.contradictory, gold.counts.ties) == (
        2,
        2,
        ("hash-a",),
    )
    # — a review names documents, tasks and labels as the spec does, whatever its `gold` has
    other = with_gold(spec, text="body", columns={"topic": "subject"}, values={"art": "law"})
    assert read_gold(str(path), other).keys == gold.keys


@pytest.mark.parametrize("last", [line("a", None, action="undo"), line("b", None, action="skip")])
def test_a_file_without_a_label_of_the_tasks_is_not_called_empty(
    path: Path, spec_file: Path, last: GoldLine
) -> None:
    written(path, line("a", None, action="flag"), last)
    written(path, line("a", "2", task=QUALITY), task=QUALITY)
    with pytest.raises(SpecError, match="people gave no labels for topic, themes in this file"):
        read_gold(str(path), load_spec(spec_file), ["topic", "themes"])


@pytest.mark.parametrize("chosen", ["", "random", "table", "label-studio"])
def test_gold_of_other_documents_is_of_people(path: Path, spec_file: Path, chosen: str) -> None:
    written(path, line("a", chosen=chosen), line("b", "law", chosen="random"))
    assert read_gold(str(path), load_spec(spec_file)).kind("topic") == "people"


def test_only_the_task_whose_documents_were_chosen_is_named(path: Path, spec_file: Path) -> None:
    written(path, line("a", chosen="uncertain"))
    written(path, line("a", "2", task=QUALITY, chosen="random"), task=QUALITY)
    gold = read_gold(str(path), load_spec(spec_file))
    assert (gold.kind("topic"), gold.kind("quality")) == ("chosen", "people")


def test_skipped_and_undone_documents_do_not_change_the_kind_of_gold(
    path: Path, spec_file: Path
) -> None:
    written(
        path,
        line("a", chosen="random"),
        line("b", None, action="skip", chosen="uncertain"),
        line("c", chosen="uncertain"),
        line("c", None, action="undo", chosen="uncertain"),
    )
    assert read_gold(str(path), load_spec(spec_file)).kind("topic") == "people"


@pytest.mark.parametrize("task", [TOPIC, THEMES])
@pytest.mark.parametrize(("sample", "other"), [("x", None), (None, "x"), ("x", "y")])
def test_a_file_of_an_audit_takes_no_answer_to_another_document(
    path: Path, sample: str | None, other: str | None, task: TaskSpec
) -> None:
    written(path, line("a", sample=sample))
    before = path.read_bytes()
    label = ["art"] if task is THEMES else "art"
    with pytest.raises(SpecError, match=r"to: has (the )?answers .* name a new file"):
        written(path, line("b", label, task=task, sample=other), task=task)
    assert path.read_bytes() == before
    written(path, line("b", sample=sample))


@pytest.mark.parametrize(
    "last",
    [
        *('{"doc_id": "b"}', "[1]", '{"doc_id": b}', '{"a": "b"}}', "# a note", '{"a" "b"}'),
        pytest.param('{"a":' + "[" * 100_000, id="nested too deeply"),
        pytest.param(f'{{"a": {"1" * 5_000}}}', id="a number that is too long"),
    ],
)
def test_a_last_line_that_no_crash_leaves_is_refused_and_stays(
    path: Path, spec_file: Path, last: str
) -> None:
    data = written(path, line("a")).read_bytes() + last.encode()
    path.write_bytes(data)
    with pytest.raises(SpecError, match="line 2: is not"):
        GoldFile.open(path, TOPIC)
    assert path.read_bytes() == data
    with pytest.raises(AssayError):
        read_gold(str(path), load_spec(spec_file))
