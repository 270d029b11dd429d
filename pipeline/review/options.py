"""The options of `assay review`: a flag and a help text for each field, as in `options`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import require_positive, require_up_to
from pipeline.options import LARGEST_SEED


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """Which documents people label, in which order, and where their labels are written."""

    task: str
    """Name of the task."""
    to: str
    """Gold file: a local FILE.jsonl, to which every answer is appended. A file that exists is
    continued."""
    order: str = "mixed"
    """What decides which document comes next: mixed, uncertain, diverse, random, near:THRESHOLD,
    disagreement or audit (the sample of assay audit)."""
    blind: bool = False
    """Hide the model's answer."""
    second: bool = False
    """Show the documents that another person labelled, for Cohen's kappa."""
    until: str | None = None
    """Quality at which the review ends, such as 'auroc >= .95'."""
    pool: int | None = None
    """Number of documents to draw from the corpus; the model reads them before the page opens
    (default: 2,000, or 400 for --by audit)."""
    port: int | None = None
    """Port of the page on 127.0.0.1 (default: a free one)."""
    seed: int = 0
    """Seed of the random choice."""

    def __post_init__(self) -> None:
        require_positive(self, "pool", "port")
        require_up_to(self, 65535, "port")
        require_up_to(self, LARGEST_SEED, "seed")
