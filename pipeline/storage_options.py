"""How a spec says by which options a path is opened: as fsspec takes them, and without secrets.

Knows the names of options that are secrets. Knows nothing of file systems or stores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

# What names a secret in the options of s3fs, gcsfs, adlfs, the hub and their clients.
_SECRET = re.compile(r"secret|password|token|credential|connection_string|account_key|sas|^key$")
_WAYS_TO_LOG_IN = ("anon", "google_default", "cloud", "cache")  # gcsfs calls them `token`
_BOOLEANS = {"true": True, "false": False}


def _as_options(value: object) -> object:
    """The options as fsspec takes them: `true` and `false` are strings in a spec's YAML."""
    if isinstance(value, Mapping):
        return {key: _as_options(inner) for key, inner in value.items()}
    return _BOOLEANS.get(value, value) if isinstance(value, str) else value


def _without_secrets(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            _without_secrets(value)
        elif _SECRET.search(str(name).lower()) and value not in _WAYS_TO_LOG_IN:
            raise ValueError(
                f"{name!r} is a secret, and a spec is no place for one; name a profile, or set "
                f"the environment variable that its file system reads"
            )
    return options


# Options of the fsspec file system that opens the path they stand beside: endpoint_url, profile,
# anon, ... The user's fsspec and AWS settings hold where an option does not say otherwise.
StorageOptions = Annotated[
    dict[str, Any], BeforeValidator(_as_options), AfterValidator(_without_secrets)
]
