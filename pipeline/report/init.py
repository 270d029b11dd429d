"""The report of `assay init`: the files, their columns, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pipeline.report.console import Grid, Part, printed, truncate
from pipeline.verbs.init import Proposal

NAME_CHARS = 40


@printed
def show_proposal(proposal: Proposal) -> Iterator[Part]:
    """The files, the columns with the proposed ones marked, and the next commands."""
    of_format = ", ".join(f".{format}" for format in proposal.formats)
    files = "1 file" if proposal.files == 1 else f"{proposal.files:,} files"
    preset = proposal.preset
    tasks = "an example task to edit" if preset is None else f"the preset {preset}"
    yield {
        "documents": f"{proposal.path}: {files} ({of_format}), {proposal.size_bytes / 1e6:,.1f} MB",
        "text": proposal.text,
        "id": proposal.id or "none found; the id of a document is the hash of its text",
        "model": proposal.model or "none; a classifier of a package answers",
        "output": proposal.output,
        "spec": f"{proposal.file}, with {tasks}",
    }
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
    yield Grid(title, names, rows, texts=3)
    file = shlex.quote(proposal.file)
    if preset is not None:
        yield f"Next: read in {file} what its classifier was made for, then"
        yield f"  assay run {file}                 label the documents"
        yield f"  assay filter {file} --to kept    keep those of the rule"
        return
    yield f"Next: edit the task in {file}, then"
    yield f"  assay review {file} --task toxic --to gold.jsonl    label about 100 documents"
    yield f"  assay fit {file} --gold gold.jsonl                  train the readout"
    yield f"  assay run {file}                                    label the rest"
