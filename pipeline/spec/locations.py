"""Paths and storage options of a spec: in the form of fsspec, and without secrets.

A relative path of a spec is relative to the folder of the spec's file, which is in the context of
the validation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

# Names of secrets in the options of s3fs, gcsfs, adlfs, the Hub and their clients.
_SECRET = re.compile(
    r"secret|pass(w|phrase)|token|credential|connection_string|bearer|cookie|"
    r"(account|access|api|private|customer)[_-]?key|(^|[_-])auth|sas|^p?key$"
)
_WAYS_TO_LOG_IN = ("anon", "google_default", "cloud", "cache")  # gcsfs calls them `token`
# A password before the host, or on the web a token alone; and the query parameters of a signed URL.
_USER = re.compile(
    r"(?<=://)[^/@:?#]*:[^/@]*(?=@)|((?<=http://)|(?<=https://))[^/@?#]+(?=@)", re.IGNORECASE
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
# What keys of hosted APIs look like: a known beginning, or long without a folder or an ending.
_KEY = re.compile(r"(sk|pk|rk|gsk|xai|hf|AIza|Bearer)[-_ ]?[\w-]{8,}$|[\w+=-]{32,}$")
_SIGNED = re.compile(
    r"[?&]([\w-]*(token|secret|passw(or)?d|signature|credential|api_?key|auth)|sig|"
    r"awsaccesskeyid|(\w*_)?key)=",
    re.IGNORECASE,
)


# A table, and the version of it that is read: a number of Delta or Lance, or a name.
_TABLE = re.compile(r"(?:(delta|lance)\+|(iceberg)://)(.+?)/?(?:@([\w.-]+))?")


TableKind = Literal["delta", "iceberg", "lance"]


class TablePath(NamedTuple):
    """A table that a path names, as `delta+PATH@VERSION`."""

    kind: TableKind
    place: str  # a folder, local or a URL; of Iceberg, CATALOG/NAMESPACE.TABLE
    version: str | None  # None: the current one


def table_at(path: str) -> TablePath | None:
    """The table that a path names by its beginning; None of other paths."""
    named = _TABLE.fullmatch(path)
    if named is None:
        return None
    return TablePath(cast("TableKind", named[1] or named[2]), named[3], named[4])


def split_prefix(path: str) -> tuple[str, str]:
    """The `delta+` or `lance+` before the folder of a table, or nothing, and what follows."""
    prefix = re.match(r"(delta|lance)\+", path)
    return (prefix[0], path[prefix.end() :]) if prefix else ("", path)


class Number(str):
    """A number of a YAML file as it is written, such as 007 or 2.10: it may be meant as a text."""

    def __repr__(self) -> str:
        return str(self)

    @property
    def value(self) -> object:
        """The number, or the text if it is in a form that Python does not read."""
        for kind in (int, float):
            with suppress(ValueError):
                return kind(self)
        return str(self)


# In an option, a text would be true: `anon: no` would be anonymous.
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _as_options(value: object) -> object:
    """The options as fsspec takes them, with the numbers and booleans of a spec's YAML."""
    if isinstance(value, Mapping):
        return {key: _as_options(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_options(inner) for inner in value]
    if isinstance(value, Number):
        return value.value
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _without_secrets(value: Any) -> Any:
    """The options, or a part of them; ValueError for a secret, which is not repeated."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if _SECRET.search(str(name).lower()) and inner not in _WAYS_TO_LOG_IN:
                raise ValueError(
                    f"{name!r} is a secret, and a spec must not hold one; name a profile, or set "
                    f"the environment variable that its file system reads"
                )
            _without_secrets(inner)
    elif isinstance(value, list):
        if len(value) == 2 and isinstance(value[0], str):  # as a pair of a header's name and value
            _without_secrets({value[0]: value[1]})
        for inner in value:
            _without_secrets(inner)
    elif isinstance(value, str):
        _without_credentials(value)
    return value


def _without_credentials(path: str) -> str:
    if _USER.search(path) or _SIGNED.search(path):
        raise ValueError(
            "this URL holds a password or a signature, which label files and logs would repeat; "
            "write it without them, and set them in a profile or the environment"
        )
    return path


def _not_a_key(name: str) -> str:
    """The name of an environment variable; ValueError for anything else, which is not repeated."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "write the name of an environment variable in capitals, as in OPENAI_API_KEY, and "
            "never the key itself"
        )
    return name


def _not_in_the_spec(path: str) -> str:
    """The path of a file with a key; ValueError if it looks like the key itself."""
    if _KEY.match(path) and not os.path.exists(path):
        raise ValueError("looks like a key; write the key into a file, and its path here")
    return path


def masked(value: object) -> object:
    """The value with possible secrets replaced by `***`, for errors."""
    if isinstance(value, Mapping):
        return {key: _masked_option(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    if not isinstance(value, str) or isinstance(value, Number):
        return value
    shown = _USER.sub("***", value)
    return shown.partition("?")[0] + "?***" if _SIGNED.search(shown) else shown


def _masked_option(name: str, value: object) -> object:
    secret = _SECRET.search(name.lower().replace("tokens", ""))  # `max_tokens` is not one
    return "***" if secret and not isinstance(value, Number | int | float | None) else masked(value)


def _from_the_spec(path: str, info: ValidationInfo) -> str:
    """The path from the working folder, where the spec has it from its own folder."""
    folder = (info.context or {}).get("folder", "")
    prefix, place = split_prefix(path)
    if not folder or "://" in place or place.startswith("~") or os.path.isabs(place):
        return path
    return prefix + os.path.relpath(os.path.join(folder, place))


def _model_from_the_spec(path: str, info: ValidationInfo) -> str:
    """As `_from_the_spec` for a model's folder or file; the name of a model elsewhere as it is."""
    if info.data.get("engine") == "openai":
        return path
    local = _from_the_spec(path, info)
    is_file = path.endswith(".gguf") or path.startswith(".") or os.path.isdir(local)
    return local if is_file else path


# A path or URL of a file.
FilePath = Annotated[str, Field(min_length=1), AfterValidator(_from_the_spec)]
# A path or URL of documents or of labels, which label files and logs repeat.
Location = Annotated[FilePath, AfterValidator(_without_credentials)]
# A path, a URL, or the name of a model on the Hub.
ModelLocation = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_model_from_the_spec),
    AfterValidator(_without_credentials),
]
# The name of an environment variable, and the path of a file, that hold a key.
KeyVariable = Annotated[str, AfterValidator(_not_a_key)]
KeyFile = Annotated[
    str, Field(min_length=1), AfterValidator(_not_in_the_spec), AfterValidator(_from_the_spec)
]
# Options of the fsspec file system that opens the path they stand beside: endpoint_url, profile,
# anon, ... The user's fsspec and AWS settings apply where no option replaces them.
StorageOptions = Annotated[
    dict[str, Any], BeforeValidator(_as_options), AfterValidator(_without_secrets)
]
