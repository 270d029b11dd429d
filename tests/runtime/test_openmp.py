"""Threads sleep at barriers, unless the user says otherwise."""

from __future__ import annotations

import pytest

from pipeline.runtime.openmp import PASSIVE, wait_passively


def test_threads_sleep_at_barriers() -> None:
    environment: dict[str, str] = {"OMP_NUM_THREADS": "1"}
    wait_passively(environment)
    assert environment == {"OMP_NUM_THREADS": "1", **PASSIVE}


@pytest.mark.parametrize("name", PASSIVE)
def test_a_user_s_own_setting_is_kept_alone(name: str) -> None:
    environment = {name: "7"}
    wait_passively(environment)
    assert environment == {name: "7"}
