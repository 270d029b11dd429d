"""Greedy continuations of many texts below one kept prefix, with the probability of each token.

Entry points: `ContinuationEngine.decode`, and `ShardContinuations` for the rows of a shard. Texts
are read in packed batches, and their keys and values are kept, padded within a batch. Then all
texts get their next token in the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.inference.attention.compiled import to_device
from pipeline.inference.attention.hook import PrefixKV
from pipeline.inference.attention.kernels import Attended, LayerKV, attend, attend_rows
from pipeline.inference.attention.merge import merge_into
from pipeline.inference.attention.rounded_kv import RoundedKV
from pipeline.inference.attention.tree import Tree
from pipeline.inference.engine import is_out_of_memory
from pipeline.inference.memory import KV_BLOCK_TOKENS, shape_of
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import Usage, pack
from pipeline.inference.schedules.forward import attend_everywhere, prefill, run
from pipeline.inference.shard_answers import OUT_OF_MEMORY, first_of_equals

# Rows between two reports of progress.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Continuation:
    """The likeliest next tokens of a text, one after the other."""

    token_ids: Sequence[int]  # up to and with the token that ends a text, if it came
    p: Sequence[float]  # [tokens]: of each token, in the whole vocabulary


class ContinuationEngine:
    """A model that has read its prompt's prefix, ready to continue any texts below it.

    Args:
        model: The model; not one with recurrent states.
        prefix: The token ids before every text.
        stop_ids: Tokens that end a continuation.
        max_batch_tokens: The most tokens of texts that are read in one forward.
        max_kept_bytes: The most bytes of keys and values that are kept at the same time.

    Attributes:
        peak_kept_bytes: The most bytes of the texts' keys and values that were kept so far.
    """

    def __init__(
        self,
        model: LoadedModel,
        prefix: Sequence[int],
        *,
        stop_ids: Collection[int],
        max_batch_tokens: int,
        max_kept_bytes: int,
    ) -> None:
        assert model.schedule == "fused", model.network.config.model_type
        self._model, self._prefix = model, prefill(model, prefix)
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=model.device)
        self._max_batch_tokens = max_batch_tokens
        layers = model.network.config.get_text_config().num_hidden_layers
        self.peak_kept_bytes = 0
        # — with padding, twice as many at most
        self._max_kept_tokens = max(1, max_kept_bytes // (2 * layers * shape_of(model).kv_bytes))

    def decode(
        self,
        texts: Sequence[Sequence[int]],
        tokens: int,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Continuation | None]:
        """A continuation of each text, of at most `tokens` tokens; None: no memory for it alone.

        A text has at least one token. `on_step` is called after each forward.
        """
        results: list[Continuation | None] = [None] * len(texts)
        lengths = [len(text) + tokens for text in texts]
        waiting = pack(lengths, max_tokens=self._max_kept_tokens)
        while waiting:
            group = waiting.pop()
            try:
                decoded = self._decode_together([texts[i] for i in group], tokens, on_step)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(group) > 1:
                    half = len(group) // 2
                    waiting += [group[half:], group[:half]]
                continue
            for i, continuation in zip(group, decoded, strict=True):
                results[i] = continuation
        return results

    @torch.inference_mode()
    def _decode_together(
        self, texts: Sequence[Sequence[int]], tokens: int, on_step: Callable[[], None]
    ) -> Iterator[Continuation]:
        """Continuations of these texts, whose keys and values are kept at the same time."""
        order, batches, logits = self._read(texts, on_step)
        kept_bytes = sum(kv.nbytes for batch in batches for kv in batch.layers.values())
        self.peak_kept_bytes = max(self.peak_kept_bytes, kept_bytes)
        device, stop_ids = self._model.device, self._stop_ids
        start = self._prefix.tokens if self._prefix else 0
        positions = torch.tensor([start + len(texts[i]) for i in order], device=device)
        attention = _DecodeAttention(self._prefix, batches, positions)
        ids = torch.zeros(len(texts), tokens, dtype=torch.int64, device=device)
        p = torch.zeros(len(texts), tokens, device=device)
        ended = torch.zeros(len(texts), dtype=torch.bool, device=device)
        counts = torch.zeros(len(texts), dtype=torch.int64, device=device)  # tokens of each text
        for step in range(tokens):
            best, next_ids = logits.max(dim=-1)
            ids[:, step] = next_ids
            p[:, step] = (best - logits.logsumexp(dim=-1)).exp()
            counts += ~ended
            ended |= torch.isin(next_ids, stop_ids)
            if step == tokens - 1 or ended.all():
                break
            states = run(self._model.decoder, attention, positions + step, input_ids=next_ids)
            attention.step += 1
            logits = self._logits(states)
            on_step()
        place = np.argsort(order)
        rows = zip(counts.tolist(), ids.tolist(), p.tolist(), strict=True)
        decoded = [Continuation(own[:count], of[:count]) for count, own, of in rows]
        return (decoded[i] for i in place)

    def _read(
        self, texts: Sequence[Sequence[int]], on_step: Callable[[], None]
    ) -> tuple[list[int], list[_KeptTexts], Tensor]:  # logits [texts, vocab] fp32
        """The texts' keys and values, and the logits after each; and the order of their rows."""
        order: list[int] = []
        batches: list[_KeptTexts] = []
        logits: list[Tensor] = []
        for batch in padded_batches([len(text) for text in texts], self._max_batch_tokens):
            lengths = [len(texts[i]) for i in batch]
            tree = Tree.of(lengths, prefix_tokens=self._prefix.tokens if self._prefix else 0)
            keep: dict[int, LayerKV] = {}
            attention = attend_everywhere(self._model, tree, self._prefix, keep=keep)
            of_batch = np.array([token for i in batch for token in texts[i]])
            ends = np.cumsum(lengths) - 1
            token_ids, positions, rows = to_device(
                [of_batch, tree.positions, ends], self._model.device
            )
            states = run(self._model.decoder, attention, positions, input_ids=token_ids)
            logits.append(self._logits(states[rows]))
            kept = _KeptTexts.of(keep, lengths, len(order), self._model.kv)
            order, batches = [*order, *batch], [*batches, kept]
            on_step()
        return order, batches, torch.cat(logits)

    def _logits(self, states: Tensor) -> Tensor:  # [texts, vocab] fp32
        return self._model.unembed(states).float()


@dataclass(frozen=True, slots=True)
class _KeptTexts:
    """The keys and values of the texts of one batch, padded to the longest of them."""

    layers: Mapping[int, LayerKV | RoundedKV]  # [texts * width, kv_heads, dim]
    lengths: Tensor  # [texts] int64
    width: int
    first: int  # the row of the first of these texts among all that are decoded together

    @classmethod
    def of(
        cls, packed_kv: dict[int, LayerKV], lengths: Sequence[int], first: int, kind: str
    ) -> _KeptTexts:
        """Takes the packed keys and values out of the dictionary, a layer at a time."""
        width = max(lengths)
        if kind != "none":  # so that no block of numbers with one step is of two texts
            width += -width % KV_BLOCK_TOKENS
        layers: dict[int, LayerKV | RoundedKV] = {}
        for layer in [*packed_kv]:
            kv = packed_kv.pop(layer)
            kept = LayerKV(*(_padded(each, lengths, width) for each in (kv.k, kv.v)))
            layers[layer] = kept if kind == "none" else RoundedKV.of(kept, kind)
        return cls(layers, torch.tensor(lengths, device=kept.k.device), width, first)

    @property
    def rows(self) -> slice:
        """Its texts among all that are decoded together."""
        return slice(self.first, self.first + len(self.lengths))

    def layer(self, layer: int) -> LayerKV:  # [texts, width, kv_heads, dim]
        kept = self.layers[layer]
        flat = kept if isinstance(kept, LayerKV) else kept.widened()
        shape = (len(self.lengths), self.width, *flat.k.shape[1:])
        return LayerKV(flat.k.view(shape), flat.v.view(shape))


def padded_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of `lengths` in batches of at most `max_tokens` with padding, longest first.

    Each is at least half as long as the longest of its batch, or alone.
    padded_batches([5, 1, 4, 2], 10) -> [0, 2], [3, 1]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batch[0]] if batch else 0
        if batch and (2 * lengths[index] < longest or longest * (len(batch) + 1) > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(packed_rows: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """[tokens, kv_heads, dim] of packed texts as [texts * width, kv_heads, dim], zeros behind."""
    texts = torch.split(packed_rows, list(lengths))
    return torch.cat([pad(text, (0, 0, 0, 0, 0, width - len(text))) for text in texts])


@dataclass(slots=True)
class _DecodeAttention:
    """Attention of one new token a text: over the prefix, its text, and what was decoded."""

    prefix: PrefixKV | None
    batches: Sequence[_KeptTexts]
    positions: Tensor  # [texts] int64: of the first decoded token
    step: int = 0  # how many tokens were decoded before
    decoded: dict[int, LayerKV] = field(default_factory=dict)  # [texts, tokens, kv_heads, dim]

    def attend(
        self,
        layer: int,
        q: Tensor,  # [1, texts, heads, dim]
        own: LayerKV,  # [1, texts, kv_heads, dim]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Attended:
        rows = q[0]
        kv = LayerKV(own.k[0, :, None], own.v[0, :, None])
        if (before := self.decoded.get(layer)) is not None:
            kv = LayerKV(torch.cat([before.k, kv.k], 1), torch.cat([before.v, kv.v], 1))
        self.decoded[layer] = kv
        of_window = None
        if window is not None:
            back = torch.arange(self.step, -1, -1, device=q.device)
            of_window = (back >= window).expand(len(rows), -1)
        seen = attend_rows(rows, kv.k, kv.v, scale=scale, hidden=of_window, softcap=softcap)
        now = self.positions + self.step  # [texts]
        for batch in self.batches:
            of_batch, texts = batch.rows, batch.layer(layer)
            columns = torch.arange(batch.width, device=q.device)
            hidden = columns >= batch.lengths[:, None]  # [texts, width]
            if window is not None:
                back_to_text = batch.lengths[:, None] + self.step - columns
                hidden |= back_to_text >= window
            part = attend_rows(
                rows[of_batch], texts.k, texts.v, scale=scale, hidden=hidden, softcap=softcap
            )
            merge_into(Attended(seen.out[:, of_batch], seen.lse[:, of_batch]), part)
        if self.prefix is not None:
            above, beyond = self.prefix.layer(layer), None
            if window is not None:
                beyond = now[:, None] - torch.arange(len(above.k), device=q.device) >= window
            part = attend(
                q, above.k[None], above.v[None], scale=scale, hidden=beyond, softcap=softcap
            )
            merge_into(seen, part)
        return seen


class ShardContinuations:
    """The continuations of the rows of one shard, collected while they are decoded.

    Of rows with equal texts the first is decoded; the others get its continuation.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],  # [rows] token ids; none: nothing to continue
        identities: Sequence[Hashable],  # [rows]: what identifies the text
        tokens: int,
    ) -> None:
        self.rows = len(texts)
        self.usage = Usage()
        self._texts, self._tokens = texts, tokens
        self._first_of = first_of_equals(
            [[text] if len(text) else [] for text in texts], identities
        )
        self._decoded: dict[int, Continuation] = {}
        self._failed: dict[int, str] = {}  # status by row

    @property
    def asked_rows(self) -> int:
        """How many rows the model reads."""
        return sum(bool(len(text)) for text in self._texts) - len(self._first_of)

    def decode_rows(
        self,
        engine: ContinuationEngine,
        start: int,
        end: int,
        on_rows: Callable[[int, float], None] = lambda _rows, _share: None,
    ) -> None:
        """Adds the continuations of the rows from `start` to before `end`.

        `on_rows` is called with the number of rows, and with their share of all that are decoded.
        """
        rows = [r for r in range(start, end) if len(self._texts[r]) and r not in self._first_of]
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            own = rows[first : first + _ROWS_AT_ONCE]
            decoded = engine.decode(
                [self._texts[row] for row in own], self._tokens, on_step=lambda: on_rows(0, 0.0)
            )
            for row, continuation in zip(own, decoded, strict=True):
                if continuation is None:
                    self._failed[row] = OUT_OF_MEMORY
                else:
                    self._decoded[row] = continuation
            read = sum(len(self._texts[row]) for row in own)
            made = sum(len(each.token_ids) for each in decoded if each)
            self.usage += Usage(prefix_tokens_computed=read, question_tokens_computed=made)
            on_rows(len(own), len(own) / self.asked_rows)

    def fail_rows(self, rows: Iterable[int], status: str) -> None:
        """These rows have no continuation; `status` says why."""
        for row in rows:
            self._failed[row] = status
            self._decoded.pop(row, None)

    def continuations(self) -> list[Continuation | None]:
        """Of each row; None where there is none."""
        return [self._decoded.get(self._first_of.get(row, row)) for row in range(self.rows)]

    def statuses(self, as_read: Sequence[str]) -> list[str]:
        """The status of each row: why it failed here, or its status as it was read."""
        pairs = enumerate(as_read)
        return [self._failed.get(self._first_of.get(row, row), status) for row, status in pairs]
