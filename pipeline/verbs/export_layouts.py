"""The files of a shard in the layouts of datatrove and Dolma. Entry point: `layout_files`.

datatrove reads `data/`: lines with `text`, `id` and `metadata`. Dolma reads `documents/`: lines
with `id`, `text` and `source`; and `attributes/<spec>/`: files of the same names, whose lines have
for each probability `<spec>__<task>__<label>: [[start, end, p]]`. The characters that it is about
are those of the chunk that decided, or of the whole text; of a task with several labels, always
of the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.errors import option_error
from pipeline.ledger.columns import CHUNK
from pipeline.ledger.flat import FlatColumn
from pipeline.ledger.rows import INPUT, TEXT_COLUMN
from pipeline.options import Layout
from pipeline.sources.rule import named, quoted

SUFFIX = ".jsonl.gz"
FIRST = {"datatrove": "data", "dolma": "documents"}  # the folder with the texts


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file of an export: its name, and its rows as a query of the table `exported`."""

    name: str
    query: str = "from exported"


def layout_files(
    layout: Layout, name: str, columns: Sequence[FlatColumn], spec: str
) -> tuple[TableFile, ...]:
    """The files of a shard with this name; `columns` are those of `exported`, which has the text.

    SpecError if a task of Dolma has no probabilities, because it has `top_k`.
    """
    name, [text] = name + SUFFIX, [c.name for c in columns if c.source == (TEXT_COLUMN,)]
    if layout == "datatrove":
        others = [c.name for c in columns if c.name not in (text, "doc_id")]
        metadata = _struct((other, named(other)) for other in others)
        query = f"select {named(text)} as text, doc_id as id, {metadata} as metadata from exported"
        return (TableFile(f"{FIRST[layout]}/{name}", query),)
    documents = f"select doc_id as id, {named(text)} as text, {quoted(spec)} as source"
    attributes = _struct(
        (f"{spec}__{task}__{label}", spans) for task, label, spans in _spans(columns)
    )
    return (
        TableFile(f"{FIRST[layout]}/{name}", f"{documents} from exported"),
        TableFile(
            f"attributes/{spec}/{name}",
            f"select doc_id as id, {attributes} as attributes from exported",
        ),
    )


def _spans(columns: Sequence[FlatColumn]) -> Iterator[tuple[str, str, str]]:
    """Each task and label, or `score`, with the SQL of its spans; none where there is no answer."""
    own = (column for column in columns if column.source[0] != INPUT)
    by_source = {column.source: named(column.name) for column in own}
    if top := [source[0] for source in by_source if source[1:] == ("top",)]:
        fix = f"has no place for the answers of task {top[0]}, which has top_k; write datatrove"
        raise option_error("layout", fix, "dolma")
    for source, value in by_source.items():
        match source:
            case (task, "p", label) | (task, "score" as label):
                start, end = (by_source.get((task, CHUNK, side)) for side in ("start", "end"))
                if (task, "labels") in by_source:  # — the chunk is that of one of its labels
                    start = end = None
                place = f"coalesce({start or 'null'}, 0), coalesce({end or 'null'}, n_chars)"
                spans = f"json_array(json_array({place}, {value}))"
                yield task, label, f"if({value} is null, json_array(), {spans})"


def _struct(fields: Iterator[tuple[str, str]]) -> str:
    """A struct of these names and values, as SQL."""
    return f"{{{', '.join(f'{quoted(name)}: {value}' for name, value in fields)}}}"
