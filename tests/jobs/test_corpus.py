"""The demo corpus: what is shipped, and the script that built it."""

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard

from jobs.corpus import build as corpus

SHIPPED = Path(corpus.__file__).parent
TASKS = ("toxic", "spam", "language")

Row = dict[str, Any]

PLAIN_MAIL = """From someone@mail.test Tue Aug  6 11:51:02 2002
From: someone@mail.test
Subject: Re: [list] A question about
 folded lines
Content-Type: text/plain; charset=us-ascii

Write to me:  someone@mail.test,\r
or   call.\r



Bye
"""
HTML_MAIL = """Subject: Buy
Content-Type: text/html; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

<html><style>b {color: red}</style><body><p>Caf=E9 for <b>free</b></p><p>Now</p></body></html>
"""
BOTH_MAIL = """Subject: Two parts
Content-Type: multipart/alternative; boundary=x

--x
Content-Type: text/html

<p>markup</p>
--x
Content-Type: text/plain

plain
--x--
"""


def json_lines(data: bytes) -> list[Row]:
    return [json.loads(line) for line in data.decode().split("\n")[:-1]]


def read_part(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return json_lines(zstandard.decompress(path.read_bytes()))


DOCUMENTS = [row for path in sorted((SHIPPED / "parts").iterdir()) for row in read_part(path)]
GOLD, TRAIN = (json_lines((SHIPPED / f"{name}.jsonl").read_bytes()) for name in ("gold", "train"))


def test_every_document_has_one_row_of_gold() -> None:
    ids = [document["id"] for document in DOCUMENTS]
    assert len(set(ids)) == len(ids) == 444
    assert sorted(ids) == sorted(row["id"] for row in GOLD)


def test_gold_has_as_many_rows_of_each_label_as_the_readme_says() -> None:
    toxic, spam, languages = (Counter(row.get(task) for row in GOLD) for task in TASKS)
    assert toxic == {"toxic": 150, "clean": 150, None: 144}
    assert spam == {"spam": 30, "other": 30, None: 384}
    assert languages.pop("English") == 307 and languages.pop("another") == 21
    assert languages.pop(None) == 60 and set(languages.values()) == {7} and len(languages) == 8
    assert len(TRAIN) == 1_116
    assert [sum(task in row for row in TRAIN) for task in TASKS] == [560, 1_116, 716]


def test_no_text_is_both_in_the_corpus_and_in_the_training_gold() -> None:
    texts = [row["text"] for row in (*DOCUMENTS, *TRAIN)]
    assert len(set(texts)) == len(texts)


def test_a_mail_with_the_subject_of_another_is_on_the_same_side() -> None:
    def subjects(rows: Iterable[Row]) -> set[str]:
        return {corpus.subject_group(row["text"]) for row in rows} - {""}

    held_out = subjects(row for row in DOCUMENTS if row["kind"] == "mail")
    fitted = subjects(row for row in TRAIN if not {"toxic", "language"} & row.keys())
    assert len(held_out) > 40 and not held_out & fitted


def test_comments_have_the_labels_of_their_source() -> None:
    with (SHIPPED / "source" / "toxicity_en.csv").open(encoding="utf-8", newline="") as lines:
        source = {corpus.tidy(row["text"]): row["is_toxic"] for row in csv.DictReader(lines)}
    truth = {row["id"]: row.get("toxic") for row in GOLD}
    comments = [document for document in DOCUMENTS if document["kind"] == "comment"]
    assert len(comments) == 300
    for document in comments:
        assert (source[document["text"]] == "Toxic") == (truth[document["id"]] == "toxic")


def test_no_document_has_an_address_or_outer_spaces() -> None:
    for document in DOCUMENTS:
        text = document["text"].replace("name@example.org", "")
        assert text == corpus.tidy(text) or document["kind"] == "mail"
        assert document["kind"] != "mail" or not corpus.ADDRESS.search(text)


@pytest.mark.parametrize(
    "mail, text",
    [
        (
            PLAIN_MAIL,
            "Re: [list] A question about folded lines\n\n"
            "Write to me: name@example.org,\nor call.\n\nBye",
        ),
        (HTML_MAIL, "Buy\n\nCafé for free\nNow"),
        (BOTH_MAIL, "Two parts\n\nplain"),
        ("Subject: x\nContent-Type: text/plain; charset=unheard-of\n\ncaf\udce9", None),
        ("Subject: x\nContent-Type: image/png\n\nAAAA", None),
    ],
    ids=["plain", "html", "alternative", "unknown encoding", "no text"],
)
def test_a_mail_is_its_subject_and_its_text(mail: str, text: str | None) -> None:
    assert corpus.mail_text(mail) == text


def test_an_article_is_its_text_without_the_heading(tmp_path: Path) -> None:
    (tmp_path / "declaration").mkdir()
    for code in (*corpus.LANGUAGES, *corpus.OTHERS):
        (tmp_path / "declaration" / f"{code}.html").write_text(
            '<article data-number="7"><h2>Article 7</h2><p>All are equal before the law, '
            f"{code},</p>\n<ol><li>everywhere.</li></ol></article>"
        )
    read = {document.text: document for document in corpus.read_declarations(tmp_path)}
    assert len(read) == len(corpus.LANGUAGES) + len(corpus.OTHERS)
    english = read["All are equal before the law, eng,\n\neverywhere."]
    assert english.gold == (("language", "English"),) and english.group == "article 7"
    assert read["All are equal before the law, nld,\n\neverywhere."].gold == (
        ("language", "another"),
    )


def test_the_order_of_the_source_does_not_change_the_documents() -> None:
    comments = corpus.read_comments(SHIPPED / "source" / "toxicity_en.csv")
    sizes = {"toxic": (280, 150), "clean": (280, 150)}
    assert corpus.split(corpus.distinct(comments), sizes) == corpus.split(
        corpus.distinct(comments[::-1]), sizes
    )


def test_a_group_is_on_one_side() -> None:
    rows = [
        corpus.Document("mail", f"{group} {copy}", f"subject {group}", (("spam", "spam"),))
        for group in range(40)
        for copy in range(3)
    ]
    train, held_out = corpus.split(rows, {"spam": (30, 30)})
    assert (len(train), len(held_out)) == (30, 30)
    assert not {row.group for row in train} & {row.group for row in held_out}


def test_one_text_with_two_labels_is_refused() -> None:
    rows = [corpus.Document("mail", "hi", "hi", (("spam", label),)) for label in ("spam", "other")]
    with pytest.raises(ValueError, match="'hi' has two gold labels; correct a source"):
        corpus.distinct(rows)


def test_the_command_says_on_one_line_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--mails", str(tmp_path), "--declarations", str(tmp_path), "--out", str(tmp_path)]
    assert corpus.main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
