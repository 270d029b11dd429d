"""Counts of the work on some shards: `Counts`, and `ShardCounts` for one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.errors import AssayError, ServerError, UnavailableError, one_line
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.label_files import FileCounts
from pipeline.sources.documents import is_failed_status


class Counts(Counter[tuple[str, ...]]):
    """Numbers by key; `update` adds.

    ("rows", STATUS)             rows that may be asked about, by status
    ("outside",)                 rows that were read, which the condition of the run leaves out
    ("undecided",)               rows on which a condition cannot be computed
    ("reused",)                  rows with the answers of other shards
    ("label", TASK, LABEL)       rows with this label; one may have several
    ("answered", TASK)           rows with an answer
    ("skipped", TASK)            other rows that the question is not asked about
    ("decided", TASK, STAGE)     rows that this stage of a cascade decided
    ("asked", READER)            rows that a model was asked about
    ("label_ms", READER)         time in milliseconds, without loading
    ("prefix_tokens", READER)    tokens of documents that a model read
    ("question_tokens", READER)  tokens of questions that a model read
    ("requests", READER)         answers of a server
    ("prompt_tokens", READER)    tokens of prompts that a server read: a part of `prefix_tokens`
    ("answer_tokens", READER)    tokens that a server wrote: a part of `question_tokens`
    ("not_returned", READER)     their probability that no returned token has, in millionths
    ("created",)                 objects
    """

    def count(self, *start: str, values: Iterable[str]) -> None:
        """Adds one for each value, under the key of `start` and the value."""
        self.update({(*start, value): count for value, count in Counter(values).items()})

    def by(self, *start: str) -> Counter[str]:
        """The numbers of the keys that begin with `start`, by their next part."""
        size, counted = len(start), Counter[str]()
        for key, count in self.items():
            if count and len(key) > size and key[:size] == start:
                counted[key[size]] += count
        return counted

    def total_of(self, *start: str) -> int:
        """The sum of the numbers whose keys begin with `start`."""
        return sum(count for key, count in self.items() if key[: len(start)] == start)

    @property
    def labels(self) -> dict[str, Counter[str]]:
        """By task, the rows by label."""
        return {key[1]: self.by("label", key[1]) for key in self if key[0] == "answered"}

    @property
    def asked(self) -> int:
        """Rows that a model was asked about; of a document in several stages, one."""
        return max(self.by("asked").values(), default=0)

    @property
    def failed(self) -> int:
        """Rows that should have an answer and have none."""
        return sum(n for status, n in self.by("rows").items() if is_failed_status(status))


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """The counts of one shard, or why it could not be read, labelled or committed."""

    sid: str
    tasks: tuple[str, ...]  # that were missing
    n: Counts = field(default_factory=Counts)
    files: tuple[FileCounts, ...] = ()  # those that were created
    error: str | None = None  # with the place of the shard, in one line
    unavailable: bool = False  # whether the error may be gone later
    bad_file: str | None = None  # the input file whose error it is; its other shards fail, too
    ends_run: ServerError | None = None  # an error that every other shard would have, too

    @classmethod
    def of_failed(cls, work: WorkItem, error: Exception) -> ShardCounts:
        """The counts of a shard that could not be read, labelled or committed."""
        path, piece = work.shard.path, work.shard.piece
        place = f"{path}: rows {piece.start_row} to {piece.end_row}: "
        line = str(error).partition("\n")[0].removeprefix(place)
        reason = line.removeprefix(f"{path}: ")
        is_unavailable = isinstance(error, UnavailableError)
        of_file = reason != line and not is_unavailable
        if not isinstance(error, AssayError):
            reason = f"internal error: {type(error).__name__}: {one_line(error)}"
        return cls(
            work.shard.id,
            work.tasks,
            error=f"{place}{reason}",
            unavailable=is_unavailable,
            bad_file=path if of_file else None,
            ends_run=error if isinstance(error, ServerError) else None,
        )
