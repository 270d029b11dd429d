"""Runs the demo's command twice, and checks what a person sees: the figures, and nothing of Ray.

    python3 .ci/demo.py make demo

The environment is the caller's. Prints what the demo prints. Exit code 1 names each broken promise.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path("out/demo.html")
# Task, figure of the table (0: accuracy, 1: AUROC), and the least value.
LEAST = (("toxic", 1, 0.95), ("spam", 1, 0.95), ("language", 0, 0.97))
UNWANTED = re.compile(
    r"Traceback|\b(raylet|gcs_server)\b|\bray[.:/]|\(pid=|WARNING|^[EWI]\d{4} |^\[.*\d [EWI] \d+"
)
RESULTS = "The answers against gold labels"  # the results begin here
FIGURE = r"(\d\.\d{3}) \(\d\.\d{3} to \d\.\d{3}\)"


def main() -> int:
    first, problems = run_demo()
    problems += [
        f"{task}: the {'AUROC' if number else 'accuracy'} is not printed, or below {least}"
        for task, number, least in LEAST
        if (value := figure(first, task, number)) is None or value < least
    ]
    if not problems:
        second, problems = run_demo()
        if not re.search(r"^labelled now +0;", second, re.M):
            problems.append("the second run does not print that it labelled nothing")
        if first.partition(RESULTS)[2] != second.partition(RESULTS)[2]:
            problems.append("the second run prints other results")
    for problem in problems:
        print(f".ci/demo.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run_demo() -> tuple[str, list[str]]:
    """What the demo printed, which is printed here too, and what is wrong with it."""
    began = time.monotonic()
    process = subprocess.Popen(
        sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = process.wait()
    print(
        f".ci/demo.py: {shlex.join(sys.argv[1:])} took {time.monotonic() - began:.0f} s", flush=True
    )
    problems = [f"{shlex.join(sys.argv[1:])} ended with {code}"] if code else []
    # — before the demo's first line, pip and make print what they like
    starts = [place for place, line in enumerate(lines) if "-m jobs.demo" in line]
    own = lines[starts[-1] + 1 :] if starts else lines
    problems += [
        f"a line that is not for people: {line!r}" for line in own if UNWANTED.search(line)
    ]
    problems += [f"there is no {PAGE}"] * (not PAGE.exists())
    return "".join(own), problems


def figure(output: str, task: str, number: int) -> float | None:
    """The figure of the task in the table of answers."""
    row = re.search(rf"^ *{task} +.*?{FIGURE} +{FIGURE} ", output, re.M)
    return float(row[number + 1]) if row else None


if __name__ == "__main__":
    sys.exit(main())
