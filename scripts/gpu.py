"""Run on a machine with an NVIDIA GPU: the tests marked `gpu`, then timings beside PyTorch's own kernels.

    python scripts/gpu.py [--skip-tests] [--only REGEX] [--rounds 20] [--tune] [--out benchmarks/results]

Needs torch for CUDA, jaxtyping, lazy-loader and pytest; the tests of models need transformers too. Without a GPU it
says so in one line and ends with code 2. The ways of doing one thing take turns, round after round, each after the L2
cache was overwritten; a way that fails leaves its error in the row. Rows go to `gpu-CARD-DATE.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import gpu_cases  # noqa: E402
import gpu_models  # noqa: E402
from gpu_cases import Case, Run, Sizes  # noqa: E402

import headwise  # noqa: E402
from headwise.ops.triton import launch  # noqa: E402

L2 = 256 << 20
"""Bytes that are overwritten before each timed call: more than any card's L2 cache."""
Clock = Callable[[Run], float]
"""Runs a function once and returns its milliseconds."""


def on_card(run: Run) -> float:
    """Milliseconds of one call by CUDA events, with a cold L2 cache."""
    _cold().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@cache
def _cold() -> Tensor:
    return torch.empty(L2, dtype=torch.int8, device="cuda")


def measure(case: Case, rounds: int, clock: Clock) -> dict[str, Any]:
    """One row: median and quartiles of each way in milliseconds, or the error that it ended with."""
    row: dict[str, Any] = {"case": case.name, "bytes": case.bytes, "flops": case.flops, "ways": {}}
    runs: dict[str, Run] = {}
    for name, make in case.ways.items():
        try:
            run = make()
            for _ in range(3):
                clock(run)
            runs[name] = run
        except Exception as error:  # a peer that the card or this torch lacks, or no memory left for it
            row["ways"][name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(clock(run))
    for name, all_of_them in times.items():
        low, middle, high = statistics.quantiles(all_of_them, n=4) if rounds > 1 else all_of_them * 3
        row["ways"][name] = {"median_ms": middle, "q25_ms": low, "q75_ms": high}
    return row


def cases(sizes: Sizes) -> Iterator[Case]:
    """All rows of the table."""
    yield from gpu_cases.cases(sizes)
    yield from gpu_models.cases(sizes)


ROWS, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3)


def tuned(sizes: Sizes, rounds: int, clock: Clock) -> list[dict[str, Any]]:
    """Rows of each kernel and head dim: a way for each shape that a program may have, the one in use first.

    Nothing is written to `shapes.json`: whoever has the card compares the rows and edits it.
    """
    rows = []
    for kernel, dim in ((kernel, dim) for kernel in ("attend", "statistics", "decode") for dim in (64, 128, 256)):
        n = 8192 // sizes.divisor
        of = sizes._replace(D=min(dim, sizes.D) if sizes.divisor > 1 else dim)
        run, used = gpu_cases.of_kernel(of, kernel, n), launch.shape_of(kernel, dim, torch.device("cuda"))
        drawn = [(*used[:-2], *rest) for rest in itertools.product(WARPS, STAGES)]
        if kernel != "decode":
            drawn = [(rows_of, *rest) for rows_of in ROWS for rest in itertools.product(WARPS, STAGES)]
        shapes = [used, *(shape for shape in drawn if shape != used)]
        ways = {str(list(shape)): partial(gpu_cases.with_shape, run, shape) for shape in shapes}
        rows.append(measure(Case(f"{kernel}, head dim {dim}", 0, 0, ways), rounds, clock))
        show(rows[-1])
    return rows


def environment() -> dict[str, Any]:
    """The card and the versions that the numbers belong to."""
    card = torch.cuda.get_device_properties(0)
    try:
        import triton

        of_triton = triton.__version__
    except ImportError:
        of_triton = None
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_bytes": card.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": of_triton,
        "headwise": headwise.__version__,
    }


def run_tests() -> dict[str, Any]:
    """Run the tests marked `gpu` in a process of their own; how it ended, and pytest's last line."""
    files = sorted(str(path) for path in ROOT.glob("tests/*/test_cuda*.py"))
    # The tests of the Triton kernels have no mark: they run in Triton's interpreter elsewhere, and here on the card.
    kernels = sorted(str(path) for path in ROOT.glob("tests/ops/test_triton*.py"))
    started = time.time()
    summaries, code = [], 0
    for chosen in (["-m", "gpu", *files], kernels):
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *chosen]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(ended.stdout[-8000:], ended.stderr[-2000:])
        summaries.append((ended.stdout.strip().splitlines() or [""])[-1])
        code = code or ended.returncode
    return {"code": code, "summary": "; ".join(summaries), "seconds": round(time.time() - started)}


def show(row: dict[str, Any]) -> None:
    """Print a row: each way, and its rate against memory and arithmetic."""
    print(row["case"])
    for name, way in row["ways"].items():
        if "error" in way:
            print(f"  {name:24s} {way['error']}")
            continue
        seconds = way["median_ms"] / 1e3
        rates = f"{row['bytes'] / seconds / 1e12:6.2f} TB/s  {row['flops'] / seconds / 1e12:7.1f} TFLOP/s"
        print(f"  {name:24s} {way['median_ms']:10.3f} ms  {rates}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-tests", action="store_true", help="timings alone")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each case")
    parser.add_argument("--tune", action="store_true", help="time shapes of the kernels' programs, for shapes.json")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was tested or measured", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": environment()}
    print(" ".join(f"{name}={value}" for name, value in report["machine"].items()))
    if not options.skip_tests:
        report["tests"] = run_tests()
    report["results"] = []
    with torch.no_grad():
        for case in cases(Sizes()):
            if re.search(options.only, case.name):
                report["results"].append(measure(case, options.rounds, on_card))
                show(report["results"][-1])
                torch.cuda.empty_cache()
        if options.tune:
            report["shapes"] = tuned(Sizes(), options.rounds, on_card)
    name = re.sub(r"[^a-z0-9]+", "-", report["machine"]["card"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-{name}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf8")
    print(f"rows: {path}")
    return int(report.get("tests", {}).get("code", 0) != 0)


if __name__ == "__main__":
    sys.exit(main())
