"""A second Ctrl-C, or another signal after it, changes nothing: the exit code is 3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

STOPPED = """
import os, signal, sys, time
from cyclopts import App
from pipeline.cli.app import call, new_app
app = new_app("assay", "")
@app.command
def work():
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:  # the end of a Ray takes seconds
        ends = time.monotonic() + .8
        while time.monotonic() < ends:
            time.sleep(.05)
        print("ended in order", flush=True)
code = call(app, ["work"])
time.sleep(.5)  # what Python does at the end
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("first", "second", "pause_s"),
    [
        (signal.SIGINT, signal.SIGINT, 0.1),
        (signal.SIGINT, signal.SIGINT, 1.0),
        (signal.SIGTERM, signal.SIGINT, 0.5),
        (signal.SIGHUP, signal.SIGTERM, 0.1),
    ],
)
def test_two_signals_end_a_command_as_one_does(
    first: signal.Signals, second: signal.Signals, pause_s: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    process.send_signal(first)
    time.sleep(pause_s)
    process.send_signal(second)
    shown, errors = process.communicate(timeout=60)
    assert (process.returncode, shown) == (3, "ended in order\n"), errors
    assert errors == "assay: stopped; to continue, run: assay work\n"
