"""What `assay init` found and wrote, and what to type next; where `assay pull` put the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from pipeline.report.console import Grid, escape_controls, truncate, two_columns
from pipeline.verbs.init import Proposal

if TYPE_CHECKING:  # imports torch
    from pipeline.verbs.pull import Pulled

NAME_CHARS = 40


def show_proposal(proposal: Proposal, console: Console) -> None:
    """The files, the columns with the proposed ones marked, and the next commands."""
    of_format = ", ".join(f".{format}" for format in proposal.formats)
    files = "1 file" if proposal.files == 1 else f"{proposal.files:,} files"
    facts = {
        "documents": f"{proposal.path}: {files} ({of_format}), {proposal.size_bytes / 1e6:,.1f} MB",
        "text": proposal.text,
        "id": proposal.id or "none found; the id of a document is the hash of its text",
        "model": proposal.model,
        "output": proposal.output,
        "spec": f"{proposal.file}, with an example task to edit",
    }
    console.print(two_columns(facts))
    roles = {proposal.id: "id", proposal.text: "text"}
    rows = [
        (
            truncate(column.name, NAME_CHARS),
            column.kind,
            roles.get(column.name, ""),
            f"{column.filled:,}",
            f"{column.distinct:,}",
            f"{column.mean_chars:,.0f}",
        )
        for column in proposal.columns
    ]
    names = ("column", "kind", "role", "with a value", "distinct", "mean characters")
    title = f"The first {proposal.sample_rows:,} rows"
    console.print(Grid(title, names, rows, texts=3).table())
    file = escape_controls(proposal.file)
    console.print(
        f"Next: edit the task in {file}, then\n"
        f"  assay pull {file}     fetch the model\n"
        f"  assay check {file}    test the storage, the model and the labels\n"
        f"  assay run {file}      label the documents\n"
        f"With gold labels, train a readout of a small model: assay fit {file} --gold FILE"
    )


def show_pulled(pulled: Pulled, console: Console) -> None:
    """Where the model is, and its size."""
    is_local = pulled.kind in ("folder", "gguf")
    facts = {
        "model": f"{pulled.path}, {'on this machine already' if is_local else 'fetched'}",
        **({"commit": pulled.revision} if pulled.revision else {}),
        "folder": pulled.folder,
        "size": f"{pulled.size_bytes / 1e6:,.1f} MB, whole",
        "context": f"{pulled.context_tokens:,} tokens",
    }
    console.print(two_columns(facts))
