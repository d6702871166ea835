"""Times `headwise.attention` beside what the machine can do at most and beside its peers: the table of `make bench`.

    python benchmarks/attention.py [--only PATTERN] [--rounds 7] [--budget 360] [--json] [--set table|fold|avx2]

Ways of doing the same thing take turns (A B C A B C ...), so that a machine's moods hit all alike; the limits
(multiply-adds of all threads, reads of the same buffers) take turns with them. Without --only, results go to
benchmarks/results/<date>-attention.json with the machine and the versions.
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
from typing import Any

import torch
from rich.progress import Progress

import headwise

try:
    from benchmarks import clock, limits, table, ways
    from benchmarks.registry import AVX2, CASES, FOLD, Case, Mark
except ImportError:  # run as a script: this folder is on the path, its parent is not
    import clock  # type: ignore[import-not-found,no-redef]
    import limits  # type: ignore[import-not-found,no-redef]
    import table  # type: ignore[import-not-found,no-redef]
    import ways  # type: ignore[import-not-found,no-redef]
    from registry import AVX2, CASES, FOLD, Case, Mark  # type: ignore[import-not-found,no-redef]

SETS = {"table": CASES, "fold": FOLD, "avx2": AVX2}
Row = dict[str, Any]


def probes(case: Case, inputs: ways.Inputs) -> dict[str, clock.Probe]:
    """The limits to be measured with the case: arithmetic, and for a single query also reading."""
    if case.backward:
        return {}
    _, k, v = inputs
    found: dict[str, clock.Probe] = {"arithmetic": partial(limits.arithmetic, case.dtype)}
    if case.T == 1:
        found["reading"] = partial(limits.reading, (k,) if case.V else (k, v))
    return found


def limit_of(case: Case, rounds: clock.Rounds) -> dict[str, Any] | None:
    """What bounds the case, and headwise's part of it: median over the rounds of least time / our time."""
    needs = {"arithmetic": (case.flops(), "GF/s"), "reading": (case.bytes_read(), "GB/s")}
    rates = {name: [x for x in found if x] for name, found in rounds.limits.items()}
    if not rates or not all(rates.values()):
        return None
    least = {name: needs[name][0] / statistics.median(found) for name, found in rates.items()}
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
    """A mark with what was reached; `met` is None where it could not be measured."""
    value = limit and limit["part"] if mark.of == "limit" else ratios.get(mark.of)
    met = None if value is None else value >= mark.must
    return {"of": mark.of, "must": mark.must, "aim": mark.aim, "value": value, "met": met}


def row(case: Case, rounds: int, seconds: float) -> Row:
    """Measure one case."""
    line = ways.lineup(case)
    with torch.set_grad_enabled(case.backward):
        told = headwise.explain(*line.inputs, mask=case.mask())
        found = clock.measure(line.runs, probes(case, line.inputs), rounds, seconds)
    limit = limit_of(case, found)
    ratios = {name: found.ratio(name, "headwise") for name in line.runs if name != "headwise"}
    return {
        "case": case.name,
        "regime": case.regime,
        "sizes": [case.B, case.H, case.K, case.T, case.S, case.D, case.value_dim],
        "mask": case.kind,
        "dtype": case.dtype,
        "backward": case.backward,
        "backend": told.backend,
        "limit": limit,
        "ways": {name: found.summary(name) for name in line.runs},
        "ratios": ratios,
        "absent": line.absent,
        "marks": [judged(mark, limit, ratios) for mark in case.marks],
        "left_out": found.left_out,
        "disturbed": found.disturbed,
    }


def rows(cases: Sequence[Case], rounds: int, budget: float) -> Iterator[Row]:
    """Measure cases; each may take its share of what is left of the time."""
    end = time.perf_counter() + budget
    for at, case in enumerate(cases):
        yield row(case, rounds, max(0.0, end - time.perf_counter()) / (len(cases) - at))


def held_to_avx2(only: str, rounds: int, budget: float) -> list[Row]:
    """The same, in a process in which headwise and torch use AVX2 and no more."""
    env = {**os.environ, "HEADWISE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
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
            yield lambda found: bar.update(task, advance=1, description=found["case"])
    else:
        yield lambda found: screen.print(f"{found['case']}: {found['ways']['headwise']['median_ms']:.3f} ms")


def measured(name: str, only: str, rounds: int, budget: float) -> dict[str, Any]:
    """The machine and a row for each case of the set whose name matches."""
    cases, held = ([case for case in chosen if re.search(only, case.name)] for chosen in (SETS[name], AVX2))
    held = held if name == "table" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []
    total = len(cases) + len(held)
    results = []
    with progress(total) as step:
        for found in rows(cases, rounds, budget * len(cases) / max(total, 1)):
            results.append(found)
            step(found)
    if held:
        results += held_to_avx2(only, rounds, budget * len(held) / total)
    return {"machine": clock.machine(), "results": results}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--only", default="", help="cases whose name this regular expression finds")
    ask.add_argument("--set", choices=SETS, default="table", help="fold: where does group folding pay?")
    ask.add_argument("--rounds", type=int, default=7, help="quiet rounds of each case")
    ask.add_argument("--budget", type=float, default=360.0, help="seconds for all (7 minutes where compilers run)")
    table.add_delivery(ask)
    given = ask.parse_args()
    told = measured(given.set, given.only, given.rounds, given.budget)
    name = "attention" if given.set == "table" else f"attention-{given.set}"
    table.deliver(told, table.print_table, given, "" if given.only else name)


if __name__ == "__main__":
    main()
