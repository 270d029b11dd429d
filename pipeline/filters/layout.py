"""The keys of a filtered corpus: named after the input's files, so the layout is kept.

Entry points: `Layout`, `shard_file`, `relative_paths`, `refuse_own_places`, `real_path`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from pipeline.errors import Problem, SpecError, option_error
from pipeline.filters.writers import CONVERTED
from pipeline.hashes import short_hash
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.sources.formats import format_of
from pipeline.sources.streams import Options
from pipeline.spec.locations import table_at
from pipeline.spec.schema import JobSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.hub import PROTOCOL
from pipeline.stores.store import check_key

ROW_DIGITS = 10
# A local name has at most 255 bytes, and `.<first row>.jsonl.zst` is added to the input's.
MAX_NAME_BYTES = 255 - len(".0000000000.jsonl.zst")
_HASHED = re.compile(r"~[0-9a-f]{32}(?=\.|$)")
_REVISION = re.compile(r"@(refs/(convert|pr)/)?[^/]+")  # of a dataset of the Hub


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys of one filter's files; each has its id, so that files of two filters never mix."""

    id: str
    relative: Mapping[str, str]  # by input path, the path below the input's folder

    def kept_key(self, shard: NamedShard) -> str:
        """`kept/<id>/<folders>/<name>.<first row>.<format>`.

        A file that is written in another format has that format added to its name:
        `<format>.parquet`. Text files are one object, named by a folder or a glob: `<folder>.<first
        row>.jsonl.zst`.
        """
        path = self.relative[shard.path]
        format = format_of(path) or "txt"
        suffix = path[-len(format) - 1 :] if format_of(path) else ""
        name = f"{path.removesuffix(suffix)}.{shard.start_row:0{ROW_DIGITS}d}{suffix}"
        return f"kept/{self.id}/{name}{CONVERTED.get(format, '')}"

    def dropped_key(self, shard: NamedShard) -> str:
        """`dropped/<id>/<folders>/<name>.<format>.<first row>.parquet`."""
        return f"dropped/{self.id}/{shard_file(self.relative[shard.path], shard, 'parquet')}"

    def kept_suffixes(self) -> list[str]:
        """The suffixes of the kept files: each file has exactly one of them."""
        suffixes = set()
        for path in self.relative.values():
            format = format_of(path) or "txt"
            suffixes.add(CONVERTED.get(format, path[-len(format) - 1 :]))
        return sorted(suffixes)

    @property
    def manifest_key(self) -> str:
        """Written when every shard is done: its presence means that the corpus is complete."""
        return f"filters/{self.id}/all.json"


def shard_file(relative: str, shard: NamedShard, format: str) -> str:
    """A file of another format for a shard of this input file: two shards never share one."""
    return f"{relative}.{shard.start_row:0{ROW_DIGITS}d}.{format}"


def relative_paths(path_glob: str, paths: Collection[str], options: Options) -> dict[str, str]:
    """Each path below the folder that a spec's `input.path` names; SpecError if it is no key."""
    places = {path: _place(path, options) for path in paths}
    if is_table := table_at(path_glob) is not None:  # — its files may be anywhere
        folders = [place.rpartition("/")[0] for place in places.values()]
        below = os.path.join(os.path.commonpath(folders or [""]), "")
    else:
        below = f"{_fixed_folder(_place(path_glob, options), list(places.values()))}/"
    if alone := [path for path, place in places.items() if not place.startswith(below)]:
        raise SpecError([Problem("input.path", f"{alone[0]} is not below it", path_glob)])
    relative = {
        path: _as_key(place.removeprefix(below), is_table=is_table)
        for path, place in places.items()
    }
    for path in relative:
        if format_of(path) in (None, "txt"):  # the text files of a folder, or of a glob
            relative[path] = re.sub(r"[*?\[\]]+", "_", relative[path])
        check_key(relative[path])
    return relative


def _place(path: str, options: Options) -> str:
    """The path in its file system; without the revision that a dataset of the Hub is read at."""
    place: str = file_system_at(path, options)[1]
    return _REVISION.sub("", place, count=1) if path.startswith(PROTOCOL) else place


def _as_key(path: str, *, is_table: bool = False) -> str:
    """The path as a key; of one that not every store holds, `<beginning>~<hash>.<format>`.

    Such a path has a long name, a backslash, or a part that is empty or dots: S3 allows `a//b`. A
    path that looks like such a key gets one, too, so that two paths never share a key. So does the
    data file of a table whose name has no format, such as `000000_0` of Hive: it is Parquet.
    """
    folder, slash, name = path.rpartition("/")
    format = format_of(name)
    is_plain = "\\" not in path and not {"", ".", ".."} & {*path.split("/")}
    is_short = len(name.encode()) <= MAX_NAME_BYTES and not _HASHED.search(name)
    if is_plain and is_short and not (is_table and format is None):
        return path
    suffix = name[-len(format) - 1 :] if format else ".parquet" if is_table else ""
    end = f"~{short_hash(path.encode())}{suffix}"
    beginning = name.removesuffix(suffix).replace("\\", "_").encode()[: MAX_NAME_BYTES - len(end)]
    key = f"{beginning.decode(errors='ignore')}{end}"
    return f"{folder}{slash}{key}" if is_plain else key


def _fixed_folder(place: str, places: Sequence[str]) -> str:
    """The folder of a file, a folder or a glob."""
    place = place.rstrip("/")
    if list(places) == [place]:
        return place.rpartition("/")[0]
    if all(path.startswith(f"{place}/") for path in places):
        return place
    return re.split(r"[*?\[]", place)[0].rpartition("/")[0]


def refuse_own_places(spec: JobSpec, to: str) -> None:
    """SpecError if what is written would be in the spec's input or output, or around one of them.

    A run would label it, or read it as labels.
    """
    target, source = real_path(to), real_path(spec.input.path)
    glob = None if os.path.lexists(source) else re.search(r"[*?\[].*", source)
    folder = source if glob is None else source[: glob.start()].rpartition("/")[0]
    takes_in_folders = glob is None or "/" in glob[0] or "**" in glob[0]
    inside = {"output": real_path(spec.output)} | ({"input": folder} if takes_in_folders else {})
    around = {"input": folder} | inside
    names = [name for name, own in inside.items() if f"{target}/".startswith(f"{own}/")]
    if not names and re.match(glob_translate(source), target):
        names = ["input"]
    if names:
        raise option_error("to", f"is in the {names[0]} of the spec; name another folder", to)
    if names := [name for name, own in around.items() if f"{own}/".startswith(f"{target}/")]:
        raise option_error("to", f"contains the {names[0]} of the spec; name another folder", to)


def real_path(path: str) -> str:
    """The path, absolute and without links; a URL with the usual name of its scheme."""
    if (table := table_at(path)) is not None and table.kind != "iceberg":
        return real_path(table.place)
    scheme, separator, path_in_store = path.rpartition("://")
    if scheme in ("", "file"):
        return os.path.realpath(str(LocalFileSystem._strip_protocol(path))).rstrip("/")
    usual = {"s3a": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
    if usual == "hf":
        path_in_store = re.sub("@main(?=/|$)", "", path_in_store, count=1)
    return usual + separator + path_in_store.strip("/")
