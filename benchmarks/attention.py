"""Times `headwise.attention` beside the machine's limits and other libraries: the table of `make bench`.

    python benchmarks/attention.py [--only PATTERN] [--rounds 7] [--budget 360] [--json] [--set table|fold|avx2]

Ways of doing the same thing take turns (A B C A B C ...), so that a change in the machine's speed affects all of them
alike; the limits (multiply-adds of all threads, reads of the same buffers) take turns with them. Without --only,
results go to benchmarks/results/<date>-attention.json with the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

import headwise

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, limits, table, ways
from benchmarks.registry import AVX2, CASES, FOLD, Case, Mark

SETS = {"table": CASES, "fold": FOLD, "avx2": AVX2}
Row = dict[str, Any]


def probes(case: Case, inputs: ways.Inputs) -> dict[str, clock.Probe]:
    """The limits to be measured with the case: arithmetic, and for a single query also reading."""
    if case.backward:
        return {}
    _, k, v = inputs
    chosen: dict[str, clock.Probe] = {"arithmetic": partial(limits.arithmetic, case.dtype)}
    if case.T == 1:
        chosen["reading"] = partial(limits.reading, (k,) if case.V else (k, v))
    return chosen


def limit_of(case: Case, rounds: clock.Rounds) -> dict[str, Any] | None:
    """What bounds the case, and headwise's part of it: median over the rounds of least time / our time."""
    needs = {"arithmetic": (case.flops(), "GF/s"), "reading": (case.bytes_read(), "GB/s")}
    rates = {name: [x for x in values if x] for name, values in rounds.limits.items()}
    if not rates or not all(rates.values()):
        return None
    least = {name: needs[name][0] / statistics.median(values) for name, values in rates.items()}
    bound = max(least, key=lambda name: least[name])
    amount, unit = needs[bound]
    pairs = zip(rounds.limits[bound], rounds.seconds["headwise"], strict=True)
    return {
        "by": bound if bound == "reading" else limits.operation(case.dtype).removesuffix("_rate"),
        "unit": unit,
        "rate": statistics.median(rates[bound]) / 1e9,
        "reached": amount / rounds.median("headwise") / 1e9,
        "part": statistics.median(amount / rate / ours for rate, ours in pairs if rate and ours),
    }


def judged(mark: Mark, limit: dict[str, Any] | None, ratios: dict[str, float]) -> dict[str, Any]:
    """A mark with the value that was reached; `met` is None where it could not be measured."""
    value = limit and limit["part"] if mark.of == "limit" else ratios.get(mark.of)
    met = None if value is None else value >= mark.must
    return {"of": mark.of, "must": mark.must, "aim": mark.aim, "value": value, "met": met}


def row(case: Case, rounds: int, seconds: float) -> Row:
    """Measure one case."""
    line = ways.lineup(case)
    with torch.set_grad_enabled(case.backward):
        choice = headwise.explain(*line.inputs, mask=case.mask())
        times = clock.measure(line.runs, probes(case, line.inputs), rounds, seconds)
    limit = limit_of(case, times)
    ratios = {name: times.ratio(name, "headwise") for name in line.runs if name != "headwise"}
    return {
        "case": case.name,
        "regime": case.regime,
        "sizes": [case.B, case.H, case.K, case.T, case.S, case.D, case.value_dim],
        "mask": case.kind,
        "dtype": case.dtype,
        "backward": case.backward,
        "backend": choice.backend,
        "limit": limit,
        "ways": {name: times.summary(name) for name in line.runs},
        "ratios": ratios,
        "absent": line.absent,
        "marks": [judged(mark, limit, ratios) for mark in case.marks],
        "left_out": times.left_out,
        "disturbed": times.disturbed,
    }


def rows(cases: Sequence[Case], rounds: int, budget: float) -> Iterator[Row]:
    """Measure cases; each may take its share of what is left of the time."""
    end = time.perf_counter() + budget
    for at, case in enumerate(cases):
        yield row(case, rounds, max(0.0, end - time.perf_counter()) / (len(cases) - at))


def held_to_avx2(only: str, rounds: int, budget: float) -> list[Row]:
    """The same in a process of its own, in which headwise, torch, MKL and oneDNN use no more than AVX2."""
    limits_of_torch = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    env = {**os.environ, "HEADWISE_ISA": "avx2", **limits_of_torch}
    options = ["--set", "avx2", "--json", "--only", only, "--rounds", str(rounds), "--budget", str(budget)]
    done = subprocess.run([sys.executable, __file__, *options], env=env, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)["results"]


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line for each case done. Both on stderr."""
    screen = table.console(stderr=True)
    if screen.is_terminal:
        with Progress(console=screen, transient=True) as bar:
            task = bar.add_task("attention", total=total)
            yield lambda result: bar.update(task, advance=1, description=result["case"])
    else:
        yield lambda result: screen.print(f"{result['case']}: {result['ways']['headwise']['median_ms']:.3f} ms")


def measured(name: str, only: str, rounds: int, budget: float) -> dict[str, Any]:
    """The machine and a row for each case of the set whose name matches."""
    cases, avx2 = ([case for case in chosen if re.search(only, case.name)] for chosen in (SETS[name], AVX2))
    avx2 = avx2 if name == "table" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []
    total = len(cases) + len(avx2)
    results = []
    with progress(total) as step:
        for result in rows(cases, rounds, budget * len(cases) / max(total, 1)):
            results.append(result)
            step(result)
    if avx2:
        results += held_to_avx2(only, rounds, budget * len(avx2) / total)
    return {"machine": clock.machine(), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--set", choices=SETS, default="table", help="fold: where does group folding pay?")
    parser.add_argument("--rounds", type=int, default=7, help="quiet rounds of each case")
    parser.add_argument("--budget", type=float, default=360.0, help="seconds for all (7 minutes where compilers run)")
    table.add_delivery(parser)
    options = parser.parse_args()
    report = measured(options.set, options.only, options.rounds, options.budget)
    name = "attention" if options.set == "table" else f"attention-{options.set}"
    table.deliver(report, table.print_table, options, "" if options.only else name)


if __name__ == "__main__":
    main()
