"""Questions, labels and texts in scripts other than the Latin one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from person import REPOSITORY, Person

ARTICLES = (
    "昨晚的比赛里，主队在最后一分钟以一分之差赢了客队，全场观众都站了起来，许多人流下了眼泪。",
    "今天起全场五折，立即下单，先到先得！扫码关注，再送一张优惠券。",
)
TOPICS = [
    "财经",
    "政治",
    "娱乐",
    "体育",
    "军事",
    "科技",
    "农业民生",
    "能源",
    "汽车",
    "创新设计",
    "环境",
    "其它",
]
COUNTRIES = ["英国", "中国", "法国", "日本", "美国", "印度"]
YES_NO = ["是", "否"]
QUESTIONS: dict[str, tuple[str, list[str]]] = {
    "topic": ("这篇文章属于哪一类？只回答类别，不要解释：\n" + "，".join(TOPICS), TOPICS),
    "country": ("联赛最可能来自哪个国家？只回答国名：\n" + "，".join(COUNTRIES), COUNTRIES),
    "toxic": ("文中有没有有毒信息？只回答是或否", YES_NO),
    "advert": ("这是不是广告？只回答是或否", YES_NO),
}
LANGUAGES = {"English": "English", "Russian": "Русский", "Arabic": "العربية", "Chinese": "中文"}


def run(person: Person, name: str, texts: list[str], tasks: list[dict[str, Any]]) -> None:
    """Labels the texts under a spec of this name; every row of every task is answered."""
    rows = [{"id": f"{n}", "text": text} for n, text in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    person.writes(f"{name}.jsonl", "\n".join(lines))
    spec = {
        "name": name,
        "model": {"path": "smollm2.gguf"},
        "input": {"path": f"{name}.jsonl", "text": "text", "id": "id"},
        "output": f"out/{name}",
        "tasks": tasks,
    }
    person.writes(f"{name}.yaml", yaml.safe_dump(spec, sort_keys=False, allow_unicode=True))
    person.types(f"assay run {name}.yaml")
    for task in tasks:
        (file,) = person.folder.glob(f"out/{name}/labels/{task['name']}/*/*/*.parquet")
        labelled = pq.read_table(file)
        assert labelled["status"].to_pylist() == ["ok"] * len(texts)
        assert [field.name for field in labelled.schema.field("p").type] == task["labels"]
        assert {*labelled["label"].to_pylist()} <= {*task["labels"]}


@pytest.mark.xdist_group("ray")
def test_labels_in_their_own_script_are_stored_shown_and_filtered_by(person: Person) -> None:
    asked = [{"name": n, "question": q, "labels": [*ls]} for n, (q, ls) in QUESTIONS.items()]
    run(person, "articles", list(ARTICLES), asked)
    shown = person.types("assay export articles.yaml --head 10")
    (file,) = person.folder.glob("out/articles/labels/advert/*/*/*.parquet")
    for label in pq.read_table(file, columns=["label"])["label"].to_pylist():
        assert label in shown.out
    with (person.folder / "articles.yaml").open("a") as spec:
        spec.write("filter: {keep: \"advert.p.是 < 2 and topic.label in ('" + TOPICS[0] + "')\"}\n")
    dry = person.types("assay filter articles.yaml --dry-run --json")
    assert json.loads(dry.out)["documents"] == len(ARTICLES)

    train = (REPOSITORY / "jobs/corpus/train.jsonl").read_text(encoding="utf-8")
    gold = [json.loads(line) for line in train.rstrip("\n").split("\n")]
    by_language = [[g["text"] for g in gold if g.get("language") == n][:3] for n in LANGUAGES]
    assert all(by_language)
    question = "Which language is it? Answer with one of: " + ", ".join(LANGUAGES.values())
    task = {"name": "language", "question": question, "labels": [*LANGUAGES.values()]}
    run(person, "languages", [text for texts in by_language for text in texts], [task])
