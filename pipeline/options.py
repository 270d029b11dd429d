"""The options of the verbs: one frozen dataclass a verb, with units and defaults.

A program passes them to the verb's function. The command has a flag for each field, with the text
below it as its help. `None` means that the verb decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from pipeline.errors import (
    Option,
    Problem,
    SpecError,
    option_error,
    require_positive,
)

TableFormat = Literal["parquet", "jsonl", "csv"]
OnError = Literal["fail", "keep", "drop"]

RESAMPLES = 1_000  # of a bootstrap
MOST_RESAMPLES = 100_000
FOLDS = 5  # of a cross-validation
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What a new spec says; None is proposed from the data."""

    to: str = "spec.yaml"
    """Spec to write."""
    text: str | None = None
    """Column with the text (default: proposed from names, types and lengths)."""
    id: str | None = None
    """Column with the id (default: proposed from names, types and uniqueness)."""
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """Model: a name on the Hugging Face Hub, a folder or a .gguf file."""
    overwrite: bool = False
    """Replace an existing file (default: refuse)."""


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """Which documents a run labels, or would label."""

    sample: str | None = None
    """Label only this share of the documents, as in 1%: the same ones each time (default: all)."""
    where: str | None = None
    """Label only documents whose input columns satisfy this condition, as in "year >= 2020"
    (default: all)."""
    retry_failed: bool = False
    """Ask again about documents with the status error: or quarantined."""


@dataclass(frozen=True, slots=True)
class PlanOptions(WorkOptions):
    """The work and the workers that a plan is made for."""

    workers: int = 1
    """Number of workers to plan for."""
    price: float | None = None
    """Price of one worker for one hour, in any currency."""
    rate: float | None = None
    """Documents that one worker labels in a second (default: measured here)."""
    documents: int | None = None
    """Number of documents to measure the rate on (default: 8 on a CPU, 256 on a GPU)."""

    def __post_init__(self) -> None:
        require_positive(self, "workers", "price", "rate", "documents")


@dataclass(frozen=True, slots=True)
class RunOptions(WorkOptions):
    """What a run labels and publishes, and when it ends if that is not done."""

    insecure_cluster: bool = False
    """Use the cluster even if anyone who reaches it can run programs on it."""
    publish_partial: bool = False
    """Publish what is labelled, even if documents are missing or the current snapshot has more."""
    max_hours: float | None = None
    """End the run, with exit code 3, when it has taken this many hours."""

    def __post_init__(self) -> None:
        require_positive(self, "max_hours")


@dataclass(frozen=True, slots=True)
class GoldColumns:
    """How gold labels are read where their names differ from the spec's."""

    id: str | None = None
    """Column of the gold file with document ids (default: the spec's id column, or `id`)."""
    text: str | None = None
    """Column of the gold file with texts, to match documents by text instead of by id (default: the
    spec's text column, if the file has no column of ids)."""
    columns: tuple[tuple[str, str], ...] = ()
    """Column of the gold file with the labels of a task (default: the task's name); of a task of
    kind multi, TASK.LABEL=COLUMN for yes or no of one label. Repeatable."""
    values: tuple[tuple[str, str], ...] = ()
    """Value of the gold file that means a label (default: the label's name). Repeatable."""
    scores: tuple[tuple[str, str], ...] = ()
    """Column of the gold file with scores from 0 to 1 of the label that has the task's name, or
    TASK.LABEL=COLUMN for another label; the task has two labels, or is of kind multi.
    Repeatable."""

    def words(self, task: str) -> tuple[str, ...]:
        """The options with which a command reads the same gold labels for one task alone.

        Of a task of kind `multi`, `task` may be one label of it: TASK.LABEL.
        """
        pairs = [("--id", self.id), ("--text", self.text), ("--task", task)]
        pairs += [("--column", f"{n}={c}") for n, c in self.columns if _is_of(n, task)]
        pairs += [("--value", f"{value}={label}") for value, label in self.values]
        pairs += [("--score", f"{n}={c}") for n, c in self.scores if _is_of(n, task)]
        return tuple(word for name, value in pairs if value is not None for word in (name, value))

    def of_task(self, task: str) -> GoldOptions:
        """The same, for one task alone."""
        return GoldOptions(self.id, self.text, self.columns, self.values, self.scores, (task,))


def _is_of(name: str, task: str) -> bool:
    """Whether what is named TASK or TASK.LABEL has gold labels of this task or label."""
    return task in (name, name.partition(".")[0]) or name == task.partition(".")[0]


@dataclass(frozen=True, slots=True)
class GoldOptions(GoldColumns):
    """How gold labels are read, and for which tasks."""

    tasks: tuple[str, ...] = ()
    """Use this task only (default: every task that the gold file has labels for). Repeatable."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What an evaluation reports beside its figures."""

    precision: float | None = None
    """Find for each label the threshold that reaches this precision, from 0 to 1."""
    recall: float | None = None
    """Find for each label the threshold that reaches this recall, from 0 to 1."""
    gates: tuple[str, ...] = ()
    """Requirement such as 'toxic.f1 >= 0.8'; the exit code is 1 if it fails. Repeatable."""
    resamples: int = RESAMPLES
    """Number of bootstrap resamples for the confidence intervals."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Which readouts are fitted, and where they are written."""

    layers: str | None = None
    """Layers to fit at, as in 8,12,16, or all (default: a few, spread over the decoder)."""
    document: bool = False
    """Fit readouts of the document itself, without a question (default: after the task's question,
    if the task has one)."""
    to: str | None = None
    """Where to write: FILE.safetensors, or a folder with a file for each task (default: the paths
    that the spec names)."""
    folds: int = FOLDS
    """Number of cross-validation folds."""
    hold_out: float = 0.0
    """Fit without this share of the gold texts: `assay eval` judges the readout by them."""
    overwrite: bool = False
    """Replace existing files (default: refuse)."""


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """What the thresholds of a cascade promise, and the sample that they are chosen from."""

    task: str
    """Name of the task with the cascade."""
    to: str
    """File to write: a local path or a URL."""
    recall: float
    """Minimum recall, from 0 to 1."""
    precision: float
    """Minimum precision, from 0 to 1."""
    confidence: float = 0.95
    """Probability, over samples, that both minima hold."""
    documents: int = 500
    """Documents to draw; every stage labels all of them."""
    positive: str | None = None
    """Label that recall and precision are of (default: the label with the task's name, or the first
    one)."""
    gold: str | None = None
    """Gold labels that say which documents are positive: documents of the sample without one are
    left out (default: the answers of the last stage)."""
    overwrite: bool = False
    """Replace an existing file (default: refuse)."""

    def __post_init__(self) -> None:
        fix = "write a number above 0 and below 1"
        shares = {name: getattr(self, name) for name in ("recall", "precision", "confidence")}
        problems = [
            Problem(Option(name), fix, value) for name, value in shares.items() if not 0 < value < 1
        ]
        if problems:
            raise SpecError(problems)
        require_positive(self, "documents")


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Where a filtered corpus is written."""

    to: str | None = None
    """Folder or URL for the documents that are kept; required without --dry-run."""
    dropped: str | None = None
    """Folder or URL for the documents that are dropped (default: below --to)."""
    on_error: OnError | None = None
    """What happens to documents without an answer; fail stops the filter, and writes nothing
    (default: the spec's filter.on_error)."""
    dry_run: bool = False
    """Print what would be dropped, and what other shares would drop; write nothing."""

    def folder(self) -> str:
        """Where the kept documents are written; SpecError without it."""
        if self.to is None:
            fix = "missing; name a folder for the kept documents, or write --dry-run"
            raise option_error("to", fix)
        return self.to


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report is written to, and which groups it has."""

    to: str = "report.html"
    """The page, at a local path or a URL."""
    by: tuple[str, ...] = ()
    """Groups: a task, or SQL such as doc.source (default: the rule's). Repeatable."""
    overwrite: bool = False
    """Replace an existing file (default: refuse)."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Which table of labels is written, and where; or which example rows are shown."""

    to: str | None = None
    """FILE.parquet, FILE.jsonl or FILE.csv for one file. Any other name is a folder, with one file
    for each shard. A local path or a URL."""
    head: int | None = None
    """Print this number of example rows, and write nothing. Use either --to or --head."""
    where: str | None = None
    """Condition of the example rows, such as "toxic.p.toxic > 0.9" (default: all)."""
    with_text: bool = False
    """Read the input again, and add a column with the text (default: labels only)."""
    format: TableFormat | None = None
    """Format of the files of a folder (default: parquet)."""
    overwrite: bool = False
    """Replace an existing file, or the files of another export in the folder (default: refuse)."""

    def writes(self) -> bool:
        """Whether a table is written, not example rows shown; SpecError if options contradict."""
        require_positive(self, "head")
        if (self.to is None) == (self.head is None):
            fix = "write --to to write the table, or --head N to print example rows"
            raise SpecError([Problem(Option("to", "head"), fix)])
        if self.where is not None and self.head is None:
            raise option_error("where", "is for example rows; add --head N", self.where)
        return self.to is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """What must hold for a run to publish its labels; None is no limit."""

    gates: tuple[str, ...] = ()
    """Publish only if this requirement holds, such as 'toxic.f1 >= 0.8'; needs --gold. Repeatable.
    The exit code is 1 if it fails."""
    max_psi: float | None = None
    """Publish only if the label shares of each task have at most this population stability index,
    compared with the last snapshot; 0.1 is a usual limit."""
    max_flip_rate: float | None = None
    """Publish only if at most this share of the texts in both snapshots changed their answer."""
    max_failing: float | None = None
    """Publish only if at most this share of all rows lost their answer."""

    def __post_init__(self) -> None:
        # — NaN is above no number, so as a limit it would let everything pass
        if self.max_psi is not None and not 0 <= self.max_psi < inf:
            raise option_error("max_psi", "write a number from 0 on, such as 0.1", self.max_psi)
        for name in ("max_flip_rate", "max_failing"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise option_error(name, "write a share from 0 to 1, such as 0.05", share)


# A PSI below 0.1 conventionally means no shift (`integrity.diff.psi`).
USUAL_PSI = 0.1
USUAL_LIMITS = Limits(max_psi=USUAL_PSI, max_flip_rate=0.05, max_failing=0.05)
