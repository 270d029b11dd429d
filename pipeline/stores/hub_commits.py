"""A dataset of the Hugging Face Hub, changed by one commit. Entry: `dataset_of` and `upload`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub.errors import HfHubHTTPError

from pipeline.errors import AssayError, Option, Problem, UnavailableError, one_line, option_error
from pipeline.stores.hub import HUB_ERRORS, hub_error, hub_fix

_DATASET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?")
_ATTEMPTS = 3  # of a commit, while others commit to the same branch
_CONFLICTS = (409, 412)  # status


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
            raise _problem(error, status, repo, url) from error
        except ValueError as error:  # — the Hub refuses the card, or the client a name
            raise option_error("to", one_line(error), url) from error


def _problem(error: BaseException, status: int | None, repo: str, url: str) -> AssayError:
    if status in (401, 403):
        fix = f"the token may not write to {repo}; set HF_TOKEN to one that may"
        return option_error("to", fix, url)
    if status in _CONFLICTS:
        return UnavailableError(f"{url}: others keep committing to it; run again")
    return hub_error(error, Problem(Option("to"), hub_fix(error, repo), url))
