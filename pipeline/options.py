"""The options of the verbs: one frozen dataclass a verb, with units and defaults.

A program passes them to the verb's function. The command has a flag for each field, with the text
below it as its help. `None` means that the verb decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import (
    Option,
    Problem,
    SpecError,
    option_error,
    require_positive,
    require_share,
    require_up_to,
)

PresetName = Literal["edu", "toxicity", "language", "web"]
Layout = Literal["datatrove", "dolma"]
OnError = Literal["fail", "keep", "drop"]
Order = Literal["mixed", "random", "audit"]

FOLDS = 5  # of a cross-validation
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The settings of a new spec; None is proposed from the data."""

    to: str = "spec.yaml"
    """Spec to write."""
    text: str | None = None
    """Column with the text (default: usual name, else longest texts)."""
    id: str | None = None
    """Column with the id (default: usual name and distinct values)."""
    preset: PresetName | None = None
    """Tasks that published classifiers answer (default: one task as an example)."""
    model: str | None = None
    """Model: a name on the Hugging Face Hub, a folder or a .gguf file (default: that of the preset,
    else HuggingFaceTB/SmolLM2-135M-Instruct)."""
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
class RunOptions(WorkOptions):
    """What a run labels and publishes, and when it ends if that is not done."""

    insecure_cluster: bool = False
    """Use the cluster even if anyone who reaches it can run programs on it."""
    publish_partial: bool = False
    """Publish what is labelled, even if documents are missing or the current snapshot has more."""
    max_hours: float | None = None
    """End the run, with exit code 3, when it has taken this many hours."""
    max_cost: float | None = None
    """End the run, with exit code 3, before the model's server can have taken more than this, in
    the currency of model.price."""
    save: bool = False
    """Use the whole model only where a cheaper answer is uncertain, as if each task with a question
    had `cascade: auto`."""

    def __post_init__(self) -> None:
        require_positive(self, "max_hours", "max_cost")


@dataclass(frozen=True, slots=True)
class GoldOptions:
    """Which gold labels are read; the spec's `gold` has the columns."""

    gold: str | None = None
    """Gold labels: a CSV, TSV, JSON lines or Parquet file, or another run's output (default: the
    spec's gold.path)."""
    tasks: tuple[str, ...] = ()
    """Task to use (default: every task that the gold has labels for). Repeatable."""


@dataclass(frozen=True, slots=True)
class EvalOptions(GoldOptions):
    """The gold labels of an evaluation, and what it reports beside its figures."""

    against: str | None = None
    """Spec of other answers to the same documents: compare both on the same gold rows."""
    precision: float | None = None
    """Find for each label the threshold that reaches this precision, from 0 to 1."""
    recall: float | None = None
    """Find for each label the threshold that reaches this recall, from 0 to 1."""

    def __post_init__(self) -> None:
        require_share(self, "precision", "recall")


@dataclass(frozen=True, slots=True)
class FitOptions(GoldOptions):
    """Which readouts are fitted to which gold labels, and where they are written."""

    layers: str | None = None
    """Layers to fit at, as in 8,12,16, or all (default: a few, spread over the decoder)."""
    to: str | None = None
    """Where to write: FILE.safetensors, or a folder with a file for each task (default: the paths
    that the spec names, else the folder readouts beside the spec)."""
    hold_out: float = 0.0
    """Fit without this share of the gold texts: `assay eval` judges the readout by them."""
    overwrite: bool = False
    """Replace existing files (default: refuse)."""


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """Which documents people label, in which order, and where their labels are written."""

    to: str
    """Gold file: a local FILE.jsonl, to which every answer is appended. A file that exists is
    continued."""
    task: str | None = None
    """Name of the task (default: the only one). An audit has the labels drop and keep."""
    order: Order = "mixed"
    """Order of the documents. mixed: diverse documents first, then uncertain and random ones in
    turn. random: a random sample. audit: a random sample to judge the filter, without the model's
    answers."""
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
            fix = "an audit labels drop or keep for the filter, not for a task; leave --task out"
            raise option_error("task", fix, self.task)


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Where a filtered corpus is written."""

    to: str | None = None
    """Folder or URL for the kept and the dropped documents; required without --dry-run.
    hf://datasets/ORG/NAME gets one commit and a card."""
    on_error: OnError | None = None
    """What happens to documents without an answer; fail stops the filter, and writes nothing
    (default: the spec's filter.on_error)."""
    dry_run: bool = False
    """Print what would be dropped; write nothing."""

    def folder(self) -> str:
        """Where the kept documents are written; SpecError without it."""
        if self.to is None:
            fix = "missing; name a folder for the kept documents, or write --dry-run"
            raise option_error("to", fix)
        return self.to


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Where a report is written, and what it contains."""

    gold: str | None = None
    """Gold labels: a file, or another run's output (default: the spec's gold.path; without either,
    the page has no figures of quality)."""
    to: str = "report.html"
    """Page to write: a local path or a URL."""
    by: tuple[str, ...] = ()
    """Groups: a task, or SQL such as doc.source (default: the rule's). Repeatable."""
    overwrite: bool = False
    """Replace an existing file (default: refuse)."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Which table of labels is written, and where; or which example rows are shown."""

    to: str | None = None
    """FILE.parquet, FILE.jsonl or FILE.csv for one file. Any other name is a folder, with a Parquet
    file for each shard. A local path or a URL; hf://datasets/ORG/NAME gets a commit and a card.
    delta+PATH and iceberg://CATALOG/NAMESPACE.TABLE get the rows in place of those with their
    doc_id, and keep others; lance+PATH gets columns. One version a snapshot."""
    head: int | None = None
    """Print this number of example rows, and write nothing. Use either --to or --head."""
    where: str | None = None
    """Condition of the example rows, such as "toxic.p.toxic > 0.9 and doc.source = 'mail'"
    (default: all)."""
    why: bool = False
    """With --head: load the model, and print what it would say to each question, token by token."""
    columns: tuple[str, ...] = ()
    """Column of the input to add, such as source. Repeatable."""
    with_text: bool = False
    """Read the input again, and add a column with the text (default: labels only)."""
    layout: Layout | None = None
    """Write the folder as this tool reads it, with the texts, as .jsonl.gz (default: Parquet)."""
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
        if self.layout is not None and self.head is not None:
            raise option_error("layout", "is for a folder; write --to FOLDER/", self.layout)
        if self.why and self.head is None:
            raise option_error("why", "is for example rows; add --head N")
        return self.to is not None
