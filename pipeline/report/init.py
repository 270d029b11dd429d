"""What `assay init` found and wrote, and what to type next."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from pipeline.report.console import Grid, escape_controls, truncate, two_columns
from pipeline.verbs.init import Proposal

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
    names = ("column", "kind", "role", "with a value", "different", "mean characters")
    title = f"The first {proposal.sample_rows:,} rows"
    console.print(Grid(title, names, rows, texts=3).table())
    file = escape_controls(proposal.file)
    console.print(
        f"Next: edit the task in {file}, then\n"
        f"  assay pull {file}     fetch the model\n"
        f"  assay check {file}    prove model, labels and storage\n"
        f"  assay run {file}      label the documents\n"
        f"With labelled documents, train a small model's readout: assay fit {file} --gold FILE"
    )


def proposal_json(proposal: Proposal) -> dict[str, Any]:
    """What was found, proposed and written."""
    return asdict(proposal)
