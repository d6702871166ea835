"""Timing: the ways of doing one thing take turns, round after round.

Rounds in which other processes used the CPU are left out. A turn of a short call is many calls in a row (the median of
the later half counts), so that caches and threads are as in a program that does nothing else. A turn of a long call is
one call.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import headwise

TURN = 0.03  # seconds of one turn of a short call
SLOW = 0.8  # seconds; a call that takes longer takes part in LEAST rounds only
LEAST = 3
CHEAP = 1.5  # seconds that LEAST rounds of a case may take when no time is left

Run = Callable[[], Any]
Probe = Callable[[], float | None]


@dataclass
class Rounds:
    """Seconds a call by way and rates by limit, a number for each round; None where a slow way took no part."""

    seconds: dict[str, list[float | None]]
    limits: dict[str, list[float | None]]
    left_out: int = 0
    disturbed: bool = False  # fewer than LEAST rounds were quiet; the least disturbed ones count

    def median(self, way: str) -> float:
        return statistics.median(x for x in self.seconds[way] if x is not None)

    def ratio(self, way: str, base: str) -> float:
        """How many times as long as `base` a way takes: median over the rounds both ran in, so that drift cancels."""
        pairs = zip(self.seconds[way], self.seconds[base], strict=True)
        return statistics.median(x / y for x, y in pairs if x is not None and y is not None)

    def summary(self, way: str) -> dict[str, Any]:
        times = [1e3 * x for x in self.seconds[way] if x is not None]
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        return {"median_ms": middle, "q25_ms": low, "q75_ms": high, "min_ms": min(times), "runs": len(times)}


def own_cpu() -> float:
    """CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_cpu() -> float | None:
    """CPU seconds in which the whole machine was busy, or its host ran others (steal); None without /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in stat.read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Foreign:
    """CPU time of other processes since this was made; a twentieth of a core and the error of ticks count as quiet."""

    def __init__(self) -> None:
        self.at = (time.perf_counter(), own_cpu(), machine_cpu())

    def load(self) -> float:
        """CPU seconds of other processes."""
        busy = machine_cpu()
        if busy is None or self.at[2] is None:
            return 0.0
        return busy - self.at[2] - (own_cpu() - self.at[1])

    def excess(self) -> float:
        """CPU seconds of other processes a second, beyond what counts as quiet: above 0 the round was disturbed."""
        wall = time.perf_counter() - self.at[0]
        return (self.load() - 0.04) / wall - 0.05


def settle() -> None:
    """Wait until no thread pool of this process spins any more: it would slow down the next turn."""
    for _ in range(10):
        before = own_cpu()
        time.sleep(0.006)
        if own_cpu() - before < 0.001:
            return


def turn(run: Run) -> float:
    """Seconds a call.

    Of short calls the second half of a turn counts: in the first milliseconds after a pause threads and matrix units
    are slow, a call of 15 microseconds takes up to twice as long, and a program that decodes does not pause.
    """
    settle()
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    if first > TURN:
        return first
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() - start < TURN:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[len(times) // 2 :])


def measure(ways: Mapping[str, Run], probes: Mapping[str, Probe], rounds: int, seconds: float) -> Rounds:
    """Take turns for so many quiet rounds, or until the time is up. Each way has run before.

    For LEAST rounds more time may be taken: four times as much, or CHEAP seconds. Otherwise cases at the end of a long
    table, whose time the first cases have used up, would have one round each, and its ratio would look like a median.
    """
    slow: set[str] = set()
    done: list[tuple[float, dict[str, float | None], dict[str, float | None]]] = []
    start, quiet = time.perf_counter(), 0
    while quiet < rounds and len(done) < 3 * rounds:
        if done and time.perf_counter() - start > (max(4 * seconds, CHEAP) if len(done) < LEAST else seconds):
            break
        foreign = Foreign()
        limits = {name: probe() for name, probe in probes.items()}
        times = {name: None if name in slow and quiet >= LEAST else turn(run) for name, run in ways.items()}
        done.append((foreign.excess(), times, limits))
        slow |= {name for name, took in times.items() if took is not None and took > SLOW}
        quiet += done[-1][0] <= 0
    enough = min(LEAST, rounds, len(done))
    kept = [row for row in done if row[0] <= 0] if quiet >= enough else sorted(done, key=lambda row: row[0])[:enough]
    return Rounds(
        {name: [times[name] for _, times, _ in kept] for name in ways},
        {name: [limits[name] for _, _, limits in kept] for name in probes},
        left_out=len(done) - len(kept),
        disturbed=quiet < min(LEAST, rounds),
    )


def machine() -> dict[str, Any]:
    """What the numbers depend on; no paths."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    versions = {}
    for name in ("transformers", "onnxruntime", "openvino"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    native = getattr(getattr(torch.ops, "headwise", None), "isa", None)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "headwise_isa": native() if native is not None else None,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "headwise": headwise.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        **versions,
    }
