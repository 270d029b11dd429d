"""Build the demo corpus: single comments and threads of comments, each with a gold label.

Every choice is an order of content hashes, so the same source gives the same documents on any
machine; the same bytes too, where pyarrow and zstandard have the same versions.
"""

import argparse
import csv
import hashlib
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

HERE = Path(__file__).parent
COLUMNS = ("text", "is_toxic")
TOXIC_OF_LABEL = {"Toxic": True, "Not Toxic": False}

SEED = "assay demo corpus 1"
SINGLES_PER_LABEL = 100
SINGLES_PER_PART = 50
THREADS_PER_PART = 6
THREADS_PER_ROW_GROUP = 3

# About 1,000 tokens at the 3.7 to 4 characters a token of these comments.
MIN_THREAD_CHARACTERS = 3_800
MAX_THREAD_CHARACTERS = 4_200
MIN_THREAD_COMMENTS = 10
MAX_THREAD_COMMENTS = 40

# The share of toxic comments that each thread is filled towards. Seven have none; more would
# need more clean comments than the source has.
_THREADS = {0.0: 7, 0.05: 2, 0.25: 1, 0.5: 3, 0.75: 5, 0.9: 6}
THREAD_TOXIC_SHARES = tuple(Counter(_THREADS).elements())

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Comment:
    """What one person wrote, and whether a human judged it toxic."""

    text: str
    toxic: bool


@dataclass(frozen=True, slots=True)
class Document:
    """One row of the corpus, with the comments that it is made of."""

    kind: Literal["comment", "thread"]
    text: str
    comments: tuple[Comment, ...]

    @property
    def id(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    @property
    def row(self) -> dict[str, str]:
        """What the pipeline reads."""
        return {"id": self.id, "text": self.text, "kind": self.kind}

    @property
    def gold(self) -> dict[str, str | float | int]:
        """What the pipeline's answer is compared with."""
        toxic_comments = toxic_count(self.comments)
        return {
            "id": self.id,
            "toxic": "toxic" if toxic_comments else "clean",
            "toxic_share": round(toxic_comments / len(self.comments), 4),
            "n_comments": len(self.comments),
        }


def read_comments(source: Path) -> list[Comment]:
    """The comments of a CSV file, one a row, in its order; a text may turn out empty."""
    try:
        decoded = source.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: byte {error.start} is not UTF-8 "
            f"(got {error.object[error.start : error.end]!r}); save the file as UTF-8"
        ) from error
    reader = csv.reader(io.StringIO(decoded, newline=""), strict=True)
    try:
        header = next(reader, [])
        if sorted(header) != sorted(COLUMNS):  # another column would be ignored
            raise ValueError(
                f"{source}: line 1: the columns must be {', '.join(COLUMNS)} "
                f"(got {', '.join(header) or 'none'}); rename, add or drop columns"
            )
        return [
            parse_comment(header, fields, f"{source}: line {reader.line_num}")
            for fields in reader
            if fields  # the csv module reads a blank line as no fields at all
        ]
    except csv.Error as error:
        raise ValueError(
            f"{source}: line {reader.line_num}: {error}; double each quote inside a quoted field"
        ) from error


def parse_comment(header: Sequence[str], fields: Sequence[str], place: str) -> Comment:
    if len(fields) != len(header):
        raise ValueError(
            f"{place}: {len(fields)} fields, not {len(header)} (got {list(fields)!r:.80}); "
            "quote a text that has commas"
        )
    row = dict(zip(header, fields, strict=True))
    label = row["is_toxic"].strip()
    if label not in TOXIC_OF_LABEL:
        raise ValueError(
            f"{place}: is_toxic must be Toxic or Not Toxic (got {label!r}); correct it"
        )
    # The text as its author meant it: no byte-order marks, carriage returns or outer spaces.
    text = row["text"].replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n").strip()
    return Comment(text=text, toxic=TOXIC_OF_LABEL[label])


def distinct(comments: Sequence[Comment]) -> list[Comment]:
    """The first of each text, in the given order."""
    first_of_text: dict[str, Comment] = {}
    for comment in comments:
        first = first_of_text.setdefault(comment.text, comment)
        if first.toxic != comment.toxic:
            raise ValueError(
                f"the text {comment.text!r:.80} is both Toxic and Not Toxic; keep one of its lines"
            )
    return list(first_of_text.values())


def shuffled(comments: Sequence[Comment], purpose: str) -> list[Comment]:
    """The comments in an order that depends on their texts, the seed and the purpose alone."""
    place = f"{SEED}/{purpose}/"
    return sorted(comments, key=lambda each: hashlib.sha256((place + each.text).encode()).digest())


def toxic_count(comments: Sequence[Comment]) -> int:
    return sum(comment.toxic for comment in comments)


def pick_singles(pool: Sequence[Comment]) -> list[Comment]:
    """The first comments of each label, as many toxic as clean, in the pool's order."""
    picked = set()
    for toxic in (True, False):
        of_label = [comment for comment in pool if comment.toxic is toxic]
        if len(of_label) < SINGLES_PER_LABEL:
            raise ValueError(
                f"single comments: {SINGLES_PER_LABEL} with toxic={toxic} are needed "
                f"(got {len(of_label)}); use a larger source"
            )
        picked.update(of_label[:SINGLES_PER_LABEL])
    return [comment for comment in pool if comment in picked]


def thread_text(comments: Sequence[Comment]) -> str:
    """The comments one below the other, numbered so that one of many lines stays whole."""
    return "\n".join(
        f"Comment {number}: {comment.text}" for number, comment in enumerate(comments, start=1)
    )


def pick_thread(toxic_share: float, pool: Sequence[Comment]) -> list[Comment]:
    """Comments from the pool that fill one thread, as near to the share as whole comments allow."""
    picked: list[Comment] = []
    while len(thread_text(picked)) < MIN_THREAD_CHARACTERS:
        toxic_wanted = round(toxic_share * (len(picked) + 1))
        picked.append(next_comment(picked, toxic_wanted > toxic_count(picked), pool))
    if not MIN_THREAD_COMMENTS <= len(picked) <= MAX_THREAD_COMMENTS:
        raise ValueError(
            f"a thread must have {MIN_THREAD_COMMENTS} to {MAX_THREAD_COMMENTS} comments "
            f"(got {len(picked)}); change SEED or the source"
        )
    # Picked toxic comments are evenly spaced; a reader must not learn where to look.
    return shuffled(picked, "within a thread")


def next_comment(picked: Sequence[Comment], toxic: bool, pool: Sequence[Comment]) -> Comment:
    """The first comment of the pool with this label that the thread still has room for."""
    for comment in pool:
        if comment.toxic is not toxic or comment in picked:
            continue
        if len(thread_text([*picked, comment])) <= MAX_THREAD_CHARACTERS:
            return comment
    raise ValueError(
        f"a thread of {len(picked)} comments needs one more with toxic={toxic} and none is left "
        f"(got {len(pool)} comments for this thread); use a larger source or fewer threads"
    )


def compose(comments: Sequence[Comment]) -> tuple[list[Document], list[Document]]:
    """Distinct comments -> single-comment documents, thread documents."""
    pool = shuffled(comments, "over the corpus")
    singles = pick_singles(pool)
    taken = set(singles)
    threads = []
    for toxic_share in THREAD_TOXIC_SHARES:
        thread = pick_thread(toxic_share, [each for each in pool if each not in taken])
        taken.update(thread)
        threads.append(Document("thread", thread_text(thread), tuple(thread)))
    return (
        [Document("comment", single.text, (single,)) for single in singles],
        # By id, so that each file has threads of every toxic share.
        sorted(threads, key=lambda document: document.id),
    )


def json_lines(rows: Iterable[object]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parts(documents: Sequence[Document], size: int) -> list[Sequence[Document]]:
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def write_threads(documents: Sequence[Document], path: Path) -> None:
    """A Parquet file of small row groups. Its footer names pyarrow's version, but no time."""
    schema = pa.schema([(name, pa.string()) for name in ("id", "text", "kind")])
    table = pa.Table.from_pylist([document.row for document in documents], schema=schema)
    pq.write_table(
        table,
        path,
        row_group_size=THREADS_PER_ROW_GROUP,
        compression="zstd",
        # Not the text: its dictionary would be every text, its statistics whole texts.
        use_dictionary=["kind"],
        write_statistics=["id", "kind"],
    )


def build(source: Path, out: Path) -> None:
    """Write the corpus files under out/parts and the gold labels beside them."""
    comments = read_comments(source)
    with_text = [comment for comment in comments if comment.text]
    pool = distinct(with_text)
    singles, threads = compose(pool)
    (out / "parts").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts(singles, SINGLES_PER_PART)):
        lines = zstandard.ZstdCompressor().compress(json_lines(document.row for document in part))
        (out / "parts" / f"comments-{number:03d}.jsonl.zst").write_bytes(lines)
    for number, part in enumerate(parts(threads, THREADS_PER_PART)):
        write_threads(part, out / "parts" / f"threads-{number:03d}.parquet")
    gold = json_lines(document.gold for document in (*singles, *threads))
    (out / "gold.jsonl").write_bytes(gold)
    logger.info(
        "%d comments (%d empty, %d repeated): %d are documents of their own, %d are in %d threads",
        len(comments),
        len(comments) - len(with_text),
        len(with_text) - len(pool),
        len(singles),
        sum(len(thread.comments) for thread in threads),
        len(threads),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 after one line on stderr that says what to mend."""
    parser = argparse.ArgumentParser(description="Build the demo corpus and its gold labels.")
    for name, default, text in (
        ("--source", HERE / "source" / "toxicity_en.csv", "CSV with columns text and is_toxic"),
        ("--out", HERE, "folder that receives parts/ and gold.jsonl"),
    ):
        parser.add_argument(name, type=Path, default=default, help=text)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        build(options.source, options.out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
