"""Tasks of kind `multi` and `score`, from text to file and back, against independent prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import reference
from calls import Assay
from changing_corpus import TOXIC, Corpus
from fake_engine import p_of
from fitted import card_of, write_readout
from transformers import PreTrainedTokenizerFast

from pipeline.fitted.readout import parse_readout
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model
from pipeline.inference.model.loaded import LoadedModel
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.weights import locate
from pipeline.spec.schema import JobSpec

LABELS = {"law": ["the law"], "a/b": ["art"], "sport": ["sports"]}
MULTI: dict[str, Any] = {
    "name": "topic",
    "kind": "multi",
    "question": "About {label}?",
    "labels": LABELS,
}
SCORE: dict[str, Any] = {
    "name": "quality",
    "kind": "score",
    "question": "How good?",
    "labels": [0, 1.5, 4],
}
TEXTS = ["One.", "", "Two, and a longer text that is read in pieces. " * 2]
RULES = {"max_tokens": 40, "too_long": "chunk", "overlap_tokens": 8}
# Float32: two correct computations of one probability.
TOLERANCE = 2e-6


def masses(
    spec: JobSpec, model: LoadedModel, tokenizer: PreTrainedTokenizerFast, part: str, text: str
) -> np.ndarray:  # [chunks, labels]
    """The probability of each label's tokens, in a prompt for each chunk and verbalizer."""
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.parts)
    [question] = [question for question in prompt.questions if question.name == part]
    chunks = reference.pieces(DocumentTokenizer(tokenizer).encode(text))
    read = [(model, prompt.prefix, chunk, question.token_ids) for chunk in chunks]
    return np.array(
        [
            [
                sum(np.exp(reference.verbalizer_log_prob(*each, path)) for path in paths)
                for paths in question.labels.values()
            ]
            for each in read
        ]
    )


@pytest.mark.parametrize("question", ["About {label}?", "About what?{answer}{label}:"])
def test_the_answers_are_those_of_a_prompt_for_each_label_and_chunk(
    question: str, modelled: Corpus, model_folder: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    modelled.write("a", TEXTS)
    modelled.task, modelled.others = {**MULTI, "question": question}, [SCORE, TOXIC]
    modelled.settings = {"documents": RULES}
    assert modelled.run().complete
    spec, model = modelled.spec, load_model(model_folder, dtype="float32", device="cpu")
    for row, text in zip(modelled.rows("topic").values(), TEXTS, strict=True):
        if not text:
            assert row["labels"] is row["p"] is row["mass"] is row["margin"] is None
            continue
        p, mass = {}, []
        for label in LABELS:
            of_chunks = masses(spec, model, byte_tokenizer, f"topic.{label}", text)
            yes = of_chunks[:, 0] / of_chunks.sum(axis=1)  # [chunks]
            p[label] = yes.max()
            mass.append(of_chunks[yes.argmax()].sum())
        assert row["p"] == pytest.approx(p, abs=TOLERANCE)
        assert row["labels"] == [label for label in LABELS if p[label] >= 0.5]
        assert row["mass"] == pytest.approx(min(mass), rel=1e-5)
        margins = [abs(2 * each - 1) for each in p.values()]
        assert row["margin"] == pytest.approx(min(margins), abs=2 * TOLERANCE)
        assert (row["n_chunks"] > 1) == (text == TEXTS[2])
    for row, text in zip(modelled.rows("quality").values(), TEXTS, strict=True):
        if not text:
            assert row["label"] is row["score"] is None
            continue
        mean = masses(spec, model, byte_tokenizer, "quality", text).mean(axis=0)
        share = mean / mean.sum()
        labels = ["0", "1.5", "4"]
        assert row["p"] == pytest.approx(dict(zip(labels, share, strict=True)), abs=TOLERANCE)
        assert row["score"] == pytest.approx(share @ [0, 1.5, 4], abs=4 * TOLERANCE)
        assert row["label"] == labels[int(share.argmax())]


@pytest.mark.parametrize("layer", [1, 2])
def test_readouts_of_labels_are_those_of_their_files(
    layer: int, modelled: Corpus, model_folder: Path, assay: Assay
) -> None:
    modelled.write("a", TEXTS[:2])
    (folder := modelled.folder / "readouts").mkdir()
    modelled.task = {**MULTI, "question": None, "readout": str(folder)}
    spec = modelled.spec
    weights = dict(locate(spec.model, modelled.cache).hashes)
    for seed, part in enumerate(spec.parts):
        card = card_of(spec, part, weights=weights, dtype="float32", layer=layer)
        write_readout(Path(part.readout or ""), card, hidden=48, layers=[1, 2], seed=seed)
    assert "a%2Fb.safetensors" in {path.name for path in folder.iterdir()}
    assert modelled.run().complete
    row, empty = modelled.rows().values()
    assert empty["p"] is None and row["mass"] is None
    model = load_model(model_folder, dtype="float32", device="cpu")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.parts)
    document = DocumentTokenizer(tokenizer).encode(TEXTS[0])
    for part, question, label in zip(spec.parts, prompt.questions, LABELS, strict=True):
        readout = parse_readout(Path(part.readout or "").read_bytes())
        asked = model, prompt.prefix, document, question.token_ids
        p = np.exp(reference.readout_log_probs(*asked, readout)[0])
        assert row["p"][label] == pytest.approx(p, abs=TOLERANCE)
        assert (label in row["labels"]) == (p >= 0.5)
    (modelled.folder / "readouts" / "law.safetensors").unlink()
    modelled.write("a", [*TEXTS, "more"])
    assay("run", modelled.spec_file, code=2)


def test_a_label_without_an_answer_fails_the_row_and_only_the_row_is_asked_again(
    plain: Corpus,
) -> None:
    plain.write("a", ["one", "two", "two", "three"])
    plain.task, plain.others = MULTI, [TOXIC]
    questions = [f"About {texts[0]}?" for texts in LABELS.values()]
    plain.broken.add((questions[1], "two"))
    tally = plain.run().tally
    assert tally.n.by("answered") == {"topic": 2, "toxic": 4}
    assert sum(tally.n.by("rows").values()) == 4 and tally.n.by("rows")["ok"] == 2
    rows = plain.rows()
    for row in (rows["a-1"], rows["a-2"]):
        assert row["status"].startswith("error:") and row["labels"] is row["p"] is None
    p = {label: 1 - p_of(own, "one") for label, own in zip(LABELS, questions, strict=True)}
    assert rows["a-0"]["p"] == pytest.approx(p, abs=1e-6)
    expected = {label: sum(label in (row["labels"] or ()) for row in rows.values()) for label in p}
    assert tally.n.labels["topic"] == {label: n for label, n in expected.items() if n}
    plain.broken.clear()
    assert plain.run(retry_failed=True).complete
    plain.assert_asked({(question, "two") for question in questions})
    assert all(row["status"] == "ok" for row in plain.rows().values())
    plain.write("b", ["one", "four"])
    assert plain.run().complete
    plain.assert_asked({(question, "four") for question in (*questions, TOXIC["question"])})
    assert plain.rows()["b-0"] == plain.rows()["a-0"]
    plain.verify()


def test_a_sample_a_cascade_beside_it_and_a_new_kind(staged: Corpus) -> None:
    staged.write("a", [f"text {n}" for n in range(12)])
    staged.others = [MULTI, {**SCORE, "labels": [0, 1]}]
    staged.decide(0.3, 0.7)
    assert staged.run(sample="40%").complete
    assert staged.run().complete
    for name, row in staged.rows("quality").items():
        assert row["score"] == pytest.approx(p_of("How good?", staged.texts[name]), abs=1e-6)
    before = staged.rows("topic")
    staged.others = [MULTI]
    assert staged.run().tally.n.asked == 0  # — nothing new
    assert staged.rows("topic") == before
    staged.verify()


def labelled(corpus: Corpus) -> Corpus:
    corpus.shard_bytes = 10_000
    corpus.write("a", [f"text {n}" for n in range(30)] + [""])
    corpus.task, corpus.others = MULTI, [{**SCORE, "labels": [1, 3]}]
    assert corpus.run().complete
    return corpus


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_an_export_has_the_same_labels_in_every_format(
    form: str, plain: Corpus, assay: Assay
) -> None:
    labelled(plain)
    to = plain.folder / f"table.{form}"
    assay("export", plain.spec_file, "--to", to)
    query = f"select doc_id, topic, quality_score, topic_p_law from '{to}'"
    rows = duckdb.sql(query).fetchall()
    topic, quality = plain.rows("topic"), plain.rows("quality")
    assert len(rows) == 31 and any(len(row["labels"] or ()) > 1 for row in topic.values())
    for doc_id, labels, score, p in rows:
        expected = topic[doc_id]["labels"]
        if form == "csv" and expected is not None:
            expected = ";".join(expected) or "-"
        assert labels == expected
        if topic[doc_id]["p"] is not None:
            assert score == pytest.approx(quality[doc_id]["score"])
            assert p == pytest.approx(topic[doc_id]["p"]["law"])
    frame = open_labels(str(plain.folder / "out")).to_pandas()
    assert [*frame.topic[0]] == topic["a-0"]["labels"]


@pytest.mark.parametrize(
    "rule, keeps",
    [
        ({"keep": "quality.score >= 2"}, lambda topic, quality: quality["score"] >= 2),
        (
            {"keep": "list_contains(topic.labels, 'law')"},
            lambda topic, quality: "law" in topic["labels"],
        ),
        ({"keep": "topic.p.law <= 0.4"}, lambda topic, quality: topic["p"]["law"] <= 0.4),
        ({"drop_top": {"of": "quality.score", "share": 0.1}}, None),
    ],
)
def test_a_filter_keeps_by_scores_and_by_one_of_several_labels(
    rule: dict[str, Any], keeps: Any, plain: Corpus, assay: Assay
) -> None:
    labelled(plain)
    plain.settings = {"filter": {**rule, "on_error": "drop"}}
    to = plain.folder / "kept"
    assay("filter", plain.spec_file, "--to", to)
    kept = duckdb.sql(f"select id from '{to}/**/*.jsonl'").fetchall()
    topic, quality = plain.rows("topic"), plain.rows("quality")
    answered = [name for name, row in topic.items() if row["p"] is not None]
    expected = [name for name in answered if keeps and keeps(topic[name], quality[name])]
    if "drop_top" in rule:
        by_score = sorted(answered, key=lambda name: quality[name]["score"])
        expected = sorted(by_score[:27], key=answered.index)
    assert [name for (name,) in kept] == expected and 0 < len(expected) < 30


def test_several_labels_are_no_group(plain: Corpus, assay: Assay) -> None:
    labelled(plain)
    by = {"drop_top": {"of": "topic.p.law", "by": "topic", "share": 0.4}}
    plain.settings = {"filter": by}
    error = assay("filter", plain.spec_file, "--dry-run", code=2).error
    assert "list_contains(topic.labels, 'law')" in error


def test_a_diff_counts_documents_by_label_and_sets_of_labels(plain: Corpus, assay: Assay) -> None:
    labelled(plain)
    before = plain.rows("topic")
    plain.task = {**MULTI, "question": "Is it {label}?"}
    assert plain.run().complete
    after = plain.rows("topic")
    change = assay("diff", plain.spec_file, 1, 2, "--json").json["tasks"]["topic"]
    pairs = [(before[name]["labels"], after[name]["labels"]) for name in before]
    pairs = [(x, y) for x, y in pairs if x is not None]
    assert change["before"]["rows"] == change["after"]["rows"] == 30 == len(pairs)
    moves = {(move["before"], move["after"]): move["texts"] for move in change["moves"]}
    for label in LABELS:
        assert change["before"]["labels"][label] == sum(label in x for x, _ in pairs)
        gained = sum(label in y and label not in x for x, y in pairs)
        lost = sum(label in x and label not in y for x, y in pairs)
        assert (moves.get((None, label), 0), moves.get((label, None), 0)) == (gained, lost)
    flipped = sum(x != y for x, y in pairs)
    assert change["flip_rate"] == pytest.approx(flipped / 30) and flipped
    assert "gained" in assay("diff", plain.spec_file, 1, 2).out


def test_check_shows_a_prompt_for_each_label(modelled: Corpus, assay: Assay) -> None:
    modelled.write("a", TEXTS)
    modelled.task, modelled.others = MULTI, [SCORE]
    report = assay("check", modelled.spec_file, "--prompts", "--json").json
    prompts = {prompt["task"]: prompt["text"] for prompt in report["prompts"]}
    assert [*prompts] == ["topic.law", "topic.a/b", "topic.sport", "quality"]
    assert "About the law?" in prompts["topic.law"] and "About art?" in prompts["topic.a/b"]
    assert report["exactness"]["exact"] and report["exactness"]["answers"] == 8
