"""A few documents of a corpus, as the model reads them. Entry point: `take_samples`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeline.errors import Problem, SpecError
from pipeline.inference.engine import DocumentIds
from pipeline.inference.images import as_document
from pipeline.runtime.assembly import DocumentReader
from pipeline.sources.documents import OK, images_of
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec


@dataclass(frozen=True, slots=True)
class SampledDocument:
    """A document as the model reads it; of a long document in chunks, the first."""

    doc_id: str
    token_ids: DocumentIds


def take_samples(
    shards: Sequence[Shard], reader: DocumentReader, spec: JobSpec, count: int
) -> list[SampledDocument]:
    """Up to `count` readable documents, from shards at even distances over the corpus.

    Shards are opened until there are enough documents, and no more of a shard is read than is
    taken. SpecError if no document can be read.
    """
    step = max(1, len(shards) // max(1, count))
    spread = shards[::step]
    rest = [shard for place, shard in enumerate(shards) if place % step]
    samples: list[SampledDocument] = []
    for place, shard in enumerate([*spread, *rest]):
        if len(samples) >= count:
            break
        share = -(-(count - len(samples)) // max(1, len(spread) - place))
        samples += islice(_readable(shard, reader, spec), share)
    if count and not samples:
        documents = next(read_documents(shards[0], spec.input.storage_options))
        text, status = (documents.column(name)[0].as_py() for name in ("text", "status"))
        _, reason = reader.chunks(text, status, next(images_of(documents)))
        content, key, column = "readable text", "input.text", spec.input.text
        if spec.input.image is not None:
            content, key, column = "a readable image", "input.image", spec.input.image
        fix = f"no document has {content} in this column (the first row: "
        fix += f"{reason.removeprefix('error:')}); name another column, or correct the files"
        raise SpecError([Problem(key, fix, column)])
    return samples


def _readable(shard: Shard, reader: DocumentReader, spec: JobSpec) -> Iterator[SampledDocument]:
    for documents in read_documents(shard, spec.input.storage_options):
        columns = (documents.column(name) for name in ("doc_id", "text", "status"))
        for doc_id, text, status, image in zip(*columns, images_of(documents), strict=True):
            if status.as_py() != OK:
                continue
            pieces, _ = reader.chunks(text.as_py(), OK, image)
            if pieces:  # otherwise a run writes a row with the reason
                yield SampledDocument(doc_id.as_py(), as_document(pieces[0], image))
