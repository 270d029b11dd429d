"""The schema, the answers and the comparison of the benchmark of properties."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path

import jsonschema
import pytest
from peers import InThisProcess

from benchmarks import properties
from benchmarks.peers import __main__ as peers
from benchmarks.peers.assay import Engine
from benchmarks.peers.serve import Setup, Writing, Written
from benchmarks.properties import answers, description, differences, parsed, schema
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.spec.stages import QuestionTask

ASKED = "About what? Answer yes or no.{answer}{label}:"
TASKS = [
    QuestionTask.model_validate({"labels": labels, **own})
    for labels, own in (
        (["whole", "cut"], {"name": "form", "question": "Whole or cut?"}),
        ([0, 1, 2], {"name": "value", "question": "0 to 2?", "kind": "score"}),
        (
            {"law": ["law"], "art": ["art"]},
            {"name": "topic", "kind": "multi", "question": ASKED},
        ),
    )
]
VALID = {"form": "cut", "value": 2, "topic": ["law"]}


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"topic": []}, True),
        ({"form": "half"}, False),
        ({"value": "2"}, False),
        ({"value": 3}, False),
        ({"topic": "law"}, False),
        ({"topic": ["war"]}, False),
        ({"more": 1}, False),
    ],
)
def test_the_schema_is_of_the_labels_of_each_kind(
    change: dict[str, object], is_valid: bool
) -> None:
    validator = jsonschema.Draft202012Validator(schema(TASKS))
    assert validator.is_valid({**VALID, **change}) == is_valid
    assert not validator.is_valid({"form": "cut", "value": 2})


def test_the_description_asks_the_questions_of_all_tasks_with_their_labels() -> None:
    _, *lines = description(TASKS).splitlines()
    assert lines == [
        "- form: Whole or cut? One of: whole, cut.",
        "- value: 0 to 2? One of: 0, 1, 2.",
        "- topic: About what? A list of all that apply of: law (law), art (art).",
    ]


@pytest.mark.parametrize("text", ["", '{"form":"cut"', '["cut"]', '{"form":"cut","value":2}'])
def test_text_that_is_cut_off_or_lacks_a_property_is_not_valid(text: str) -> None:
    assert parsed(TASKS, text) is None
    assert parsed(TASKS, json.dumps(VALID)) == VALID


def test_a_label_has_the_probability_of_all_its_first_tokens() -> None:
    """`whole` has no likely token, and is likelier than `cut` as a whole."""
    questions = [
        Question("form", (), {"whole": [(1,), (2,)], "cut": [(3,)]}),
        Question("value", (), {"0": [(4,)], "1": [(5,)], "2": [(6,)]}),
        Question("topic.law", (), {"yes": [(7,), (8,)], "no": [(9,)]}),
        Question("topic.art", (), {"yes": [(7,), (8,)], "no": [(9,)]}),
    ]
    p = [{1: 0.3, 2: 0.3, 3: 0.4}, {4: 0.1, 5: 0.2, 6: 0.7}]
    p += [{7: 0.3, 8: 0.0001, 9: 0.6}, {7: 0.3, 8: 0.2, 9: 0.4}]
    log_probs = [{token: log(value) for token, value in each.items()} for each in p]
    expected = {"form": "whole", "value": 2, "topic": ["art"]}
    assert answers(TASKS, questions, log_probs) == expected


def test_differences_are_shares_by_kind_and_of_a_list_by_label() -> None:
    other = {"form": "whole", "value": 2, "topic": ["art", "law", "art"]}
    shares = differences(TASKS, [VALID, VALID, VALID], [VALID, None, other])
    assert shares == {"choice": 1 / 2, "multi": 1 / 4, "score": 0}


class Scribe:
    """In place of vLLM: writes one text after each prompt, and the last one is cut off."""

    version, prompts = "0", 0

    def write(self, request: Writing) -> list[Written]:
        jsonschema.validate(VALID, request.schema)
        self.prompts += len(request.prompts)
        texts = [json.dumps(VALID)] * len(request.prompts)
        if self.prompts == properties.WARM_UP + 5:
            texts[-1] = texts[-1][:9]
        return [Written(text, 7, len(text)) for text in texts]


def worker(engine: str, setup: Setup, _cache: Path) -> InThisProcess:
    """In place of a process."""
    return InThisProcess(Scribe() if engine == "vllm" else Engine(replace(setup, threads=1)))


def test_both_engines_answer_each_document_once_after_the_warm_up(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"id": str(n), "text": f"Text {n}."}) for n in range(20)]
    corpus, figures = tmp_path / "texts.jsonl", tmp_path / "figures.json"
    corpus.write_text("\n".join(rows))
    tasks = [task.model_dump(mode="json", exclude_unset=True) for task in TASKS]
    tasks[2]["question"] = (
        "About {label}?"  # — a token is a byte, and a begun answer goes on with " "
    )
    source = {"path": str(corpus), "id": "id"}
    spec = write_spec(name="isolated", tasks=tasks, input=source).rename(tmp_path / "isolated.yaml")
    tasks[0]["question"] = "{answer}form: "
    prompt = {"instruction": "Fill in one line of this sheet. form: whole or cut?"}
    sheet = write_spec(name="sheet", tasks=tasks, input=source, prompt=prompt)
    for module in (properties, peers):
        monkeypatch.setattr(module, "Worker", worker)
    monkeypatch.setattr(properties, "CACHE", tmp_path / "peers")
    words = ["properties", str(spec), str(sheet), "--documents", "5", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--to", str(figures)])
    properties.main()
    result = json.loads(figures.read_text())
    isolated, of_sheet, written = (
        result["answers"][name] for name in ("isolated", "sheet", "vllm")
    )
    assert len(isolated) == len(of_sheet) == len(written) == result["documents"] == 5
    assert all(len(each) == 2 for each in result["seconds of a document, by round"].values())
    assert result["not valid JSON"] == 0.2 and result["tokens that vLLM read"] == 7
    of_json = {"isolated": isolated[:4], "sheet": of_sheet[:4]}
    assert result["other answers in JSON, by kind"] == {
        name: differences(TASKS, own, [VALID] * 4) for name, own in of_json.items()
    }
    assert set(result["vLLM / assay"]) == {"isolated", "sheet"}
    by_form = result["other answers than the first form's"]
    assert by_form["sheet"] == differences(TASKS, isolated, of_sheet)
    assert {*by_form["isolated"].values()} == {0}
    read = result["tokens of the questions"]
    assert read["sheet"] < read["isolated"]
