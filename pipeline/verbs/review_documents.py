"""The documents of a corpus that people are asked about: drawn at random, or known by their text.

Entry points: `drawn_documents` and `documents_with`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import nsmallest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.hashes import sha256_hex
from pipeline.ledger.cuts import load_or_cut
from pipeline.sources.documents import OK
from pipeline.sources.shards import MAX_SHARD_BYTES
from pipeline.sources.source import find_objects, read_documents
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import open_store

# Documents that are read for each one that is drawn: of a larger corpus, not all are.
_READ_FOR_ONE = 50


class Document(NamedTuple):
    """A document with a text; their order is random."""

    key: str  # random, by the content and the seed
    hash: str  # of the content
    doc_id: str
    text: str


def drawn_documents(
    spec: JobSpec, count: int, *, without: Collection[str], seed: int, cache_dir: Path
) -> list[Document]:
    """At most `count` random documents with other content hashes, in random order."""

    def candidates() -> Iterator[Document]:
        read = 0
        for document in _documents(spec, seed, cache_dir):
            if document.hash not in without:
                yield document
                read += 1
            if read == _READ_FOR_ONE * count:
                return

    return nsmallest(count, candidates()) if count else []


def documents_with(
    spec: JobSpec, hashes: Collection[str], *, seed: int, cache_dir: Path
) -> dict[str, Document]:
    """The documents with these content hashes; the input is read until all of them are read."""
    own: dict[str, Document] = {}
    if hashes:
        for document in _documents(spec, seed, cache_dir):
            if document.hash in hashes:
                own[document.hash] = document
                if len(own) == len(hashes):
                    break
    return own


def of_another_corpus(missing: int, documents: int) -> str:
    """What to do where documents of a file of answers are not in the input."""
    return (
        f"{missing:,} of its {documents:,} documents are not in the input: it is of another "
        "corpus, or they were changed; name the spec whose documents they are"
    )


def _documents(spec: JobSpec, seed: int, cache_dir: Path) -> Iterator[Document]:
    """The documents with a text, once each, file by file in random order."""
    store, source = open_store(spec.output, spec.storage_options), spec.input
    objects = find_objects(source.path, cache_dir, source.storage_options, output=store.url)
    shards = load_or_cut(store, objects, source.columns, MAX_SHARD_BYTES, keep=False).shards
    read: set[str] = set()
    for number in np.random.default_rng(seed).permutation(len(shards)):
        for documents in read_documents(shards[number], source.storage_options):
            columns = (documents.column(n) for n in ("content_hash", "doc_id", "text", "status"))
            for text_hash, doc_id, text, status in zip(*columns, strict=True):
                own = text_hash.as_py()
                if status.as_py() == OK and own not in read:
                    read.add(own)
                    key = sha256_hex(f"review {seed} {own}".encode(), 16)
                    yield Document(key, own, doc_id.as_py(), text.as_py())
