"""A simulated person at the page of a review. Entry points: `address_in` and `Annotator`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen


def address_in(log: Path) -> str:
    """The page's address, once the review has printed it."""
    deadline = time.monotonic() + 300
    while (match := re.search(r"assay: open (\S+)", log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return match[1]


class Annotator:
    """A simulated person with the labels, whose page sends what a browser sends."""

    def __init__(self, address: str, truth: dict[str, str]) -> None:
        self.root, _, self.token = address.partition("?token=")
        self.truth = truth
        self.view = self.sends("next")

    def sends(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"X-Review-Token": self.token, "Content-Type": "application/json"}
        sent = json.dumps({"by": "ann", **body}).encode()
        with urlopen(Request(self.root + path, sent, headers), timeout=60) as reply:
            return dict(json.load(reply))

    def labels(self, times: int) -> None:
        for _ in range(times):
            row = self.view["row"]
            label = self.truth[row["text"]]
            self.view = self.sends("answer", id=row["id"], action="label", label=label)
