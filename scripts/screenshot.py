"""Take the pictures of the report that the README and the docs show: the packaged model on its default text.

    pip install playwright pillow && apt-get install chromium
    python scripts/screenshot.py                    # docs/images/report.png and report-dark.png
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
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1440, 1150
LARGEST = 300_000
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--font-render-hinting=none",
    "--disable-lcd-text",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="a report to take instead of a fresh one")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or Path(folder, "report.html")
        if arguments.report is None:
            subprocess.run([sys.executable, "-m", "headwise", "look", "--out", str(report)], check=True)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
            for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
                shoot(browser, report, scheme, arguments.out / name)
            browser.close()


def shoot(browser: Browser, report: Path, scheme: str, picture: Path) -> None:
    """One picture of the first screen, as a reader of that colour scheme sees it."""
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT}, offline=True, device_scale_factor=1
    )
    page = context.new_page()
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("html[data-ready]")
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture)
    context.close()
    Image.open(picture).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE).save(picture, optimize=True)
    size = picture.stat().st_size
    print(f"{picture}: {size:,} bytes")
    if size > LARGEST:
        sys.exit(f"a picture in the repository stays below {LARGEST:,} bytes; make the window smaller")


if __name__ == "__main__":
    main()
