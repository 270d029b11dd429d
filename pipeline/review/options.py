"""The options of `assay review`: a flag and a help text for each field, as in `options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import option_error, require_positive, require_up_to
from pipeline.options import LARGEST_SEED

Order = Literal["mixed", "random", "audit"]


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """Which documents people label, in which order, and where their labels are written."""

    to: str
    """Gold file: a local FILE.jsonl, to which every answer is appended. A file that exists is
    continued."""
    task: str | None = None
    """Name of the task (default: the only one). An audit asks drop or keep, of no task."""
    order: Order = "mixed"
    """What decides which document comes next. mixed: diverse documents first, then uncertain and
    random ones in turn. random. audit: a sample that judges the filter, blind."""
    where: str | None = None
    """Show only documents whose stored answers satisfy this condition, such as
    'toxic.p.toxic > .5'; for rare labels."""
    blind: bool = False
    """Hide the stored answer of the model."""
    second: bool = False
    """Show the documents that one other person labelled, or on which people disagree."""
    columns: tuple[str, ...] = ()
    """Column of the input to show beside each document, such as source. Repeatable."""
    no_blur: bool = False
    """Show the texts at once (default: blurred until `b` is pressed, as they may be harmful)."""
    documents: int | None = None
    """Number of documents to draw (default: 2,000; of an audit 200)."""
    host: str = "127.0.0.1"
    """Address or name of this machine, under which people on other machines open the page; what is
    sent is not encrypted."""
    port: int | None = None
    """Port of the page (default: a free one)."""
    seed: int = 0
    """Seed of the random choice."""

    def __post_init__(self) -> None:
        require_positive(self, "port", "documents")
        require_up_to(self, 65535, "port")
        require_up_to(self, LARGEST_SEED, "seed")
        if self.order == "audit" and self.where is not None:
            fix = "a part of an audit's sample is no sample; leave --where or --by audit out"
            raise option_error("where", fix, self.where)
        if self.order == "audit" and self.task is not None:
            fix = "an audit asks drop or keep, of the filter and not of a task; leave --task out"
            raise option_error("task", fix, self.task)
