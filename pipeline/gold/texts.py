"""The texts of gold documents: the gold's own, or those that the corpus has under their names.

Knows gold keys and shards. Knows nothing of labels, tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.gold.labels import Gold
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.sources.streams import Options

NO_TEXT = "not in the corpus, and the gold has no text"


def gold_texts(
    gold: Gold, shards: Callable[[], Sequence[Shard]], options: Options
) -> list[tuple[str, str]]:  # [rows]: the text, and the status that a run would give it
    """A text for every row; the corpus is read where the gold has none, and as far as needed."""
    own = documents_from(RawRow(text) for text in gold.texts or [None] * gold.rows)
    found = {
        key: (text, status)
        for key, text, status, given in zip(
            gold.keys,
            own["text"].to_pylist(),
            own["status"].to_pylist(),
            gold.texts or [None] * gold.rows,
            strict=True,
        )
        if given is not None
    }
    if len(found) < gold.rows:
        wanted = set(gold.keys) - set(found)
        found |= _from_corpus(wanted, gold.by, shards(), options)
    rows = [found.get(key, (None, NO_TEXT)) for key in gold.keys]
    return [(text or "", status) for text, status in rows]


def _from_corpus(
    wanted: set[str], by: str, shards: Sequence[Shard], options: Options
) -> dict[str, tuple[str | None, str]]:
    """The first text of each key in the corpus, and its status."""
    found: dict[str, tuple[str | None, str]] = {}
    for shard in shards:
        if len(found) == len(wanted):
            break
        for documents in read_documents(shard, options):
            keys = documents.column(by).to_pylist()
            for row, key in enumerate(keys):
                if key in wanted and key not in found:
                    status = documents.column("status")[row].as_py()
                    found[key] = documents.column("text")[row].as_py(), status
    return found
