"""A real browser for tests: the machine's own chromium, without a window."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SIZE = (1280, 1330)
KEEP = os.environ.get("LOCKSTEP_SCREENSHOTS")
"""Directory for screenshots; unset: the test's own, of which pytest keeps the last three."""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A selenium driver. Skips the test where there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests run as root in containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        f"--window-size={SIZE[0]},{SIZE[1]}",
    ):
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        found.set_page_load_timeout(60)
        found.set_script_timeout(60)
        yield found
    finally:
        found.quit()


def screenshot(driver: Any, directory: Path, name: str) -> Path:
    """The page as it stands, as a PNG."""
    place = Path(KEEP) if KEEP else directory
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{name}.png"
    assert driver.save_screenshot(str(file))
    return file
