"""The options of `assay review`: a flag and a help text for each field, as in `options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import Option, Problem, SpecError, option_error, require_positive

ReviewTool = Literal["label-studio", "argilla", "jsonl", "csv"]


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


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """Which file of another annotation tool is written or read, in place of the page."""

    export: str | None = None
    """Write documents, or the answers of the gold file, to this file for another tool."""
    export_as: ReviewTool | None = None
    """Form of the file of --export."""
    documents: int | None = None
    """Export this number of documents without an answer (default: those with an answer)."""
    overwrite: bool = False
    """Replace an existing file of --export (default: refuse)."""
    import_file: str | None = None
    """Append the answers in this file of another tool to the gold file; those that it has are not
    added again."""
    import_from: ReviewTool | None = None
    """Form of the file of --import."""
    person: str | None = None
    """Who gave the answers in a table that name no person."""

    def __post_init__(self) -> None:
        require_positive(self, "documents")
        if self.export is not None and self.import_file is not None:
            fix = "write one of both; the second is another command"
            raise SpecError([Problem(Option("export", "import_file"), fix)])
        needed_by = {
            "export": ("export_as", "documents", "overwrite"),
            "import_file": ("import_from", "person"),
        }
        for file, others in needed_by.items():
            form, *_ = others
            if getattr(self, file) is None:
                for name in others:
                    if value := getattr(self, name):
                        fix = "is missing; this option needs it: the file of the other tool"
                        raise option_error(file, fix, value)
            elif getattr(self, form) is None:
                raise option_error(form, "is missing; write the form of the file")

    @property
    def file(self) -> str | None:
        """The file of the other tool; None: a page is shown."""
        return self.export or self.import_file

    @property
    def tool(self) -> ReviewTool:
        """The form of the file."""
        tool = self.export_as or self.import_from
        assert tool is not None, self
        return tool
