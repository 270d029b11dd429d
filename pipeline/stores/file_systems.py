"""The fsspec file system of a path or a URL.

Entry points: `file_system_at`, and `native_options` for readers of tables, which open URLs without
fsspec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import one_line
from pipeline.stores.retries import storage_errors


def file_system_at(path: str, options: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    """The file system of a path, made with the options, and the place in it.

    Without `scheme://`, or with `file://`, a path is local, and no character of it has a meaning.
    fsspec alone would take `a::b.jsonl` for a chain of two URLs, and read `a`. ValueError if there
    is no file system for the scheme, it refuses an option, or the file that holds it is missing;
    ImportError if its package is not installed.
    """
    if path.startswith("data:") and "://" in path:
        raise ValueError("a data URL is not a file")
    if "://" in path and not path.startswith("file://"):
        try:
            file_system, place = url_to_fs(path, **options)
        except FileNotFoundError as error:  # a file inside another one
            raise ValueError(f"there is no such file: {one_line(error)}") from error
        except (OSError, ValueError, ImportError):
            raise
        except Exception as error:  # — some need options, and each reports that in another way
            if options and isinstance(error, TypeError | KeyError):
                raise
            raise ValueError(f"{one_line(error)}; set what it needs in storage_options") from error
        return file_system, str(place)
    local = LocalFileSystem(**options)
    return local, str(local._strip_protocol(path))


def native_options(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The options of s3fs in the words of Rust's `object_store`; none for other file systems.

    Without a `key`, the credentials are those that botocore finds, as it does for s3fs.
    StorageError where it finds no such profile, or cannot renew them.
    """
    if not url.startswith(("s3://", "s3a://")):
        return {}
    from botocore.session import Session  # — slow to load, and few inputs are tables in S3

    client = {"endpoint_url": options.get("endpoint_url"), **options.get("client_kwargs", {})}
    with storage_errors(url, "opened"):
        session = Session(profile=options.get("profile"))
        region = client.get("region_name") or session.get_config_variable("region")
        login = [options.get(name) for name in ("key", "secret", "token")]
        if login[0] is None and not options.get("anon") and (own := session.get_credentials()):
            login = [*own.get_frozen_credentials()][:3]
    endpoint = client.get("endpoint_url")
    native = {
        "aws_endpoint": endpoint,
        "aws_region": region,
        "allow_http": "true" if str(endpoint).startswith("http://") else None,
        "aws_skip_signature": "true" if options.get("anon") else None,
    }
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    native |= dict(zip(names, login, strict=True))
    return {name: str(value) for name, value in native.items() if value}
