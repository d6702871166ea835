"""How quick the tour is in Chromium: `python benchmarks/tour.py [--rounds 5] [--json]`.

Milliseconds from the navigation to the first figure (the text as tokens), from a click on a head of the first layer to
the new loss on the screen (all four layers are computed again, but for what the heads of the first layer see), and from
a click on "price every head" to the last price. WebAssembly and plain JavaScript; the CPU as it is, and throttled to a
quarter by Chromium. Each round opens the page anew. Needs Playwright and a Chromium of the system (`pip install
playwright`, `apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from rich.table import Table

from headwise import models, tour

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
WINDOW = {"width": 1280, "height": 900}
ENGINES = {"WebAssembly": "", "plain JavaScript": "#engine=js"}
SLOWDOWNS = (1, 4)
SECONDS = 20.0
STEPS = ("open", "control", "price")

FIRST_FIGURE = """(() => {
  const look = () => (document.querySelector("#tokens .token")
    ? requestAnimationFrame(() => (window.firstFigure = performance.now())) : requestAnimationFrame(look));
  requestAnimationFrame(look);
})()"""
CLICKED = """([click, done]) => new Promise((go) => {
  const start = performance.now();
  const look = () => (document.querySelector(done) ? requestAnimationFrame(() => go(performance.now() - start))
    : requestAnimationFrame(look));
  document.querySelector(click).click();
  look();
})"""
CONTROL = ('#switches [data-item="0.7"]', "#bar-more.worse, #bar-more.better")
PRICE = ("#price", "#price:not(:disabled)")


def measure_round(browser: Browser, path: Path, address: str, slowdown: int) -> dict[str, float]:
    """Milliseconds of each step, in a page of its own."""
    context = browser.new_context(viewport=WINDOW, reduced_motion="reduce")  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(600_000)
        page.add_init_script(FIRST_FIGURE)
        context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
        page.goto(path.as_uri() + address)
        page.wait_for_selector("#tokens .token")
        page.locator("#off").scroll_into_view_if_needed()
        settled = ""
        while settled != (now := page.evaluate("document.documentElement.dataset.settled ?? ''")) or not settled:
            settled = now
            page.wait_for_timeout(1000)
        opened = page.evaluate("window.firstFigure")
        control = page.evaluate(CLICKED, list(CONTROL))
        page.wait_for_timeout(500)
        price = page.evaluate(CLICKED, list(PRICE))
        return {"open": opened, "control": control, "price": price}
    finally:
        context.close()


def measure(browser: Browser, path: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each engine and slowdown."""
    rows = []
    for engine, address in ENGINES.items():
        for slowdown in SLOWDOWNS:
            load, start, times = os.getloadavg()[0], time.monotonic(), []
            while len(times) < rounds and (not times or time.monotonic() - start < SECONDS):
                times.append(measure_round(browser, path, address, slowdown))
            by_step = {step: [one[step] for one in times] for step in STEPS}
            figures = {step: {"median_ms": statistics.median(ms), "min_ms": min(ms)} for step, ms in by_step.items()}
            row = {"engine": engine, "slowdown": slowdown, "rounds": len(times), "load": [load, os.getloadavg()[0]]}
            rows.append({**row, "steps": figures})
            print(f"{engine}, {slowdown}x: {len(times)} rounds", file=sys.stderr)
    return rows


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    title = f"ms, median (least); {machine['cpu']}, {machine['cores']} cores, {machine['browser']}"
    grid = Table("engine", "CPU", "open", "a control", "price all heads", "rounds", "load", title=title)
    for row in report["results"]:
        cells = [f"{row['steps'][step]['median_ms']:,.0f} ({row['steps'][step]['min_ms']:,.0f})" for step in STEPS]
        load = "-".join(f"{x:.1f}" for x in row["load"])
        grid.add_row(row["engine"], f"1/{row['slowdown']}", *cells, str(row["rounds"]), load)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    table.add_delivery(parser)
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        sys.exit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder, "tour.html")
        path.write_text(tour.render(tour.read(models.tiny_path()), models.default_text(), packaged=True))
        browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        machine = clock.machine() | {
            "browser": f"Chromium {browser.version}",
            "playwright": version("playwright"),
            "page_bytes": path.stat().st_size,
        }
        report = {"machine": machine, "results": measure(browser, path, options.rounds)}
        browser.close()
    table.deliver(report, print_table, options, "tour")


if __name__ == "__main__":
    main()
