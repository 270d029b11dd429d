"""Files under names that users choose, at any fsspec URL: each is written whole, in one step.

Entry points: `new_file`, `open_target` and `Target.replaced`. A reader sees the old file or the new
one, never a part. Ledgers do not use this: their objects are created once (`stores.store`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import option_error
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.local import drop_unfinished, unfinished
from pipeline.stores.retries import option_errors, retry, storage_errors


@dataclass(frozen=True, slots=True)
class Target:
    """A file or a folder in a file system."""

    url: str  # as it is shown
    file_system: AbstractFileSystem
    place: str  # without the protocol

    def below(self, name: str) -> Target:
        """The file of this name below the folder."""
        return Target(f"{self.url.rstrip('/')}/{name}", self.file_system, f"{self.place}/{name}")

    def exists(self) -> bool:
        """Whether there is a file, or a folder with something in it."""
        return bool(self._ask(self.file_system.exists, "read"))

    def files(self) -> set[str]:
        """The names of all files below the folder, at any depth."""
        names = self._ask(self.file_system.find, "listed")
        prefix = f"{self.place.rstrip('/')}/"
        below = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        # — in S3, an object whose name ends in a slash is the mark of a folder
        return {name for name in below if name and not name.endswith("/")}

    def read(self) -> bytes:
        """The file's content."""
        data: bytes = self._ask(self.file_system.cat_file, "read")
        return data

    def delete(self) -> None:
        """Deletes the file."""
        self._ask(self.file_system.rm_file, "deleted")

    def _ask(self, method: Callable[[str], Any], done: str) -> Any:
        with storage_errors(self.url, done):
            self.file_system.invalidate_cache()  # of earlier listings
            return retry(partial(method, self.place))

    def write(self, data: bytes) -> None:
        """Replaces the file by one with this content."""
        with self.replaced() as path:
            path.write_bytes(data)

    @contextmanager
    def replaced(self) -> Iterator[Path]:
        """Gives a path to write to. At the end, the file that was written there is put in place.

        After an exception, nothing is put in place. On a local disk the file is renamed; elsewhere
        it is uploaded from the folder for temporary files.
        """
        if isinstance(self.file_system, LocalFileSystem):
            final = Path(self.place)
            with storage_errors(self.url, "written"):
                final.parent.mkdir(parents=True, exist_ok=True)
                with unfinished(final.with_name(f".{final.name}.")) as (written, file):
                    yield written
                    os.fsync(file.fileno())
                    written.replace(final)
            return
        with (
            storage_errors(self.url, "written"),
            unfinished(Path(tempfile.gettempdir(), "assay-"), 0o600) as (written, _),
        ):
            yield written
            upload = partial(self.file_system.put_file, str(written), self.place)
            retry(upload)

    def drop_unfinished(self) -> None:
        """Deletes what was not finished, here or below, by processes that were killed."""
        place = Path(self.place)
        if not isinstance(self.file_system, LocalFileSystem):
            drop_unfinished(Path(tempfile.gettempdir()).glob("assay-*"))
        elif place.is_dir():
            drop_unfinished(place.rglob(".*"))
        else:
            drop_unfinished(place.parent.glob(f".{escape(place.name)}.*"))


def open_target(url: str, options: Mapping[str, Any]) -> Target:
    """The place that the option `to` names, opened with fsspec options; SpecError if that fails."""
    with storage_errors(url, "opened"), option_errors("storage_options", options):
        try:
            file_system, place = file_system_at(url, options)
        except (ValueError, ImportError) as error:  # no such protocol, or package not installed
            raise option_error("to", f"cannot be opened: {error}", url) from error
    shown = place if isinstance(file_system, LocalFileSystem) else url
    return Target(shown, file_system, place.rstrip("/"))


def new_file(url: str, options: Mapping[str, Any], *, overwrite: bool) -> Target:
    """The file that the option `to` names, which is not written yet.

    SpecError if it is a folder, or if it exists and `overwrite` is not set.
    """
    target = open_target(url, options)
    is_local = isinstance(target.file_system, LocalFileSystem)
    if url.endswith("/") or (is_local and Path(target.place).is_dir()):
        raise option_error("to", "is a folder; name a file", url)
    if not overwrite and target.exists():
        fix = "exists; write another name, or add --overwrite to replace it"
        raise option_error("to", fix, url)
    target.drop_unfinished()
    return target
