"""A commented spec for files of documents. Entry point: `init`. Must not import torch or Ray."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Option, listed, option_error
from pipeline.options import InitOptions, PresetName
from pipeline.sources.delimited import wrong_delimiter
from pipeline.sources.documents import TooLong
from pipeline.sources.formats import foreign_content, format_of
from pipeline.sources.listing import NO_FILE, is_file
from pipeline.sources.source import find_files, first_rows
from pipeline.sources.text_files import file_path
from pipeline.spec.parse import parse_spec
from pipeline.stores.named_files import new_file
from pipeline.verbs.presets import PRESETS, Preset

# Usual names of text columns and of id columns, the most likely first.
TEXT_NAMES = (
    "text", "content", "body", "document", "doc", "comment", "comment_text", "review", "message",
    "article", "post", "sentence", "tweet", "abstract", "passage", "description",
)  # fmt: skip
ID_NAMES = ("id", "doc_id", "document_id", "docid", "_id", "uuid", "guid", "key", "__key__", "url")
SHOWN_COLUMNS = 8
SAMPLE_ROWS = 500
SAMPLE_CHARS = 8 * 1024 * 1024  # a sample of long texts has fewer rows

_ID = re.compile(r"([_\W]|[a-z](?=I))[iI][dD]$")  # the end of the name of a column of ids
_PLAIN = re.compile(r"(?!null$|Null$|NULL$)[A-Za-z_/][\w./-]*", re.ASCII)
_SPEC = """\
# Written by `assay init`, which printed the next commands.
# docs/reference/keys.md of a checkout describes every key.
name: {name}

{model}
input:
  path: {path}
  text: {text}{text_comment}
{id}

# Where answers are kept: a folder, or an s3:// or gs:// URL. A later run adds what is missing.
output: {output}

"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's values in the sample."""

    name: str
    kind: Literal["text", "word", "other"]  # a word has no white space
    filled: int  # rows with a value
    distinct: int  # different values
    mean_chars: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """The files and columns that `init` read, and the spec that it wrote."""

    file: str
    path: str  # of the documents
    formats: tuple[str, ...]
    files: int
    size_bytes: int
    sample_rows: int
    columns: tuple[Column, ...]
    text: str
    id: str | None  # None: the hash of the text
    preset: PresetName | None
    model: str | None  # None: the tasks need none
    output: str


def init(data: str, options: InitOptions) -> Proposal:
    """Write a spec for the documents at `data`, a file, a folder or a glob, with proposed columns.

    Raises:
        SpecError: The spec exists; or there are no documents, no text column, or not the columns
            that the caller names.
        StorageError: The files cannot be read, or the spec cannot be written.
    """
    preset = PRESETS[options.preset]
    model = options.model or preset.model
    if model is not None and preset.model is None:
        raise option_error("model", f"preset {options.preset} needs no model; leave it out", model)
    target = new_file(options.to, {}, overwrite=options.overwrite)
    file_system, place, listed = find_files(data, key=Option("data"))
    infos = [info for info in listed if is_file(file_system, info)]
    if not infos:
        raise option_error("data", NO_FILE, str(listed[0]["name"]))
    first = min(str(info["name"]) for info in infos)
    # — the rows of text files belong to their folder or glob, not to one file
    path = file_path(file_system, place if format_of(first) == "txt" else first)
    values = _sample(path, str(format_of(first)), first)
    columns = tuple(_column(name, sample) for name, sample in values.items())
    text = _named(columns, options.text, "text") or _text_column(columns, data)
    name, folder = _job_name(data), os.path.dirname(options.to)
    is_local = isinstance(file_system, LocalFileSystem)
    named = place if data.startswith("file://") else data
    proposal = Proposal(
        file=options.to,
        path=_relative(named, folder) if is_local else data,
        formats=tuple(sorted({str(format_of(info["name"])) for info in infos})),
        files=len(infos),
        size_bytes=sum(info["size"] or 0 for info in infos),
        sample_rows=max(map(len, values.values()), default=0),
        columns=columns,
        text=text,
        id=_named(columns, options.id, "id") or _id_column(columns, text),
        preset=options.preset,
        model=_relative(model, folder) if model and os.path.exists(model) else model,
        output=_output(name, named, folder) if is_local else f"out/{name}",
    )
    content = _spec(proposal, name, preset)
    parse_spec(content, place=options.to)
    target.write(content.encode())
    return proposal


def _sample(path: str, format: str, shown: str) -> dict[str, list[object]]:
    """Each column's values in the first rows; None where a row has no value.

    SpecError that shows this name of the file if it has no rows, or other content.
    """
    if format != "txt" and (content := foreign_content(path, format, {})) is not None:
        raise option_error("data", f"is {content}", shown)
    rows: list[dict[str, object]] = []
    chars = 0
    for row in first_rows(path, format, {}, SAMPLE_ROWS):
        rows.append({name: _as_text(value) for name, value in row.values.items()})
        chars += sum(len(value) for value in rows[-1].values() if isinstance(value, str))
        if chars > SAMPLE_CHARS:
            break
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        raise option_error("data", "the file has no row; name a file with rows", shown)
    if format.startswith(("csv", "tsv")) and (other := wrong_delimiter([*names])):
        raise option_error("data", other, shown)
    return {name: [row.get(name) for row in rows] for name in names}


def _as_text(value: object) -> object:
    """Bytes as text; nothing in place of a value that is too long, a list or an object."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if isinstance(value, TooLong | list | dict) else value


def _column(name: str, values: Sequence[object]) -> Column:
    present = [value for value in values if value is not None and value != ""]
    texts = list(map(str, present))
    is_text = bool(present) and all(isinstance(value, str) for value in present)
    return Column(
        name=name,
        kind="other" if not is_text else "text" if any(map(_is_prose, texts)) else "word",
        filled=len(present),
        distinct=len(set(texts)),
        mean_chars=sum(map(len, texts)) / max(1, len(texts)),
    )


def _is_prose(text: str) -> bool:
    """Whether a value may be a text: it has white space, or letters of a script without it."""
    return any(char.isspace() for char in text.strip()) or not text.isascii()


def _named(columns: Sequence[Column], name: str | None, option: str) -> str | None:
    """The column that the caller names; SpecError if there is none."""
    if name is not None and name not in {column.name for column in columns}:
        raise option_error(option, f"no such column; {_listed(columns)}", name)
    return name


def _text_column(columns: Sequence[Column], data: str) -> str:
    """The column with the most usual name; without one, that with the longest texts."""
    texts = [column for column in columns if column.kind != "other"]
    usual = {column.name: _last_part(column.name) for column in texts}
    if named := [name for name in usual if usual[name] in TEXT_NAMES]:
        return min(named, key=lambda name: TEXT_NAMES.index(usual[name]))
    if not (prose := [column for column in texts if column.kind == "text"]):
        fix = f"no column seems to hold texts; name one with --text; {_listed(columns)}"
        raise option_error("data", fix, data)
    return max(prose, key=lambda column: column.mean_chars).name


def _id_column(columns: Sequence[Column], text: str) -> str | None:
    """A column with the name of an id column, and with another value in each row."""
    rows = max(column.filled for column in columns)
    ids = [c.name for c in columns if c.name != text and c.filled == c.distinct == rows]
    if usual := [name for name in ids if _last_part(name) in ID_NAMES]:
        return min(usual, key=lambda name: ID_NAMES.index(_last_part(name)))
    return next((name for name in ids if _ID.search(name)), None)


def _last_part(name: str) -> str:
    return re.split(r"[.\s:]", name.strip().lower())[-1]


def _listed(columns: Sequence[Column]) -> str:
    return "the columns are: " + (listed(sorted(column.name for column in columns)) or "none")


def _job_name(data: str) -> str:
    """A valid job name, made from the name of the file or folder."""
    fixed = [part for part in data.split("/") if not re.search(r"^\W*$|[*?\[]|:$", part)]
    last = fixed[-1] if fixed else ""
    stem = last[: -len(format_of(last) or "") - 1] if format_of(last) else last
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).strip("_.-")[:63] or "corpus"


def _relative(path: str, folder: str) -> str:
    """A local path as a spec in the folder has it."""
    return path if os.path.isabs(path) else os.path.relpath(path, folder or ".")


def _output(name: str, data: str, spec_folder: str) -> str:
    """A folder that is not below that of the documents, relative to the folder of the spec."""
    documents = Path(re.split(r"[*?\[]", data)[0]).absolute()
    output = Path(spec_folder, "out", name).absolute()
    if output.is_relative_to(documents):
        output = documents.parent / f"{documents.name}_out" / name
    return os.path.relpath(output, spec_folder or ".")


def _spec(proposal: Proposal, name: str, preset: Preset) -> str:
    id = "  # No column has the name of an id: the id of a document is the hash of its text."
    if proposal.id is not None:
        id = f"  id: {_yaml(proposal.id)}"
    others = [_yaml(each.name) for each in proposal.columns if each.name != proposal.text]
    more = ", ..." if len(others) > SHOWN_COLUMNS else ""
    comment = f"  # other columns: {', '.join(others[:SHOWN_COLUMNS])}{more}" if others else ""
    model = "" if proposal.model is None else f"\nmodel: {{path: {_yaml(proposal.model)}}}\n"
    return (_SPEC + preset.tasks).format(
        file=shlex.quote(proposal.file),
        name=_yaml(name),
        model=preset.about + model,
        path=_yaml(proposal.path),
        text=_yaml(proposal.text),
        text_comment=comment,
        id=id,
        output=_yaml(proposal.output),
    )


def _yaml(text: str) -> str:
    """A string in YAML, in quotes where it needs them."""
    if _PLAIN.fullmatch(text):
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.strip()
