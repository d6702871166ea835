"""Take the pictures of the report and the tour for the README and the docs: the packaged model on its default text.

    pip install playwright pillow && apt-get install chromium
    python scripts/screenshot.py                    # docs/images: report.png, report-dark.png and tour.png
    python scripts/screenshot.py --tour             # tour.png alone
    python scripts/screenshot.py --report mine.html --out /tmp/pictures

Playwright drives the system's Chromium; its own browser is not downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
REPORT_WINDOW = {"width": 1440, "height": 1150}
TOUR_WINDOW = {"width": 1180, "height": 800}
LARGEST = 300_000
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--font-render-hinting=none",
    "--disable-lcd-text",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--report", type=Path, help="a report to take instead of a fresh one; no picture of the tour")
    chosen.add_argument("--tour", action="store_true", help="take the tour alone")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    arguments = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        if not arguments.tour:
            report = arguments.report or written("look", Path(folder, "report.html"))
            for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
                page = opened(browser, report, scheme, REPORT_WINDOW)
                shoot(page, arguments.out / name)
        if arguments.report is None:
            page = opened(browser, written("tour", Path(folder, "tour.html")), "light", TOUR_WINDOW)
            switch_off(page)
            shoot(page, arguments.out / "tour.png")
        browser.close()


def written(command: str, file: Path) -> Path:
    """A fresh page by `headwise look` or `headwise tour`."""
    subprocess.run([sys.executable, "-m", "headwise", command, "--out", str(file)], check=True)
    return file


def opened(browser: Browser, file: Path, scheme: str, window: dict[str, int]) -> Page:
    """The file's first screen, as a reader of that colour scheme sees it."""
    context = browser.new_context(color_scheme=scheme, viewport=window, offline=True, device_scale_factor=1)
    page = context.new_page()
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


def switch_off(page: Page) -> None:
    """Section 6 of the tour with its dearest head off and all others priced again."""
    page.click("#off-best")
    page.wait_for_selector('#off-said:has-text("31 of 32 heads are on")')
    page.click("#price")
    page.wait_for_selector("#price:enabled")
    page.evaluate(
        "scrollBy({ top: document.querySelector('#price').getBoundingClientRect().top - 435, behavior: 'instant' })"
    )
    page.wait_for_timeout(500)  # the section's figures are drawn when it comes into view


def shoot(page: Page, picture: Path) -> None:
    """Write the picture of what the window shows, and close it."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture)
    page.context.close()
    Image.open(picture).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE).save(picture, optimize=True)
    size = picture.stat().st_size
    print(f"{picture}: {size:,} bytes")
    if size > LARGEST:
        sys.exit(f"a picture in the repository stays below {LARGEST:,} bytes; make the window smaller")


if __name__ == "__main__":
    main()
