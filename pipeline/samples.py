"""A few of a corpus's documents, as the model reads them, for a check or a bench.

Knows shards and tokenizers. Knows nothing of models or of what the samples are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pipeline.data.documents import OK
from pipeline.data.shards import Shard
from pipeline.data.source import read_documents
from pipeline.errors import DocumentError, Problem, SpecError
from pipeline.inference.pieces import fit
from pipeline.inference.tokens import DocumentTokenizer
from pipeline.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """A document as the model reads it, or the first piece of one read in chunks."""

    doc_id: str
    token_ids: tuple[int, ...]


def take_samples(
    shards: Sequence[Shard], tokenizer: PreTrainedTokenizerBase, spec: JobSpec, wanted: int
) -> list[Sample]:
    """Up to `wanted` readable documents of shards spread evenly over the corpus, in its order.

    SpecError where no document can be read: there is nothing to try the model on.
    """
    encoder = DocumentTokenizer(tokenizer)
    step = max(1, len(shards) // max(1, wanted))
    spread = shards[::step]
    rest = [shard for place, shard in enumerate(shards) if place % step]
    samples: list[Sample] = []
    for place, shard in enumerate([*spread, *rest]):
        share = -(-(wanted - len(samples)) // max(1, len(spread) - place))
        for sample in _readable(shard, encoder, spec):
            if not share:
                break
            samples.append(sample)
            share -= 1
    if wanted and not samples:
        fix = "no document there has text that can be read; name the column that holds it"
        raise SpecError([Problem("input.text", fix, spec.input.text)])
    return samples


def _readable(shard: Shard, encoder: DocumentTokenizer, spec: JobSpec) -> Iterator[Sample]:
    rules = spec.documents
    for row in read_documents(shard, spec.input.storage_options).to_pylist():
        if row["status"] != OK:
            continue
        try:
            token_ids = encoder.encode(row["text"])
        except DocumentError:
            continue  # a run writes its row with the reason
        fitted = fit(
            token_ids,
            max_tokens=rules.max_tokens,
            too_long=rules.too_long,
            overlap_tokens=rules.overlap_tokens,
        )
        if fitted.tokens:
            yield Sample(row["doc_id"], fitted.token_ids[0])
