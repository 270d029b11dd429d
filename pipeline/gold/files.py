"""The rows of a file of gold labels (CSV, TSV, JSON lines or Parquet), as columns of plain values.

Entry points: `gold_format`, `read_gold_rows`.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import Option, Problem, SpecError, StorageError, UnreadableError, one_line
from pipeline.hashes import parse_json
from pipeline.ledger.flat import restore_formulas
from pipeline.sources.id_text import plain_values
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, decompressed, opened
from pipeline.stores.retries import option_errors

_TEXTS = ("csv", "tsv", "jsonl", "ndjson")
FORMATS = (*(f"{name}{codec}" for name in _TEXTS for codec in ("", ".gz", ".zst")), "parquet")
# The fields of a line in a file of people's actions (`people.GoldLine`).
LINE_FIELDS = frozenset(
    {"doc_id", "content_hash", "task", "action", "label", "by", "at", "seconds", "shown"}
)
HASH = "content_hash"  # of them, and of a document: the hash of its text
_WORD = re.compile(r"[\w.+-]*")
MAX_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GoldRows:
    """The file's columns, each as long as it has rows; a missing value is None."""

    path: str
    columns: Mapping[str, Sequence[object]]
    # By task, why documents are no random sample, with their number; {} without a reason.
    chosen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def place(self, row: int, column: str | None = None) -> Option:
        """A row's place, for errors."""
        of_column = "" if column is None else f", column {column}"
        return Option(part=f"{self.path}, row {row + 1}{of_column}")


def gold_error(path: str, fix: str) -> SpecError:
    """The error of a gold file, which an option or the spec names."""
    return SpecError([Problem(Option(part=path), fix)])


def gold_format(path: str) -> str | None:
    """The supported format that a file's name ends in, or None."""
    name = path.lower()
    return next((format for format in FORMATS if name.endswith(f".{format}")), None)


def read_gold_rows(path: str, format: str, options: Options) -> GoldRows:
    """All rows of the file, in order. It is small, and is held in memory."""
    try:
        with option_errors("input.storage_options", options):
            return GoldRows(path, _columns(path, format, options))
    except (ValueError, ImportError) as error:  # no such protocol; its package is not installed
        raise gold_error(path, f"cannot be opened: {error}") from error
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise gold_error(path, "there is no such file") from error
        raise


def _columns(path: str, format: str, options: Options) -> dict[str, list[object]]:
    try:
        if format == "parquet":
            with opened(path, options) as file, pq.ParquetFile(file) as parquet:
                return _as_columns(parquet.read(use_threads=False))
        with decompressed(path, format, options) as stream:
            data = _whole(stream).removeprefix(codecs.BOM_UTF8)
        is_lines = format.startswith(("jsonl", "ndjson"))
        return _jsonl_columns(path, data) if is_lines else _delimited_columns(path, format, data)
    except (OSError, EOFError, csv.Error, pa.ArrowException, UnicodeDecodeError) as error:
        reason = f"cannot be read as gold labels: {one_line(error)}"
        raise UnreadableError(f"{path}: {reason}") from error


def _whole(stream: Stream) -> bytes:
    """All bytes of the stream; OSError if they are too many to be held."""
    data = bytearray()
    for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
        data += block
        if len(data) > MAX_BYTES:
            raise OSError(f"it is longer than {MAX_BYTES:,} bytes")
    return bytes(data)


def _delimited_columns(path: str, format: str, data: bytes) -> dict[str, list[object]]:
    """Every value is a string, so that a label `01` or `yes` is not converted.

    The apostrophes are removed that assay writes before formulas. TSV has no quotes.
    """
    is_csv = format.startswith("csv")
    csv.field_size_limit(MAX_BYTES)  # of the process; its default is less than many texts
    lines = csv.reader(
        io.StringIO(data.decode("utf-8"), newline=""),
        delimiter="," if is_csv else "\t",
        quoting=csv.QUOTE_MINIMAL if is_csv else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        names, *rows = [line for line in lines if line] or [[]]
    except csv.Error as error:
        reason = f"line {lines.line_num}: a quote seems not to be closed: {error}"
        raise UnreadableError(f"{path}, {reason}; close the quotes") from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            reason = f"has {len(row)} values, and the file has {len(names)} columns"
            raise UnreadableError(f"{path}, row {number}: {reason}")
    columns = (pa.chunked_array([of], pa.large_string()) for of in zip(*rows, strict=True))
    texts = [restore_formulas(column) for column in columns] or [pa.nulls(0)] * len(names)
    return _as_columns(pa.table(texts, names=names))


def _jsonl_columns(path: str, data: bytes) -> dict[str, list[object]]:
    values: list[dict[str, object]] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line.decode("utf-8"))
        except ValueError as error:
            # — a crash leaves the last line unfinished; `GoldFile.open` removes it
            of_people = bool(values) and values[0].keys() >= LINE_FIELDS
            if number == len(lines) and of_people and is_beginning(line):
                break
            raise UnreadableError(f"{path}, line {number}: is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UnreadableError(f"{path}, line {number}: is not a JSON object")
        values.append(value)
    names = dict.fromkeys(name for value in values for name in value)
    return {name: [value.get(name) for value in values] for name in names}


def is_beginning(line: bytes) -> bool:
    """Whether this is the beginning of a line of JSON, cut anywhere, as a crash leaves one."""
    text = line.decode(errors="ignore")
    try:
        parse_json(text)
    except json.JSONDecodeError as error:
        remainder = text[error.pos :]
        in_text = error.msg.startswith("Unterminated string")
        in_escape = error.msg.startswith("Invalid \\u") and '"' not in remainder
        # — else in a word or a number, or between two values
        return text.startswith("{") and bool(in_text or in_escape or _WORD.fullmatch(remainder))
    except ValueError:  # — nested too deeply, or a number of too many digits
        return False
    return False


def _as_columns(table: pa.Table) -> dict[str, list[object]]:
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise pa.ArrowInvalid(f"columns {twice} occur twice; rename or remove one")
    columns = zip(names, table.itercolumns(), strict=True)
    return {name: list(chain(*map(plain_values, own.iterchunks()))) for name, own in columns}
