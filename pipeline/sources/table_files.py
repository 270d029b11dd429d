"""The data files of a version of a table: Delta, Iceberg or Lance.

Entry points: `table_files`, `lance_folder` for a folder that is a Lance dataset, and
`data_file_infos` for the files as they are stored. Each kind of table has a module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.sources.delta import delta_files
from pipeline.sources.iceberg import iceberg_files
from pipeline.sources.lance_dataset import lance_files
from pipeline.sources.listing import LISTINGS_AT_ONCE, FileInfo
from pipeline.sources.streams import Options, fetching, retry_transient
from pipeline.sources.views import DataFile
from pipeline.spec.locations import TablePath
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import option_errors

logger = logging.getLogger(__name__)

# By the kind of table: what gives the version that is read, and its data files.
_KINDS: Mapping[str, Callable[[TablePath, Options], tuple[int, list[DataFile]]]] = {
    "delta": delta_files,
    "iceberg": iceberg_files,
    "lance": lance_files,
}


def table_files(table: TablePath, options: Options) -> list[DataFile]:
    """The data files of the version that is named, or of the current one, which is logged.

    Raises:
        SpecError: There is no such table or version, it has no data file, or its files need a
            reader that assay does not have.
        StorageError: The table cannot be read; UnavailableError if it may be later.
    """
    version, files = _KINDS[table.kind](table, options)
    logger.info("input.path: %s: version %d, data files: %d", table.place, version, len(files))
    if not files:
        fix = f"version {version} of the table has no rows; name another version"
        raise SpecError([Problem("input.path", fix, table.place)])
    return files


def lance_folder(path: str, options: Options) -> TablePath | None:
    """The Lance dataset in a folder whose name ends in `.lance`; None of other paths."""
    if not path.rstrip("/").endswith(".lance"):
        return None
    with option_errors("input.storage_options", options), suppress(ValueError, ImportError):
        file_system, place = file_system_at(path, options)
        with fetching(path):
            if retry_transient(partial(file_system.isdir, place)):
                return TablePath("lance", path, None)
    return None


def data_file_infos(files: Sequence[DataFile], options: Options) -> list[FileInfo]:
    """The file systems' descriptions of data files; StorageError if one is gone."""
    found = [file_system_at(file.path, options) for file in files]
    folders = {place.rpartition("/")[0]: file_system for file_system, place in found}
    for file_system in {id(own): own for own in folders.values()}.values():
        file_system.invalidate_cache()  # forgets what it listed before
    infos: dict[str, FileInfo] = {}

    def listed(folder: str) -> Sequence[FileInfo]:
        with fetching(folder), suppress(FileNotFoundError):
            own: Sequence[FileInfo] = retry_transient(
                partial(folders[folder].ls, folder, detail=True)
            )
            return own
        return ()

    with ThreadPoolExecutor(LISTINGS_AT_ONCE) as pool:
        for of_folder in pool.map(listed, folders):
            infos |= {str(info["name"]): info for info in of_folder}
    for file, (_, place) in zip(files, found, strict=True):
        if place not in infos:
            raise StorageError(
                f"{file.path}: is gone, and the table's version names it; name a newer version, "
                f"or restore the file"
            )
    return [infos[place] for _, place in found]
