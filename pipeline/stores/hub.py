"""The Hugging Face Hub: errors in words, and URLs that are pinned to a commit.

Entry points: `hub_fix`, and `pinned` for `hf://` URLs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import huggingface_hub as hub  # — loads its client, which is slow to load, when it is used
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.errors import AssayError, Problem, SpecError, UnavailableError, one_line

logger = logging.getLogger(__name__)

# What the Hub's HTTP client raises. The base class is of another package in each version.
HubClientError: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
NOT_THERE = (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)  # gated ones, too
HUB_ERRORS = (
    HubClientError, HFValidationError, LocalEntryNotFoundError, ConnectionError, TimeoutError,
)  # fmt: skip
PROTOCOL = "hf://"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_fix(error: BaseException, repo: str) -> str:
    """What is wrong with a repository of the Hub, and what to do, on one line."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return hub_fix(error.__cause__, repo)
    endpoint = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return f"gated on the Hub; accept its terms at {endpoint}/{repo} and set HF_TOKEN"
        case RevisionNotFoundError():
            return "the repository on the Hub has no such branch, tag or commit; write another"
        case RepositoryNotFoundError():
            return "no such repository on the Hub; check the name, or set HF_TOKEN if it is private"
        case HFValidationError():
            return "not a name on the Hub either; a name is ORG/NAME"
        case HfHubHTTPError():
            return f"the Hub at {endpoint} refused: {one_line(error)}; try again later"
    return (
        f"the Hub at {endpoint} cannot be reached: {one_line(error)}; check the network, or set "
        f"HF_ENDPOINT to a mirror"
    )


def hub_error(error: BaseException, problem: Problem) -> AssayError:
    """The error with this problem: UnavailableError where the Hub may answer later."""
    if isinstance(error, HUB_ERRORS) and not isinstance(error, NOT_THERE):
        return UnavailableError(f"{problem}; run again to go on")
    return SpecError([problem])


def pinned(url: str, options: Mapping[str, Any], key: str) -> str:
    """The `hf://` URL with the commit that its branch or tag (default: main) points to now.

    URLs with a commit, and URLs of buckets, are returned unchanged. SpecError at `key` if the Hub
    has no such repository or revision, UnavailableError if the Hub does not answer.
    """
    try:
        # — a repository; in new versions of the client also a bucket, which has no revisions
        place: Any = hub.HfFileSystem(**options, skip_instance_cache=True).resolve_path(url)
        if not hasattr(place, "repo_id") or _COMMIT.fullmatch(place.revision):
            return url
        api = hub.HfApi(endpoint=options.get("endpoint"), token=options.get("token"))
        info = api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
    except (*HUB_ERRORS, FileNotFoundError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, HUB_ERRORS) else error
        repo = url.removeprefix(PROTOCOL)
        raise hub_error(cause, Problem(key, hub_fix(cause, repo), url)) from error
    except (ValueError, NotImplementedError) as error:
        fix = f"write hf://datasets/ORG/NAME@REVISION/*.parquet: {one_line(error)}"
        raise SpecError([Problem(key, fix, url)]) from error
    repo = constants.REPO_TYPES_URL_PREFIXES.get(place.repo_type, "") + place.repo_id
    commit_url = f"{PROTOCOL}{repo}@{info.sha}/{place.path_in_repo}".rstrip("/")
    logger.info("%s: %s is commit %s", url, place.revision, info.sha)
    return commit_url
