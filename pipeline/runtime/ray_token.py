"""The token with which a Ray and its clients authenticate each other.

Entry points: `token_mode`, and `answers_without_token` for a cluster that requires none. Of Ray's
private names those are used that read the token's mode again.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from pipeline.errors import Option, Problem, RefusedError, SpecError

MIN_TOKEN_CHARACTERS = 16


@contextmanager
def token_mode(*, starts: bool = False) -> Iterator[None]:
    """In this block, Ray in this process and in new ones uses a token, where there is one.

    The token is that of `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`, as in Ray.
    A Ray that this process starts gets a random one that is in no file, unless a variable has one.
    With `RAY_AUTH_MODE=disabled` no token is used.

    SpecError for a token that Ray cannot use.
    """
    mode = os.environ.get("RAY_AUTH_MODE") or "token"
    own = _token_variables(starts=starts) if mode.lower() == "token" else {}
    if os.environ.get("RAY_AUTH_MODE"):
        os.environ.update(own)  # — the mode was set before: it stays, with its token
        own = {}
    try:
        with variables(own):
            _read_variables_again()
            yield
    finally:
        _read_variables_again()


def _token_variables(*, starts: bool) -> dict[str, str]:
    """The variables with which Ray uses a token; none where there is no token."""
    in_mode = {"RAY_AUTH_MODE": "token"}
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        _check_token("RAY_AUTH_TOKEN", token, starts=starts)
        return in_mode
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            fix = f"cannot be read ({error}); write a token to it, or unset the variable"
            raise SpecError([Problem("RAY_AUTH_TOKEN_PATH", fix, path)]) from error
        _check_token("RAY_AUTH_TOKEN_PATH", token, starts=starts)
        return in_mode
    has_file = (Path.home() / ".ray/auth_token").is_file()
    if starts and not (has_file and os.environ.get("RAY_AUTH_MODE")):
        return {**in_mode, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return in_mode if has_file else {}


def _check_token(place: str, token: str, *, starts: bool) -> None:
    """SpecError if the token cannot be sent, or is too short for a Ray that starts here."""
    if not (token.isascii() and token.isprintable()):
        raise SpecError([Problem(place, "the token may have printable ASCII characters only")])
    if starts and len(token) < MIN_TOKEN_CHARACTERS:
        fix = f"the token has {len(token)} characters, and needs {MIN_TOKEN_CHARACTERS}; unset the "
        raise SpecError([Problem(place, f"{fix}variable to get a random one")])


def _read_variables_again() -> None:
    """Lets Ray's core read its environment again: it does so once, when it is imported."""
    # — in this order: a thread of Ray that still reads the token ends the process if the mode
    # requires one and there is none
    core: Any = ray._raylet
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment variables that have no value, until the block ends."""
    own = {name: value for name, value in values.items() if not os.environ.get(name)}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def answers_without_token(place: str) -> bool:
    """Whether the cluster lists its nodes to a process without a token."""
    ask = "import sys, ray; ray._raylet.GcsClient(sys.argv[1]).get_all_node_info()"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", ask, place]
    return subprocess.run(command, env=variables, capture_output=True).returncode == 0


def refused_token(address: str) -> RefusedError:
    """The error of a cluster that requires a token and received another one, or none."""
    fix = f"{address} refuses the token, or got none; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to "
    return RefusedError(Problem(Option("address"), f"{fix}the cluster's own"))


def refuses_token(error: BaseException | None) -> bool:
    """Whether a cluster refused the token of this process."""
    while error is not None:
        if isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
