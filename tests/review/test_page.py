"""The page in a browser: by keyboard, at two widths, through a crash, for two people at once."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsers import fits_into_its_window, opened_browser, serious_findings, take_picture
from gold_lines import lines
from reviews import Corpus, task_of
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.review.server import listen, serve

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@contextmanager
def review(file: Path, kind: str = "choice") -> Iterator[tuple[Any, str]]:
    """The process of a review, and the address of its page."""
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "support")))
    process = subprocess.Popen(
        [sys.executable, __file__, str(file), kind],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()
        assert process.wait(timeout=60) in (0, -9)
        process.stdout.close()


class Reader:
    """A person at the page, who uses only the keyboard."""

    def __init__(self, browser: webdriver.Chrome, corpus: Corpus) -> None:
        self.browser, self.corpus = browser, corpus

    def text(self, name: str) -> str:
        return str(self.browser.find_element(By.ID, name).get_attribute("textContent"))

    def press(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def wait(self, until: Any) -> None:
        WebDriverWait(self.browser, 30, poll_frequency=0.02).until(lambda _: until())

    def opens(self, address: str, name: str | None = None) -> None:
        self.browser.get(address)
        if name is not None:
            self.wait(lambda: self.browser.find_element(By.ID, "name").is_displayed())
            self.press(name, Keys.ENTER)
        self.wait(lambda: self.text("text"))

    def row(self) -> int:
        return int(re.findall(r"\d+", self.text("text"))[0])

    def acts(self, *keys: str) -> int:
        """Presses the keys for the document that is open; returns its row."""
        row = self.row()
        self.press(*keys)
        self.wait(
            lambda: self.browser.find_element(By.ID, "closed").is_displayed() or self.row() != row
        )
        return row

    def labels(self) -> int:
        """Presses the key of the true label."""
        names = list(self.corpus.task.labels)
        return self.acts(str(names.index(self.corpus.label(self.row())) + 1))


def test_a_hundred_rows_by_keyboard_with_a_kill_lose_nothing(tmp_path: Path) -> None:
    file, corpus = tmp_path / "gold.jsonl", Corpus(task_of())
    with opened_browser() as browser:
        browser.set_window_size(1_280, 900)
        reader = Reader(browser, corpus)
        with review(file) as (process, address):
            browser.get(address)
            reader.wait(lambda: reader.text("asked") == "Who labels tone?")
            assert reader.text("what") == "Is it rude? toxic · clean"
            take_picture(browser, "review-start")
            reader.opens(address, "Ann")
            reader.press("9")
            reader.wait(lambda: reader.text("message") == "There is no label 9.")
            blur = "return getComputedStyle(document.getElementById('text')).filter"
            assert browser.execute_script(blur) == "blur(7px)"
            take_picture(browser, "review-blurred")
            reader.press("b")
            assert browser.execute_script(blur) == "none"
            rows = [reader.labels() for _ in range(50)]
            process.kill()
            process.wait()
            reader.press("1")
            reader.wait(lambda: "does not answer" in reader.text("error"))
        assert len(lines(file)) == 50
        with review(file) as (_, address):
            reader.opens(address)  # — at another port, but the name and the blur are remembered
            assert browser.execute_script(blur) == "none"
            rows += [reader.labels() for _ in range(48)]
            skipped, flagged = reader.acts("s"), reader.acts("f")
            reader.acts("u")
            assert reader.row() == flagged
            rows += [reader.labels() for _ in range(2)]
            reader.wait(lambda: reader.text("labelled") == "100 of 100")
            for width, name in ((1_280, "wide"), (400, "narrow")):
                browser.set_window_size(width, 900)
                assert fits_into_its_window(browser)
                assert serious_findings(browser) == []
                assert browser.find_elements(By.TAG_NAME, "kbd")[0].is_displayed() == (width > 400)
                take_picture(browser, f"review-{name}")
            scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            assert serious_findings(browser) == []
            take_picture(browser, "review-dark")
        errors = [e["message"] for e in browser.get_log("browser") if "favicon" not in e["message"]]
    assert all("ERR_CONNECTION_REFUSED" in error for error in errors), errors
    assert len({*rows}) == 100 and skipped not in rows
    answers = [line for line in lines(file) if line["action"] == "label"]
    assert [(line["doc_id"], line["label"]) for line in answers] == [
        (f"d{row}", corpus.label(row)) for row in rows
    ]
    assert {line["by"] for line in answers} == {"Ann"}


def test_several_labels_are_marked_by_keys_and_saved_by_enter(tmp_path: Path) -> None:
    file, corpus = tmp_path / "gold.jsonl", Corpus(task_of("multi"))
    with opened_browser() as browser, review(file, "multi") as (_, address):
        reader = Reader(browser, corpus)
        reader.opens(address, "Ann")
        expected = []
        for keys, label in (("2", ["art"]), ("21", ["law", "art"]), ("", []), ("112", ["art"])):
            row = reader.acts(*keys, Keys.ENTER)
            expected.append((f"d{row}", label))
        assert serious_findings(browser) == []
        take_picture(browser, "review-multi")
    assert [(line["doc_id"], line["label"]) for line in lines(file)] == expected


def test_two_people_at_once_get_different_rows(tmp_path: Path) -> None:
    file, corpus = tmp_path / "gold.jsonl", Corpus(task_of())
    with opened_browser() as one, opened_browser() as other, review(file) as (_, address):
        readers = {name: Reader(each, corpus) for name, each in (("Ann", one), ("Bob", other))}
        for name, reader in readers.items():
            reader.opens(address, name)
        rows = [reader.labels() for _ in range(10) for reader in readers.values()]
        assert readers["Bob"].text("own") == "10 of them yours"
    assert len({*rows}) == 20
    assert [line["by"] for line in lines(file)] == ["Ann", "Bob"] * 10


def serve_toys(file: Path, kind: str) -> None:
    """A review of toy documents; the address of the page is the only line on standard output."""
    host = "127.0.0.1"
    with Corpus(task_of(kind)).session(file) as session:
        own = listen(host, None)
        show = lambda address: print(address, flush=True)  # noqa: E731
        asyncio.run(serve(session, own, host=host, command="assay fit", announce=show))


if __name__ == "__main__":
    serve_toys(Path(sys.argv[1]), sys.argv[2])
