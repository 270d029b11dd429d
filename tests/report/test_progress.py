"""A log gets one line at first, then one every half minute, and one at the end."""

from __future__ import annotations

import logging

import pytest

from pipeline.report.console import LOG_INTERVAL_S, logged_progress


def test_a_log_is_told_rarely_and_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock_s = [0.0]
    caplog.set_level(logging.INFO)
    advance = logged_progress(100, now_s=lambda: clock_s[0])
    for clock_s[0], rows in (
        (1.0, 10),
        (2.0, 10),
        (1.0 + LOG_INTERVAL_S, 10),
        (33.0, 60),
        (34.0, 10),
    ):
        advance(rows)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "10 of 100 documents labelled",
        "30 of 100 documents labelled",
        "100 of 100 documents labelled",
    ]
