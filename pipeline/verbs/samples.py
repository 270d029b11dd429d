"""A few documents of a corpus, as the model reads them, for `check`, `plan` and `bench`.

Entry point: `take_samples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from pipeline.errors import Problem, SpecError
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.runtime.assembly import chunk_document
from pipeline.sources.documents import OK
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """A document as the model reads it: one piece, or the chunks of a long document."""

    doc_id: str
    pieces: tuple[tuple[int, ...], ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first piece."""
        return self.pieces[0]


def take_samples(
    shards: Sequence[Shard], tokenizer: PreTrainedTokenizerBase, spec: JobSpec, count: int
) -> list[Sample]:
    """Up to `count` readable documents, from shards at even distances over the corpus.

    Shards are opened until there are enough documents, and no more of a shard is read than is
    taken. SpecError if no document can be read.
    """
    encoder = DocumentTokenizer(tokenizer)
    step = max(1, len(shards) // max(1, count))
    spread = shards[::step]
    rest = [shard for place, shard in enumerate(shards) if place % step]
    samples: list[Sample] = []
    for place, shard in enumerate([*spread, *rest]):
        if len(samples) >= count:
            break
        share = -(-(count - len(samples)) // max(1, len(spread) - place))
        samples += islice(_readable(shard, encoder, spec), share)
    if count and not samples:
        documents = next(read_documents(shards[0], spec.input.storage_options))
        reason = documents.column("status")[0].as_py().removeprefix("error:")
        fix = "no document has readable text in this column"
        fix += f" (the first row: {reason}); name another column, or correct the files"
        raise SpecError([Problem("input.text", fix, spec.input.text)])
    return samples


def _readable(shard: Shard, encoder: DocumentTokenizer, spec: JobSpec) -> Iterator[Sample]:
    for documents in read_documents(shard, spec.input.storage_options):
        columns = (documents.column(name) for name in ("doc_id", "text", "status"))
        for doc_id, text, status in zip(*columns, strict=True):
            if status.as_py() != OK:
                continue
            pieces, _ = chunk_document(encoder, text.as_py(), OK, spec.documents)
            if pieces:  # otherwise a run writes a row with the reason
                yield Sample(doc_id.as_py(), tuple(pieces))
