"""A headless browser for tests of pages. Entry points: `opened_browser` and `serious_findings`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_core_python.selenium import Axe
from selenium import webdriver

# A headless browser of a user who may be root, which asks no server for anything.
CHROMIUM = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def opened_browser() -> Iterator[webdriver.Chrome]:
    """Chromium with a profile of its own; the test is skipped without it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium; the Debian packages chromium and chromium-driver have it")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in CHROMIUM:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as opened:
        yield opened


def serious_findings(browser: webdriver.Chrome) -> list[str]:
    """What axe-core finds on the page that keeps people from using it."""
    checked = Axe().run(browser, options={"runOnly": ["wcag2a", "wcag2aa", "best-practice"]})
    return [v["id"] for v in checked["violations"] if v["impact"] in ("serious", "critical")]


def fits_into_its_window(browser: webdriver.Chrome) -> bool:
    """Whether the page needs no scrolling to the side."""
    inside, needed = browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth]"
    )
    return bool(needed <= inside)


def take_picture(browser: webdriver.Chrome, name: str) -> None:
    """A picture of the window in the folder ASSAY_PICTURES, if it is set."""
    if folder := os.environ.get("ASSAY_PICTURES"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))
