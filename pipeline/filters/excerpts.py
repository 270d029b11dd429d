"""Parts of the texts of some labelled documents, and their images. Entry point: `excerpts`."""

from __future__ import annotations

import base64
import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DocumentError, StorageError
from pipeline.filters.labelled import LabelledRows, labelled_documents
from pipeline.inference.decoding import decode_image
from pipeline.ledger.cuts import CutLog
from pipeline.ledger.rows import read_documents_file
from pipeline.sources.documents import IMAGE_FIELD
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options

PICTURE_PIXELS = 240  # of its longer side
Place = tuple[str, int, int]  # path, row of the file, and where the excerpt begins


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a document that a page shows."""

    text: str | None  # a part of it
    image: bytes | None  # the file


def excerpts(
    labelled: LabelledRows, places: Iterable[Place], *, chars: int | None
) -> list[Excerpt]:  # [places]
    """Some characters of the text of each labelled row, which may be very long, and its image.

    None for `chars`: the whole text. StorageError if a text is no longer what was labelled.
    """
    store, options = labelled.store, labelled.spec.input.storage_options
    asked = list(places)
    unread: dict[str, set[tuple[int, int]]] = {}  # by path, the rows of the file, with the start
    for path, row, start in asked:
        unread.setdefault(path, set()).add((row, start))
    shards = {shard.id: shard for cut in CutLog(store).cuts.values() for shard in cut}
    excerpts_at: dict[Place, Excerpt] = {}
    for named in labelled.contents.shards:
        first, end = named.start_row, named.end_row
        own = unread.get(named.path, ())
        inside = sorted((row - first, start) for row, start in own if first <= row < end)
        if not inside:
            continue
        if named.sid not in shards:
            raise StorageError(
                f"{store.url}/inputs: does not have the shard {named.sid} of {named.path}; "
                "restore it"
            )
        hashes = read_documents_file(store, named)["content_hash"].combine_chunks()
        for place, excerpt in _parts(shards[named.sid], options, hashes, inside, chars):
            index, start = place
            excerpts_at[named.path, first + index, start] = excerpt
    return [excerpts_at[place] for place in asked]


def _parts(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs of the shard]
    chosen: Sequence[tuple[int, int]],  # docs of the shard, ascending, each with the start
    chars: int | None,
) -> Iterator[tuple[tuple[int, int], Excerpt]]:
    """The part of each chosen document; the shard is read up to the last one."""
    left, first = deque(chosen), 0
    for documents in labelled_documents(shard, options, hashes):
        while left and left[0][0] < first + len(documents):
            row, start = place = left.popleft()
            end = None if chars is None else start + chars
            text = documents["text"].slice(row - first, 1)
            [part] = pc.utf8_slice_codeunits(text, start, end)
            has_image = IMAGE_FIELD.name in documents.column_names
            image = documents[IMAGE_FIELD.name][row - first].as_py() if has_image else None
            yield place, Excerpt(part.as_py(), image)
        first += len(documents)
        if not left:
            return


def small_png(image: bytes | None) -> str | None:
    """A small PNG of the image, in base64; None without an image that can be decoded."""
    if image is None:
        return None
    try:
        picture = decode_image(image)
    except DocumentError:
        return None  # — the status of its row has the reason
    picture.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
