"""Exports and filtered corpora at any place; a dataset of the Hugging Face Hub also gets a card.

Entry points: `write_export` and `write_filter`. The files of a dataset are made on this machine
first, in the folder for temporary files, and are uploaded in one commit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from pipeline.filters.labelled import LabelledRows
from pipeline.filters.layout import refuse_own_places
from pipeline.filters.older_answers import what_answered
from pipeline.filters.result import Files, FilterResult
from pipeline.filters.run import filter_corpus
from pipeline.options import ExportOptions, FilterOptions
from pipeline.sources.streams import Options
from pipeline.spec.locations import table_at
from pipeline.spec.schema import JobSpec
from pipeline.stores.hub import PROTOCOL, dataset_of, upload
from pipeline.verbs.export import MANIFEST, export
from pipeline.verbs.label_table import ExportResult
from pipeline.verbs.table_exports import export_to_table

_PARTS = ("data", "documents", "attributes", "kept", "dropped")
_REPLACES = [f"{part}/*" for part in _PARTS]


def write_export(
    spec: JobSpec, options: ExportOptions, *, cache_dir: Path, command: str
) -> ExportResult:
    """As `export`, also to a table, and to a dataset of the Hub, whose card shows the command."""
    url = str(options.to)
    if table_at(url) is not None:
        return export_to_table(spec, options, cache_dir=cache_dir)
    if not url.startswith(PROTOCOL):
        return export(spec, options, cache_dir=cache_dir)
    with _dataset(spec, url, "Labels", command) as (folder, card):
        to = f"{folder}/" if options.layout else f"{folder}/data/"
        written = export(spec, replace(options, to=to), cache_dir=cache_dir)
        for manifest in folder.rglob(MANIFEST):  # — it names folders of this machine
            manifest.unlink()
        lines = [f"{written.rows:,} documents, snapshot {written.snapshot} of `{spec.name}`."]
        lines += _left_out(written)
        on_hub = _on_hub([written.glob], folder, url)
        card(written.snapshot, lines, default=on_hub)
    return replace(written, to=url, glob=on_hub[0])


def write_filter(
    spec: JobSpec, options: FilterOptions, *, cache_dir: Path, command: str
) -> FilterResult:
    """As `filter_corpus`, also to a dataset of the Hub, whose card shows the command.

    The split of the dataset is what is kept. Its configuration `dropped` has the other documents.
    """
    url = options.folder()
    if not url.startswith(PROTOCOL):
        return filter_corpus(spec, options, cache_dir=cache_dir)
    own = None if spec.filter is None else spec.filter.storage_options
    with _dataset(spec, url, "Filter", command, own) as (folder, card):
        result = filter_corpus(spec, replace(options, to=str(folder)), cache_dir=cache_dir)
        written = result.written
        assert written is not None, options
        kept, dropped = (
            Files(_on_hub([files.folder], folder, url)[0], _on_hub(files.globs, folder, url))
            for files in (written.kept, written.dropped)
        )
        lines = [
            f"{result.documents - result.dropped:,} of {result.documents:,} documents, snapshot "
            f"{result.snapshot} of `{spec.name}`; {result.dropped:,} are dropped.",
            *_left_out(result),
            f"The rule keeps documents where: {result.rule}",
            *(f"- {reason}: {count:,}" for reason, count in sorted(result.reasons.items())),
        ]
        card(result.snapshot, lines, default=kept.globs, dropped=dropped.globs)
    on_hub = replace(written, kept=kept, dropped=dropped, current=url, manifest=url)
    return replace(result, written=on_hub)


def _left_out(written: ExportResult | FilterResult) -> Iterator[str]:
    """What the snapshot does not have of the input."""
    if not written.complete:
        rows, files = written.missing_rows, written.missing_files
        yield f"The snapshot leaves out {rows:,} documents and {files:,} files of the input."


def _on_hub(places: Sequence[str], folder: Path, url: str) -> tuple[str, ...]:
    """Paths and globs below a folder as they are in the dataset."""
    return tuple(place.replace(str(folder), url.rstrip("/"), 1) for place in places)


@contextmanager
def _dataset(
    spec: JobSpec, url: str, content: str, command: str, options: Options | None = None
) -> Iterator[tuple[Path, Callable[..., None]]]:
    """A folder whose files replace a dataset's when the block ends, and a function for its card.

    The card has the snapshot, some lines, and the globs of each configuration's files. `options`
    are those of the Hub's file system; None: the output's.
    """
    dataset_of(url)
    refuse_own_places(spec, url)
    message = ""
    with tempfile.TemporaryDirectory(prefix="assay-hub-") as name:
        folder = Path(name)

        def card(snapshot: int, lines: Sequence[str], **globs: Sequence[str]) -> None:
            nonlocal message
            message = f"{content} of snapshot {snapshot} of {spec.name}"
            configs = [
                {"config_name": config, "data_files": [{"split": "train", "path": paths}]}
                for config, own in globs.items()
                if (paths := [glob.removeprefix(f"{url.rstrip('/')}/") for glob in own])
            ]
            header = yaml.safe_dump({"configs": configs, "tags": ["assay"]}, sort_keys=False)
            text = [f"---\n{header}---\n\n# {spec.name}\n", *lines, "", *_made_by(spec, command)]
            (folder / "README.md").write_text("\n".join([*text, ""]))

        yield folder, card
        options = spec.storage_options if options is None else options
        upload(folder, url, options, message=message, replaces=_REPLACES)


def _made_by(spec: JobSpec, command: str) -> Iterator[str]:
    """The command, the questions, the models with the hashes of their weights, the promises."""
    labelled = LabelledRows.of(spec)
    yield f"Made with assay:\n\n```bash\n{command}\n```\n"
    weights: dict[str, None] = {}  # each line once
    for task in spec.tasks:
        stored = what_answered(labelled.store, labelled.contents, task.name)
        asked = stored.get("spec", {}).get("task", {}).get("question", task.question)
        yield f"- `{task.name}` ({', '.join(task.labels)})" + (f": {asked}" if asked else "")
        if (proved := labelled.contents.certificates.get(task.name)) is not None:
            yield f"  - {proved.words}"
        models = stored.get("models") or {"classifier": stored.get("model", {})}
        for model, hashes in models.items():
            weights |= {f"- {model}, {file}: `{hash}`": None for file, hash in hashes.items()}
    yield from ("", *weights)
