"""Trying again: how often, how long between, and which failures are worth it.

Knows waits and tries. Knows nothing of what is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a store may be out of reach before the run gives up: by default about a minute.

    Each wait is drawn from zero to a limit that doubles, so that workers who failed together do
    not come back together.
    """

    attempts: int = 8
    first_wait_s: float = 0.2
    longest_wait_s: float = 20.0


PATIENT = Patience()


def persistently(
    call: Callable[[], Result], is_passing: Callable[[BaseException], bool], patience: Patience
) -> Result:
    """What the call gives once it succeeds; its last error when patience is at an end."""
    retrying = Retrying(
        stop=stop_after_attempt(patience.attempts),
        wait=wait_random_exponential(multiplier=patience.first_wait_s, max=patience.longest_wait_s),
        retry=retry_if_exception(is_passing),
        before_sleep=before_sleep_log(logger, logging.INFO),
        reraise=True,
    )
    return retrying(call)
