"""The data files of a version of a table: Delta, Iceberg or Lance.

Entry points: `table_files`, `lance_folder` for a folder that is a Lance dataset, and
`stored_files` for the files as they are stored. Each kind of table has a module.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from pipeline.errors import Problem, SpecError, StorageError, UnavailableError, one_line
from pipeline.sources.delta import delta_files
from pipeline.sources.iceberg import iceberg_files
from pipeline.sources.lance_dataset import lance_files
from pipeline.sources.listing import LISTINGS_AT_ONCE, FileInfo
from pipeline.sources.streams import Options, fetching
from pipeline.sources.text_files import file_path
from pipeline.sources.views import DataFile
from pipeline.spec.locations import TablePath
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import retry

logger = logging.getLogger(__name__)

# By the kind of table: what gives the version that is read, and its data files.
_KINDS: Mapping[str, Callable[[TablePath, Options], tuple[int, list[DataFile]]]] = {
    "delta": delta_files,
    "iceberg": iceberg_files,
    "lance": lance_files,
}


def table_files(table: TablePath, options: Options) -> list[DataFile]:
    """The data files of the version that is named, or of the current one, which is logged.

    SpecError if there is no such table or version, it has no data file, or its files need a reader
    that assay does not have. StorageError if the table cannot be read.
    """
    try:
        version, files = _KINDS[table.kind](table, options)
    except ImportError as error:
        fix = f"a package is missing ({error}); pip install 'corpus-assay[{table.kind}]'"
        raise SpecError([Problem("input.path", fix, table.place)]) from error
    except OSError as error:
        raise UnavailableError(
            f"{table.place}: the table cannot be read: {one_line(error)}; check the endpoint and "
            f"the credentials, or run again to go on"
        ) from error
    logger.info("input.path: %s: version %d, data files: %d", table.place, version, len(files))
    if not files:
        fix = f"version {version} of the table has no rows; name another version"
        raise SpecError([Problem("input.path", fix, table.place)])
    return files


def lance_folder(path: str, options: Options) -> TablePath | None:
    """The Lance dataset in a folder `*.lance`, or `*.lance@VERSION`; None of other paths."""
    named = re.fullmatch(r"(.*\.lance)/?(?:@([\w.-]+))?", path, re.DOTALL)
    if named is None:
        return None
    with suppress(
        ValueError, ImportError, TypeError, KeyError
    ):  # — reading it fails again, and names it
        file_system, place = file_system_at(named[1], options)
        with fetching(path):
            if retry(partial(file_system.isdir, place)):
                return TablePath("lance", named[1], named[2])
    return None


def stored_files(files: Sequence[DataFile], options: Options) -> list[tuple[str, FileInfo]]:
    """Of each data file its path and the file system's description; StorageError if one is gone."""
    try:
        places = [file_system_at(file.path, options) for file in files]
    except (ValueError, ImportError) as error:
        fix = f"a data file of the table cannot be opened: {error}"
        raise SpecError([Problem("input.path", fix, files[0].path)]) from error
    folders = {place.rpartition("/")[0]: file_system for file_system, place in places}
    for file_system in folders.values():
        file_system.invalidate_cache()  # of earlier listings

    def listed(folder: str) -> Sequence[FileInfo]:
        own: Sequence[FileInfo] = ()
        with fetching(folder), suppress(FileNotFoundError):
            own = retry(partial(folders[folder].ls, folder, detail=True))
        return own

    with ThreadPoolExecutor(LISTINGS_AT_ONCE) as pool:
        infos = {str(i["name"]): i for of_folder in pool.map(listed, folders) for i in of_folder}
    stored = []
    for file, (file_system, place) in zip(files, places, strict=True):
        if place not in infos:
            raise StorageError(
                f"{file.path}: is gone, and the table's version names it; name a newer version, "
                f"or restore the file"
            )
        stored.append((file_path(file_system, place), infos[place]))
    return stored
