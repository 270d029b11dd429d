"""Continuations of answers: which are made, that they are greedy decoding, and made once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import WITH_MODEL, assay
from fitted import write_calibration
from generation import greedily_decoded
from stages import run_without_ray
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.inference.continuations import ContinuationEngine
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.integrity.gc import collect_garbage
from pipeline.integrity.verify import verify_output
from pipeline.ledger.dataset import open_labels
from pipeline.options import RunOptions
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec, parse_spec

LABELS = {"clean": ["clean", "fine"], "toxic": ["toxic"]}
TOXIC: dict[str, Any] = {"name": "toxic", "question": "Is it toxic?", "labels": LABELS}
TOKENS = 6


class Explained:
    """A spec whose task continues some answers, its corpus, and its output."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.task: dict[str, Any] = {**TOXIC, "explain": {"tokens": TOKENS}}
        self.others: list[dict[str, Any]] = []
        self.documents: dict[str, Any] = {}
        self.shard_bytes = 500
        self.decoded: Counter[tuple[int, ...]] = Counter()
        (folder / "in").mkdir()

    @property
    def spec_file(self) -> Path:
        content = {
            "name": "job",
            "model": {"path": str(self.model), "dtype": "float32"},
            "input": {"path": str(self.folder / "in"), "id": "id", "shard_bytes": self.shard_bytes},
            "output": str(self.folder / "out"),
            "documents": self.documents,
            "tasks": [self.task, *self.others],
        }
        (self.folder / "spec.yaml").write_text(json.dumps(content))
        return self.folder / "spec.yaml"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def write(self, name: str, texts: list[str]) -> dict[str, str]:
        rows = [{"id": f"{name}{row}", "text": text} for row, text in enumerate(texts)]
        (self.folder / "in" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {row["id"]: row["text"] for row in rows}

    def run(self, **options: Any) -> Outcome:
        self.decoded.clear()
        spec = load_spec(self.spec_file)
        outcome = run(spec, cache_dir=self.cache, options=RunOptions(**options))
        verified = verify_output(spec, cache_dir=self.cache)
        assert verified.intact, verified
        return outcome

    def rows(self) -> dict[str, dict[str, Any]]:
        columns = ["doc_id", "toxic"]
        rows = open_labels(str(self.folder / "out")).to_table(columns=columns).to_pylist()
        return {row["doc_id"]: row["toxic"] for row in rows}


@pytest.fixture
def explained(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Explained]:
    run_without_ray(monkeypatch)
    made = Explained(tmp_path, model_folder)
    decode = ContinuationEngine.decode

    def counted(self: Any, prompts: Any, tokens: int, **how: Any) -> Any:
        made.decoded.update(map(tuple, prompts))
        return decode(self, prompts, tokens, **how)

    monkeypatch.setattr(ContinuationEngine, "decode", counted)
    yield made


TEXTS = [f"This is text number {n}, which says so {n % 5} times." for n in range(20)]


def expected(explained: Explained, text: str, label: str) -> tuple[str, list[str], list[float]]:
    """The greedy continuation of the whole prompt with the answer."""
    spec = load_spec(explained.spec_file)
    tokenizer: Any = AutoTokenizer.from_pretrained(explained.model)
    network = AutoModelForCausalLM.from_pretrained(explained.model, dtype=torch.float32)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks[:1])
    document = DocumentTokenizer(tokenizer).encode(text)[: spec.documents.max_tokens]
    answer = tokenizer(LABELS[label][0], add_special_tokens=False)["input_ids"]
    ids = [*prompt.prefix, *document, *prompt.questions[0].token_ids, *answer]
    made = greedily_decoded(network, ids, TOKENS, [tokenizer.eos_token_id])
    new, p = list(made.token_ids), list(made.p)
    decoded = tokenizer.decode(new, skip_special_tokens=True)
    return decoded, [tokenizer.decode([token]) for token in new], p


def check(explained: Explained, texts: dict[str, str], named: set[str]) -> None:
    """The named documents, and no others, have the continuations of greedy decoding."""
    rows = explained.rows()
    assert rows.keys() == texts.keys()
    for name, row in rows.items():
        if name not in named:
            assert row["explanation"] is None, name
            continue
        text, tokens, p = expected(explained, texts[name], row["label"])
        explanation = row["explanation"]
        assert explanation["text"] == text
        assert [each["token"] for each in explanation["tokens"]] == tokens
        np.testing.assert_allclose([each["p"] for each in explanation["tokens"]], p, atol=1e-4)


def test_every_answer_is_continued_as_greedy_decoding_does(explained: Explained) -> None:
    texts = explained.write("a", [*TEXTS[:9], "", TEXTS[0]]) | explained.write("b", TEXTS[7:13])
    outcome = explained.run()
    assert outcome.complete and outcome.snapshot == 1
    named = {name for name, text in texts.items() if text}
    check(explained, texts, named)
    # — a text in two shards is continued in each
    of_shards = [{*TEXTS[:9]}, {*TEXTS[7:13]}]
    assert sum(map(len, of_shards)) <= explained.decoded.total() <= len(named)
    again = explained.run()
    assert (again.snapshot, again.tally.created, again.tally.asked_rows) == (1, 0, 0)
    assert not explained.decoded


def test_only_answers_that_the_condition_names_are_continued(explained: Explained) -> None:
    texts = explained.write("a", TEXTS)
    del explained.task["explain"]
    plain = explained.run()
    answers = explained.rows()
    assert "explanation" not in answers["a0"] and plain.tally.asked_rows == len(TEXTS)
    margins = sorted(row["margin"] for row in answers.values())
    asked: set[str] = set()
    for bound in (margins[10], margins[15], margins[5]):
        explained.task["explain"] = {"tokens": TOKENS, "when": f"toxic.margin < {bound}"}
        outcome = explained.run()
        # — the answers are taken over, and what was continued before is not continued again
        named = {name for name, row in answers.items() if row["margin"] < bound}
        assert explained.decoded.total() == len(named - asked) and outcome.complete
        asked |= named
        check(explained, texts, named)
        after = explained.rows()
        for name, row in answers.items():
            assert {key: after[name][key] for key in row} == row
        spec = load_spec(explained.spec_file)
        collect_garbage(spec, keep=1, delete=True, older_than_days=0)
    assert len(named) == 5 and len(asked) == 15


def test_texts_that_moved_keep_their_continuations(explained: Explained) -> None:
    texts = explained.write("a", TEXTS)
    explained.run()
    shutil.move(explained.folder / "in" / "a.jsonl", explained.folder / "in" / "c.jsonl")
    more = explained.write("d", [*TEXTS[:3], "One text is new."])
    outcome = explained.run()
    assert explained.decoded.total() == 1 and outcome.complete
    assert outcome.tally.labels["toxic"].total() == len(texts) + len(more)
    check(explained, texts | more, {*texts, *more})


def test_a_sample_is_continued_alone_and_the_whole_later(explained: Explained) -> None:
    texts = explained.write("a", TEXTS)
    outcome = explained.run(sample="0.5")
    sampled = explained.rows()
    assert outcome.complete and 0 < len(sampled) < len(texts)
    check(explained, {name: texts[name] for name in sampled}, {*sampled})
    explained.run()
    assert explained.decoded.total() == len(texts) - len(sampled)
    check(explained, texts, {*texts})


def test_a_shard_that_is_read_in_parts_is_continued(
    explained: Explained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sources.documents.SLICE_CHARS", 100)
    explained.shard_bytes = 5_000
    texts = explained.write("a", TEXTS)
    explained.run()
    explained.task["explain"]["when"] = "doc_id = 'a3'"
    explained.run()
    check(explained, texts, {"a3"})


def test_a_condition_reads_calibrated_answers_and_other_tasks_stay(explained: Explained) -> None:
    file = explained.folder / "calibration.json"
    explained.task["calibration"] = write_calibration(file, {"clean": 0.3, "toxic": 0.7})
    explained.others = [{**TOXIC, "name": "rude", "question": "Is it rude?"}]
    texts = explained.write("a", TEXTS[:8])
    explained.task["explain"]["when"] = "n_chars < 5"
    explained.run()
    check(explained, texts, set())
    rows = explained.rows()
    bound = sorted(row["calibrated"]["margin"] for row in rows.values())[3]
    assert bound not in {row["margin"] for row in rows.values()}
    explained.task["explain"]["when"] = f"toxic.calibrated.margin < {bound} and n_chars > 0"
    explained.run()
    named = {name for name, row in rows.items() if row["calibrated"]["margin"] < bound}
    assert len(named) == 3
    check(explained, texts, named)
    table = open_labels(str(explained.folder / "out")).to_table().to_pylist()
    assert all("explanation" not in row["rude"] and row["rude"]["label"] for row in table)


def test_of_a_document_in_chunks_the_first_is_continued(explained: Explained) -> None:
    explained.documents = {"max_tokens": 16, "too_long": "chunk", "overlap_tokens": 4}
    texts = explained.write("a", TEXTS[:4])
    explained.run()
    assert {row["n_chunks"] for row in explained.rows().values()} == {4}
    check(explained, texts, {*texts})


def test_a_failed_continuation_leaves_the_answer(
    explained: Explained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    explained.write("a", TEXTS[:5])

    def generate(_network: Any, *_inputs: Any, **_options: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    explained.run()
    rows = explained.rows()
    assert all(row["label"] and row["status"] == "ok" for row in rows.values())
    assert {row["explanation"] for row in rows.values()} == {None} and len(rows) == 5
    warned = [record.args for record in caplog.records if "not be continued" in record.message]
    assert sum(count for (count,) in warned) == 5


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"explain": {"tokens": 0}}, "tasks.0.explain.tokens"),
        ({"explain": {"tokens": 4, "when": "margin <"}}, "tasks.0.explain.when"),
        ({"explain": {"tokens": 4, "when": "rude.margin < 1"}}, "tasks.0.explain.when"),
        ({"explain": {"tokens": 4, "when": "toxic.margin"}}, "tasks.0.explain.when"),
        ({"explain": {"tokens": 4}, "question": None, "readout": "r"}, "tasks.0.explain"),
        ({"explain": {"tokens": 900}}, "documents.max_tokens"),
    ],
)
def test_a_wrong_explain_names_its_place(
    explained: Explained, changes: dict[str, Any], place: str
) -> None:
    explained.write("a", TEXTS[:2])
    explained.task |= changes
    explained.documents = {"max_tokens": 3_700}
    with pytest.raises(SpecError) as caught:
        explained.run()
    assert place in str(caught.value)
    assert not [*(explained.folder / "out").glob("labels/**/*.parquet")]


def test_ranked_labels_with_levels_are_continued(explained: Explained) -> None:
    labels = {f"{kind}/{n}": [f"{kind}{n}"] for kind in ("clean", "rude") for n in range(3)}
    ranked = {"labels": labels, "top_k": 2, "separator": "/"}
    explained.task |= {**ranked, "explain": {"tokens": TOKENS, "when": "len(toxic.top) = 2"}}
    texts = explained.write("a", ["", *TEXTS[:5]])
    assert explained.run().complete
    rows = explained.rows()
    assert rows["a0"]["explanation"] is None and rows["a0"]["top"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "LABELS", labels)
        check(explained, texts, {*texts} - {"a0"})
    assert all(len(rows[name]["levels"]) == 2 for name in texts if name != "a0")


def test_show_has_the_text_of_a_continuation(
    explained: Explained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explained.write("a", TEXTS[:6])
    explained.task["explain"]["when"] = "doc_id = 'a3'"
    explained.run()
    explanation = explained.rows()["a3"]["explanation"]
    monkeypatch.setenv("ASSAY_CACHE", str(explained.cache))
    capsys.readouterr()
    assert main(["show", str(explained.spec_file), "--json"]) == 0
    shown = {row["doc_id"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert shown["a3"]["toxic_explanation_text"] == explanation["text"]
    assert len(shown["a3"]["toxic_explanation_tokens"]) == TOKENS
    assert shown["a2"]["toxic_explanation_text"] is None
    assert main(["show", str(explained.spec_file)]) == 0
    assert capsys.readouterr().out.count("toxic, continuation: ") == 1


def test_a_recurrent_model_is_refused_before_it_answers(
    explained: Explained, tmp_path: Path, make_network: Any, byte_tokenizer: Any
) -> None:
    explained.write("a", TEXTS[:2])
    explained.model = tmp_path / "recurrent"
    make_network("lfm2").save_pretrained(explained.model)
    byte_tokenizer.save_pretrained(explained.model)
    with pytest.raises(SpecError, match=r"model\.path: a lfm2 model has recurrent states"):
        explained.run()
    assert not [*(explained.folder / "out").glob("labels/**/*.parquet")]


def test_an_encoder_continues_nothing() -> None:
    content = {
        "name": "job",
        "model": {"path": "m", "kind": "encoder"},
        "input": {"path": "in"},
        "output": "out",
        "tasks": [{**TOXIC, "explain": {"tokens": 4}}],
    }
    with pytest.raises(SpecError, match=r"tasks\.0\.explain: an encoder has no text to continue"):
        parse_spec(json.dumps(content))


@pytest.mark.parametrize("command", WITH_MODEL)
@pytest.mark.parametrize("fault", ["stage 2 asked", "create 1", "create 3"])
def test_a_killed_run_is_completed_by_the_next(
    explained: Explained, fault: str, command: tuple[str, ...]
) -> None:
    texts = explained.write("a", TEXTS[:12])
    died = explained.folder / "died"
    code, _, _ = assay(explained.spec_file, fault=f"{fault}=die:{died}", command=command)
    # — of a worker's death Ray's driver hears, and starts another
    assert died.exists() and (code == -9 or fault == "create 1")
    code, counts, err = assay(explained.spec_file, command=command)
    assert code == 0 and counts["complete"], err
    check(explained, texts, {*texts})
    code, counts, err = assay(explained.spec_file, command=command)
    assert (code, counts["objects_created"], counts["snapshot"]) == (0, 0, 1), err
