"""Times `headwise.attention` beside torch's own: `python benchmarks/attention.py [--only causal] [--fold]`.

Ways of doing the same thing take turns (A B C A B C ...), so that a machine's moods hit all alike; a row gives each
way's median and quartiles. Results go to benchmarks/results/<date>-attention.json with the machine and the versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import headwise

try:
    from benchmarks.registry import CASES, FOLD, Case
except ImportError:  # run as a script: this folder is on the path, its parent is not
    from registry import CASES, FOLD, Case  # type: ignore[import-not-found,no-redef]

RESULTS = Path(__file__).parent / "results"


def measure(case: Case, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every run, by way; at least five turns, then until the time is up."""
    ways = case.ways()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def summary(times: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "q25_ms": low, "q75_ms": high, "min_ms": min(times), "runs": len(times)}


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing of where the files lie."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "headwise": headwise.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def row(case: Case, seconds: float) -> dict[str, Any]:
    q, k, v = case.inputs()
    told = headwise.explain(q, k, v, mask=case.mask())
    ways = {name: summary(times) for name, times in measure(case, seconds).items()}
    return {"case": case.name, "sizes": [case.B, case.H, case.K, case.T, case.S, case.D], "mask": case.kind,
            "dtype": case.dtype, "backward": case.backward, "backend": told.backend, "ways": ways}  # fmt: skip


def line(result: dict[str, Any]) -> str:
    ways = {name: numbers["median_ms"] for name, numbers in result["ways"].items()}
    ours = ways["headwise"]
    others = "".join(f"  {name} {ms:9.3f} ms ({ms / ours:5.2f}x)" for name, ms in ways.items() if name != "headwise")
    return f"{result['case']:20} {result['backend']:10} headwise {ours:9.3f} ms{others}"


def main() -> None:
    """Print the table and write the file."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--only", default="", help="cases whose name contains this")
    ask.add_argument("--fold", action="store_true", help="the grid that decides where group folding pays")
    ask.add_argument("--seconds", type=float, default=2.0, help="time for each case")
    ask.add_argument("--no-file", action="store_true", help="print only")
    given = ask.parse_args()
    results = []
    print(f"(nx) = how many times as long as headwise; {machine()['cpu']}, {torch.get_num_threads()} thread(s)")
    for case in FOLD if given.fold else CASES:
        if given.only in case.name:
            results.append(row(case, given.seconds))
            print(line(results[-1]), flush=True)
    if not given.no_file:
        RESULTS.mkdir(exist_ok=True)
        name = f"{datetime.date.today().isoformat()}-attention{'-fold' if given.fold else ''}.json"
        (RESULTS / name).write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
