"""A person at a terminal: types lines into a shell, and sees what they print.

Entry point: `Person`. Nothing of assay is imported: only its commands are used.
"""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
COMMENTS = REPOSITORY / "jobs/corpus/source/toxicity_en.csv"
# What is meant for the developers of assay or of Ray.
NOT_FOR_PEOPLE = re.compile(
    r"Traceback|\b(raylet|gcs_server)\b|\bray[.:/]|\(pid=|\bWARNING\b|Warning:|Failed to load"
    r"|^[EWI]\d{4} |^\[.*\d [EWI] \d+"
)
# Variables that tests set, and that no person has.
_OF_TESTS = ("RAY_", "OMP_", "ASSAY_", "PYTEST_", "COV_", "HYPOTHESIS_", "AWS_")


@dataclass(frozen=True)
class Output:
    """What one line printed."""

    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """All of it, as on a terminal."""
        return self.out + self.err


@dataclass(frozen=True)
class Person:
    """Somebody in a folder, whose home and programs are those of the environment."""

    folder: Path
    home: Path
    programs: Path = Path(sys.executable).parent
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a login shell has, and assay's programs."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_TESTS)}
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "HOME": str(self.home), "PATH": path, "COLUMNS": "160", **self.variables}

    def types(self, line: str, *, code: int = 0) -> Output:
        """Runs the line; its exit code is `code`, and nothing of it is for developers."""
        began = time.monotonic()
        ended = subprocess.run(
            ["bash", "-uc", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        output = Output(ended.stdout, ended.stderr, time.monotonic() - began)
        print(f"$ {line}\n{output.text}[{output.seconds:.1f} s]\n")
        assert ended.returncode == code, f"{line}: exit code {ended.returncode}\n{output.text}"
        assert not [line for line in output.text.splitlines() if NOT_FOR_PEOPLE.search(line)]
        return output

    @contextmanager
    def runs_beside(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """The line in another terminal, where it is ended with the block; its output is a file."""
        with (self.folder / f"log-{len(list(self.folder.glob('log-*')))}").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-uc", f"exec {line}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            ended = process.poll() is not None
            children = [] if ended else psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(timeout=60)
            _, left = psutil.wait_procs(children, timeout=20)
            for each in left:
                each.kill()

    def kills(self, line: str, *, once: Callable[[], object]) -> None:
        """Types the line, and kills it with -9 as soon as `once` is true."""
        with self.runs_beside(line) as process:
            deadline = time.monotonic() + 300
            while not once():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.kill()

    def writes(self, name: str, text: str) -> None:
        """Makes or replaces a file."""
        (self.folder / name).write_text(text)

    def edits(self, name: str, *changes: tuple[str, str]) -> None:
        """Replaces passages of a file, each of which it has once."""
        text = (self.folder / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, (name, before, text)
            text = text.replace(before, after)
        self.writes(name, text)

    def writes_csv(self, name: str, rows: Iterable[Mapping[str, str]]) -> None:
        """Makes a CSV file; its header is the keys of the first row."""
        first, *others = rows
        with (self.folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(first))
            writer.writeheader()
            writer.writerows([first, *others])

    def reads_csv(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file."""
        with (self.folder / name).open(newline="") as file:
            return list(csv.DictReader(file))


def comments(count: int, *, start: int = 0) -> list[dict[str, str]]:
    """Comments with the labels that people gave: `id`, `text`, and `toxic`: toxic or clean."""
    with COMMENTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    random.Random(0).shuffle(rows)  # — the file has all toxic ones first
    rows = rows[start : start + count]
    assert len(rows) == count
    return [
        {
            "id": f"c{start + number}",
            "text": row["text"],
            "toxic": "toxic" if row["is_toxic"] == "Toxic" else "clean",
        }
        for number, row in enumerate(rows)
    ]
