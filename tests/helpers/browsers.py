"""A report, or the tour, opened in the system's Chromium, and all that it did there that a report may not do.

Needs Playwright (from PyPI) and a Chromium of the system; Playwright's own browser is never downloaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwise import report
from headwise.look import Look

# The first has no window, and opens a page in half of the time.
NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
]

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium-headless-shell)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Playwright's own pipes
]


@contextmanager
def launched() -> Iterator[Any]:
    """A browser, to be shared by the tests of a file."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


class Page:
    """A file that is open, and all that it did that a page of ours may not do."""

    def __init__(self, browser: Any, path: Path, address: str = "", *, ready: bool = True, **options: Any) -> None:
        self.faults: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **options})
        self.page = page = self.context.new_page()
        page.on("console", lambda m: self.faults.append(f"console {m.type}: {m.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        page.on(
            "request", lambda r: r.url.partition("#")[0] == path.as_uri() or self.faults.append(f"request: {r.url}")
        )
        page.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation', "
            "(e) => window.violations.push(`${e.violatedDirective} ${e.blockedURI}`));"
        )
        page.goto(path.as_uri() + address)
        if ready:
            page.wait_for_selector("html[data-ready]", timeout=60_000)

    def check_calm(self) -> None:
        """Nothing was said, asked, fetched or blocked; no address but the file's own."""
        assert self.page.evaluate("window.violations") == []
        assert self.faults == []
        assert self.page.url.startswith("file://")


def until(page: Any, condition: str) -> None:
    """Waits for a condition; Playwright's own wait compiles a string, which the page's policy forbids."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {condition}")


class Opened(Page):
    """A page with a report in it."""

    def __init__(self, browser: Any, look: Look, folder: Path, **options: Any) -> None:
        path = folder / "report.html"
        report.write(look, path)
        super().__init__(browser, path, **options)
