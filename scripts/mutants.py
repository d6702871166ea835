"""Checks that the tests detect faults: puts each mutant of the ledger into a copy of the tree and runs its test.

    .venv/bin/python scripts/mutants.py                        all of tests/*/mutants.toml (`make ledger`)
    .venv/bin/python scripts/mutants.py --only cache           those of a room, or of a file; `--list` shows them
    .venv/bin/python scripts/mutants.py --sample 4 --seed X    four at random, of C++ only if the others are fewer

An entry of the ledger is a file, a text that occurs in it once, the text to put there, and a test. The test must pass
on a clean copy and fail on the mutated one: by an assertion or an exception of its own, for a module that no longer
imports or a test that is not there proves nothing. A timeout or a crash counts too, and is shown. C++ is compiled in
the copy, all instruction sets, unoptimised: it takes a tenth of the time and rounds alike.

Exit code 1 where a mutant survives, proves nothing, or no longer fits its file; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants_ledger import Mutant, draw, faults, read
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "runs", "__pycache__", "*.egg-info")
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # cmake may be in the venv
CLOSING = re.compile(r"^=*\s*(\d+ \w+|no tests ran).* in [\d.]+s", re.M)
KILLED, BAD = ("killed", "timed out", "crashed"), ("survived", "proves nothing")


# Running a test in a copy


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, None after a timeout, and what it printed."""

    code: int | None
    text: str


class Processes:
    """Commands in process groups of their own, so that whatever a test starts ends with it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def run(self, command: Sequence[str], cwd: Path, env: dict[str, str], timeout: float) -> Done:
        with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as any child of a child
            with self._lock:
                if self.stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    command, cwd=cwd, env=env, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
                self._running.add(process)
            code: int | None = None
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._end(process)
                process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
            if self.stopped:
                raise KeyboardInterrupt
            output.seek(0)
            return Done(code, output.read().decode(errors="replace"))

    def stop(self) -> None:
        """Ends all processes; no more can be started."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Copy:
    """A copy of the tree, where mutants are applied and tests run."""

    def __init__(self, root: Path, folder: Path, processes: Processes, timeout: float) -> None:
        self.folder, self._processes, self._timeout = folder, processes, timeout
        shutil.copytree(root, folder, ignore=LEFT_OUT)
        self._as_built = True  # whether the library is the one of the sources

    def build(self) -> str | None:
        """Compiles what has changed; the compiler's first error where that fails."""
        folder = self.folder / "build" / "mutants"
        steps = [["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)]]
        if not (folder / "CMakeCache.txt").exists():
            kind = ["-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_CXX_FLAGS_MUTANTS=-O0"]
            steps.insert(0, ["cmake", "-S", str(self.folder), "-B", str(folder), *kind])
        for step in steps:
            done = self._processes.run(step, self.folder, self._environment(), 1200)
            if done.code != 0:
                return next((line for line in done.text.splitlines() if "error" in line.lower()), done.text[-200:])
        return None

    def test(self, *nodes: str, keep: bool = False) -> Done:
        """Runs tests of the copy; `keep` keeps compiled Python for later tests."""
        options = ["-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
        env = self._environment() | {"PYTHONDONTWRITEBYTECODE": "" if keep else "1"}
        command = [sys.executable, "-m", "pytest", *options, *nodes]
        return self._processes.run(command, self.folder, env, self._timeout * (len(nodes) if keep else 1))

    def clean(self, tests: Sequence[str], *, native: bool) -> dict[str, str]:
        """The tests that do not pass on the unchanged copy, and why: all together, and if that fails in halves."""
        trouble = self.build() if native else None
        return dict.fromkeys(tests, trouble) if trouble else self._failing(tests)

    def _failing(self, tests: Sequence[str]) -> dict[str, str]:
        if not tests or (done := self.test(*tests, keep=True)).code == 0:
            return {}
        if len(tests) == 1:
            return {tests[0]: f"fails without the mutant: {' '.join(judged(done))}"}
        half = len(tests) // 2
        return self._failing(tests[:half]) | self._failing(tests[half:])

    def verdict(self, mutant: Mutant) -> tuple[str, str]:
        """Applies it, runs its test, restores the file."""
        with self._applied(mutant):
            if mutant.is_native or not self._as_built:
                trouble = self.build()
                self._as_built = not mutant.is_native
                if trouble:
                    return "proves nothing", f"does not compile: {trouble}"
            return judged(self.test(mutant.test))

    @contextlib.contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        source = (self.folder / mutant.file).read_text("utf8")
        self._write(mutant.file, mutant.applied_to(source))
        try:
            yield
        finally:
            self._write(mutant.file, source)

    def _write(self, file: str, text: str) -> None:
        path = self.folder / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # Python compares only second and size of the source
        path.write_text(text, "utf8")

    def _environment(self) -> dict[str, str]:
        own = {"PATH": PROGRAMS, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        own["HEADWISE_DRAW"] = "1"  # a test that runs a share of its cases might miss the mutant
        if shutil.which("ninja", path=PROGRAMS):
            own["CMAKE_GENERATOR"] = "Ninja"
        return {**os.environ, **own}


def judged(done: Done) -> tuple[str, str]:
    """The verdict on the mutant from how pytest ended, and the line to show."""
    closing = _closing(done.text)
    if done.code is None:
        return "timed out", ""
    if done.code < 0:
        return "crashed", signal.Signals(-done.code).name
    if done.code == 1 and " failed" in closing:
        return "killed", next((line for line in done.text.splitlines() if line.startswith("FAILED ")), "")[7:]
    if done.code == 0:
        return ("survived", "") if " passed" in closing else ("not run", f"its test skips here: {closing}")
    error = next((line for line in done.text.splitlines() if line.startswith(("ERROR", "E  "))), closing)
    return "proves nothing", f"pytest ends with exit code {done.code} and no failed test: {error}"


def _closing(text: str) -> str:
    """pytest's closing line; without one, the last line of all."""
    closing = [match.group() for match in CLOSING.finditer(text)]
    return (closing or text.strip().splitlines() or ["pytest printed nothing"])[-1]


# All of them


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: str
    detail: str
    seconds: float


class Run:
    """Some mutants, on several copies side by side. The first copy has the C++, and a library of its own."""

    def __init__(self, root: Path, mutants: Sequence[Mutant], jobs: int, timeout: float, show: Progress) -> None:
        self._root, self._jobs, self._timeout, self._show = root, jobs, timeout, show
        compiler = os.environ.get("CXX", "c++").split()[0]
        missing = [name for name in (compiler, "cmake") if not shutil.which(name, path=PROGRAMS)]
        self._native = deque(x for x in mutants if x.is_native and not missing)
        self._others = deque(x for x in mutants if not x.is_native)
        self.results = [Result(x, "not run", f"needs {missing[0]}", 0.0) for x in mutants if x.is_native and missing]
        self._bar = show.add_task("copying the tree", total=len(self._native) + len(self._others))
        self._unclean: dict[str, str] = {}
        self._processes = Processes()

    def go(self) -> None:
        """Fills `results`. After Ctrl-C nothing that was started is left, and the interrupt is raised again."""
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(self._jobs) as pool:
            try:
                folders = [Path(folder) / str(job) for job in range(self._jobs)]
                copies = [Copy(self._root, each, self._processes, self._timeout) for each in folders]
                self._show.update(self._bar, description="the tests on the clean copy")
                for unclean in pool.map(self._clean, copies, self._first_tests()):
                    self._unclean |= unclean
                self._show.update(self._bar, description="mutants")
                list(pool.map(self._work, copies, [True] + [False] * self._jobs))
            except BaseException:
                self._processes.stop()
                raise

    def _first_tests(self) -> list[tuple[list[str], bool]]:
        """Which tests each copy runs first, each test once; those of C++ with the library compiled here."""
        native, others = ([*dict.fromkeys(x.test for x in some)] for some in (self._native, self._others))
        shares: list[tuple[list[str], bool]] = [([], False) for _ in range(self._jobs)]
        takers = shares[1:] if native and self._jobs > 1 else shares
        for n, test in enumerate(sorted(others)):
            takers[n * len(takers) // len(others)][0].append(test)  # neighbours share a file
        shares[0] = ([*shares[0][0], *(x for x in native if x not in shares[0][0])], bool(native))
        return shares

    def _clean(self, copy: Copy, share: tuple[list[str], bool]) -> dict[str, str]:
        return copy.clean(share[0], native=share[1])

    def _work(self, copy: Copy, first: bool) -> None:
        queues = [self._native, self._others] if first else [self._others]
        for queue in queues:
            while True:
                try:
                    mutant = queue.popleft()
                except IndexError:
                    break
                start = time.perf_counter()
                why = self._unclean.get(mutant.test)
                verdict, detail = ("proves nothing", why) if why else copy.verdict(mutant)
                seconds = time.perf_counter() - start
                self.results.append(Result(mutant, verdict, detail, seconds))
                line = f"{verdict:>14} {seconds:5.1f} s  {str(mutant)[:150]}"
                self._show.console.print(line, soft_wrap=True, markup=False, highlight=False)
                self._show.advance(self._bar)


def lacks(mutant: Mutant) -> str:
    """Why its test cannot be here: it is of an instruction set that this CPU, or the library, does not have."""
    named = re.search(r"native-(\w+)\]$", mutant.test)
    if named is None:
        return ""
    from headwise.ops.native.library import isas  # torch with it, which --list and most samples do not need

    return "" if named[1] in isas() else f"no {named[1]} here"


# Printing


def rates(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """Counts by room, and in all."""
    counts: dict[str, dict[str, int]] = {}
    for room in [*sorted({result.mutant.room for result in results}), "all"]:
        verdicts = [result.verdict for result in results if room in (result.mutant.room, "all")]
        killed, bad = (sum(x in which for x in verdicts) for which in (KILLED, BAD))
        counts[room] = {"killed": killed, "survived": verdicts.count("survived"), "of": killed + bad}
        counts[room]["not run"] = len(verdicts) - killed - bad
    return counts


def table(results: Sequence[Result]) -> Table:
    grid = Table("room", "killed", "of", "rate", "not run")
    for column in grid.columns[1:]:
        column.justify = "right"
    for room, n in rates(results).items():
        rate = f"{100 * n['killed'] / n['of']:.0f} %" if n["of"] else "-"
        grid.add_row(room, str(n["killed"]), str(n["of"]), rate, str(n["not run"] or ""))
    return grid


def print_results(results: Sequence[Result], out: Console) -> None:
    """The table, then every mutant that was not simply killed."""
    out.print(table(results))
    for result in sorted(results, key=lambda x: (x.verdict, x.mutant.file)):
        if result.verdict != "killed":
            lines = [f"{result.verdict}: {result.mutant}", f"  test: {result.mutant.test}", f"  {result.detail}"]
            out.print("\n".join(lines[: 3 if result.detail else 2]), markup=False, highlight=False, soft_wrap=True)


def as_json(results: Sequence[Result], seed: str | None) -> str:
    rows: list[dict[str, Any]] = [
        {**vars(x.mutant), "room": x.mutant.room, "verdict": x.verdict, "detail": x.detail, "seconds": x.seconds}
        for x in sorted(results, key=lambda x: (x.mutant.file, x.mutant.old))
    ]
    return json.dumps({"seed": seed, "rooms": rates(results), "mutants": rows}, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--only", action="append", metavar="ROOM|FILE", help="may be repeated")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them at random, those of C++ last")
    parser.add_argument("--seed", default="0", help="of the sample; 0 by default")
    parser.add_argument("--jobs", type=int, default=2, help="copies side by side")
    parser.add_argument("--timeout", type=float, default=240, metavar="SECONDS", help="of a test")
    parser.add_argument("--list", action="store_true", help="show the entries, run none")
    parser.add_argument("--json", action="store_true", help="the result on stdout")
    options = parser.parse_args(arguments)
    try:
        mutants = read(options.root)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for problem in (problems := faults(mutants, options.root)):
        print(f"mutants: {problem}", file=sys.stderr)
    if problems:
        return 1
    chosen = [x for x in mutants if not options.only or {x.room, x.file} & set(options.only)]
    if not chosen or options.jobs < 1 or (options.sample is not None and options.sample < 1):
        parser.error("nothing to run: --only names no room or file of the ledger, or --jobs or --sample is below 1")
    seed = None
    if options.sample is not None:
        seed = options.seed
        chosen = draw(chosen, options.sample, seed)
    if options.list:
        print(*(f"{mutant.room}: {mutant}\n    {mutant.test}" for mutant in chosen), sep="\n")
        return 0
    return run(options, chosen, seed)


def run(options: argparse.Namespace, chosen: Sequence[Mutant], seed: str | None) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    code = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as show:
        if seed is not None:
            show.console.print(f"{len(chosen)} mutants drawn by --seed {seed}", highlight=False)
        absent = {mutant: why for mutant in chosen if (why := lacks(mutant))}
        here = [mutant for mutant in chosen if mutant not in absent]
        work = Run(options.root, here, options.jobs, options.timeout, show)
        work.results += [Result(mutant, "not run", why, 0.0) for mutant, why in absent.items()]
        try:
            work.go()
        except KeyboardInterrupt:
            code = 130
    if options.json:
        print(as_json(work.results, seed))
    else:
        print_results(work.results, Console())
    if code:
        print(f"mutants: stopped after {len(work.results)} of {len(chosen)}", file=sys.stderr)
        return code
    return int(any(result.verdict in BAD for result in work.results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    sys.exit(main())
