"""The Hugging Face Hub: errors in words, URLs of a commit, and a dataset changed by one commit.

Entry points: `hub_fix`, `pinned` for `hf://` URLs, and `dataset_of` and `upload`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
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

from pipeline.errors import (
    AssayError,
    Option,
    Problem,
    SpecError,
    UnavailableError,
    one_line,
    option_error,
)

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
_DATASET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?")
_ATTEMPTS = 3  # of a commit, while others commit to the same branch
_CONFLICTS = (409, 412)  # status


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


def dataset_of(url: str) -> tuple[str, str | None]:
    """The dataset that the option `to` names, and its branch; SpecError for another place."""
    if (parts := _DATASET.fullmatch(url)) is None:
        fix = "write hf://datasets/ORG/NAME, or hf://datasets/ORG/NAME@BRANCH"
        raise option_error("to", fix, url)
    return parts[1], parts[2]


def upload(
    folder: Path, url: str, options: Mapping[str, Any], *, message: str, replaces: Sequence[str]
) -> None:
    """Commits files of a folder; equal files make no commit.

    They are `README.md` and those that match `replaces`; others of the dataset that match it are
    deleted by the same commit. A dataset that does not exist is made, and is private. SpecError if
    the token may not write, UnavailableError if the Hub does not answer, or others keep committing.
    """
    repo, branch = dataset_of(url)
    api = hub.HfApi(endpoint=options.get("endpoint"), token=options.get("token"))

    def is_replaced(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in replaces)

    files = {f.relative_to(folder).as_posix(): f for f in sorted(folder.rglob("*")) if f.is_file()}
    new = {n: f for n, f in files.items() if is_replaced(n) or n == "README.md"}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
            before: Any = api.repo_info(repo, repo_type="dataset", revision=branch)
            old = {file.rfilename for file in before.siblings if is_replaced(file.rfilename)}
            # — `upload_folder` makes several commits of many files
            api.create_commit(
                repo,
                [
                    *map(hub.CommitOperationDelete, sorted(old - new.keys())),
                    *(hub.CommitOperationAdd(name, file) for name, file in new.items()),
                ],
                repo_type="dataset",
                revision=branch,
                commit_message=message,
                parent_commit=before.sha,
            )
            return
        except HUB_ERRORS as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            if status in _CONFLICTS and attempt < _ATTEMPTS:
                continue
            raise _commit_error(error, status, repo, url) from error
        except ValueError as error:  # — the Hub refuses the card, or the client a name
            raise option_error("to", one_line(error), url) from error


def _commit_error(error: BaseException, status: int | None, repo: str, url: str) -> AssayError:
    if status in (401, 403):
        fix = f"the token may not write to {repo}; set HF_TOKEN to one that may"
        return option_error("to", fix, url)
    if status in _CONFLICTS:
        return UnavailableError(f"{url}: others keep committing to it; run again")
    return hub_error(error, Problem(Option("to"), hub_fix(error, repo), url))
