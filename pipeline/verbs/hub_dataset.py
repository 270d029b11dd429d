"""Exports and filtered corpora at any place; a dataset of the Hugging Face Hub also gets a card.

Entry points: `write_export` and `write_filter`. The files of a dataset are made on this machine
first, in the folder for temporary files, and are uploaded in one commit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from pipeline.filters.labelled import LabelledRows
from pipeline.filters.older_answers import what_answered
from pipeline.filters.result import Files, FilterResult
from pipeline.filters.run import filter_corpus
from pipeline.options import ExportOptions, FilterOptions
from pipeline.spec.locations import table_at
from pipeline.spec.schema import JobSpec
from pipeline.stores.hub import PROTOCOL
from pipeline.stores.hub_commits import dataset_of, upload
from pipeline.verbs.export import MANIFEST, export
from pipeline.verbs.label_table import ExportResult
from pipeline.verbs.table_exports import export_to_table

_PARTS = ("data", "documents", "attributes", "kept", "dropped")
_REPLACES = [f"{part}/*" for part in _PARTS]


def write_export(
    spec: JobSpec, options: ExportOptions, *, cache_dir: Path, command: str
) -> ExportResult:
    """As `export`, also to a table, and to a dataset of the Hub, whose card shows the command."""
    to = str(options.to)
    if table_at(to) is not None:
        return export_to_table(spec, options, cache_dir=cache_dir)
    if not to.startswith(PROTOCOL):
        return export(spec, options, cache_dir=cache_dir)
    return _export_to_hub(spec, options, cache_dir=cache_dir, command=command)


def write_filter(
    spec: JobSpec, options: FilterOptions, *, cache_dir: Path, command: str
) -> FilterResult:
    """As `filter_corpus`, also to a dataset of the Hub, whose card shows the command."""
    if not options.folder().startswith(PROTOCOL):
        return filter_corpus(spec, options, cache_dir=cache_dir)
    return _filter_to_hub(spec, options, cache_dir=cache_dir, command=command)


def _export_to_hub(
    spec: JobSpec, options: ExportOptions, *, cache_dir: Path, command: str
) -> ExportResult:
    url = str(options.to)
    dataset_of(url)
    with tempfile.TemporaryDirectory(prefix="assay-hub-") as folder:
        to = f"{folder}/" if options.layout else f"{folder}/data/"
        written = export(spec, replace(options, to=to), cache_dir=cache_dir)
        for manifest in Path(folder).rglob(MANIFEST):  # — it names folders of this machine
            manifest.unlink()
        below = written.glob.removeprefix(folder).lstrip("/")
        lines = [f"{written.rows:,} documents, snapshot {written.snapshot} of `{spec.name}`."]
        if not written.complete:
            lines += [f"{written.missing_rows:,} documents of the input are left out."]
        card = _card(spec, [below], lines, command)
        Path(folder, "README.md").write_text(card)
        message = f"Labels of snapshot {written.snapshot} of {spec.name}"
        upload(Path(folder), url, spec.storage_options, message=message, replaces=_REPLACES)
    return replace(written, to=url, glob=f"{url.rstrip('/')}/{below}")


def _filter_to_hub(
    spec: JobSpec, options: FilterOptions, *, cache_dir: Path, command: str
) -> FilterResult:
    """As `filter_corpus`, to the dataset that `to` names: its split is what is kept.

    The configuration `dropped` has the dropped documents.
    """
    url = options.folder()
    dataset_of(url)
    with tempfile.TemporaryDirectory(prefix="assay-hub-") as name:
        folder = Path(name)
        result = filter_corpus(spec, replace(options, to=name), cache_dir=cache_dir)
        assert result.written is not None

        def moved(files: Files) -> Files:
            below = tuple(glob.removeprefix(name).lstrip("/") for glob in files.globs)
            return Files(files.folder.replace(name, url.rstrip("/")), below)

        kept, dropped = moved(result.written.kept), moved(result.written.dropped)
        lines = [
            f"{result.documents - result.dropped:,} of {result.documents:,} documents, snapshot "
            f"{result.snapshot} of `{spec.name}`; {result.dropped:,} are dropped.",
            f"The rule keeps documents where: {result.rule}",
            *(f"- {reason}: {count:,}" for reason, count in sorted(result.reasons.items())),
        ]
        card = _card(spec, kept.globs, lines, command, dropped=dropped.globs)
        (folder / "README.md").write_text(card)
        message = f"Filter of snapshot {result.snapshot} of {spec.name}"
        upload(folder, url, spec.storage_options, message=message, replaces=_REPLACES)

    def on_hub(files: Files) -> Files:
        return replace(files, globs=tuple(f"{url.rstrip('/')}/{glob}" for glob in files.globs))

    written = replace(result.written, kept=on_hub(kept), dropped=on_hub(dropped))
    return replace(result, written=replace(written, current=url, manifest=url))


def _card(
    spec: JobSpec,
    globs: Sequence[str],
    lines: Sequence[str],
    command: str,
    dropped: Sequence[str] = (),
) -> str:
    """The README of a dataset: its files, those of the dropped documents, and how it was made."""
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": [*paths]}]}
        for name, paths in (("default", globs), ("dropped", dropped))
        if paths
    ]
    header = yaml.safe_dump({"configs": configs, "tags": ["assay"]}, sort_keys=False)
    return "\n".join(
        [f"---\n{header}---\n\n# {spec.name}\n", *lines, "", *_made_by(spec, command), ""]
    )


def _made_by(spec: JobSpec, command: str) -> Iterator[str]:
    """The command, the questions, the models with the hashes of their weights, the promises."""
    labelled = LabelledRows.of(spec)
    yield f"Made with assay:\n\n```bash\n{command}\n```\n"
    weights: dict[str, Mapping[str, str]] = {}
    for task in spec.tasks:
        stored = what_answered(labelled.store, labelled.contents, task.name)
        asked = stored.get("spec", {}).get("task", {}).get("question", task.question)
        yield f"- `{task.name}` ({', '.join(task.labels)})" + (f": {asked}" if asked else "")
        if (proved := labelled.contents.certificates.get(task.name)) is not None:
            yield f"  - {proved.words}"
        weights |= stored.get("models") or {"": stored.get("model", {})}
    yield ""
    for model, hashes in weights.items():
        for file, digest in hashes.items():
            yield f"- {model or 'classifier'}, {file}: `{digest}`"
