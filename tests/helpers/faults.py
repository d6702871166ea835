"""Runs a checkpoint's writing with a fault at each system call that writes, and tells what came of it.

For a fresh process (`fresh.run`), which stays under the injector; it forks children to be killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

COUNT, KILL, FAIL, FAIL_ON, SIGNAL = range(5)
MODES = {
    "SIGKILL": (KILL, 0, 1),
    "ENOSPC": (FAIL, errno.ENOSPC, 1),
    "EIO": (FAIL, errno.EIO, 1),
    "EIO from then on": (FAIL_ON, errno.EIO, 3),
    "Ctrl-C": (SIGNAL, signal.SIGINT, 3),
    "SIGTERM": (SIGNAL, signal.SIGTERM, 3),
}
"""What happens, with which error or signal, and at which calls: all, or every third from the second, the rename among
them, for these end as EIO does."""

LEFT = ".written.0123456789abcdef.headwise-partial"


def library(folder: Path) -> Path:
    """The injector, compiled."""
    made = folder / "injector.so"
    source = Path(__file__).with_name("injector.cpp")
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


class Place:
    """A source, and a folder beside it that checkpoints are written into."""

    def __init__(self, folder: Path, injector: Path) -> None:
        from checkpoint_folders import content, made

        from headwise.reshape.write import shards

        shards.MAX_SHARD = 1000
        self.source = made(folder / "source", shards=2)
        self.out = folder / "out"
        self.out.mkdir()
        self.destination = self.out / "written"
        self.injector = ctypes.CDLL(str(injector))
        self.injector.name.restype = ctypes.c_char_p
        self.before = self._source()
        self.write()
        self.wanted = content(self.destination)
        shutil.rmtree(self.destination)
        assert self.injector.arm() == 0

    def _source(self) -> Any:
        paths = sorted(self.source.iterdir())
        return [(p.name, p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in paths]

    def write(self) -> None:
        from checkpoint_folders import copied

        copied(self.source, self.destination, extra={"NOTE.md": b"note"}, check=lambda _: {"REPORT.md": b"report"})

    def run(self, nth: int, what: int, value: int) -> tuple[str, str]:
        """How a run with a fault ended, and what it said."""
        self.injector.plan(nth, what, value)
        try:
            self.write()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            return type(error).__name__, str(error)
        finally:
            self.injector.plan(0, COUNT, 0)
        return "written", ""

    def run_apart(self, nth: int, what: int, value: int) -> tuple[str, str]:
        """The same in a child, which may be killed."""
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            gc.disable()
            os.write(writer, json.dumps(self.run(nth, what, value)).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as stream:
            said = stream.read()
        killed = os.WIFSIGNALED(os.waitpid(process, 0)[1])
        return ("killed", "") if killed else tuple(json.loads(said))

    def calls(self) -> list[tuple[str, int]]:
        """What a run writes with, when nothing fails: (system call, descriptor)."""
        mine = self.injector
        mine.plan(0, COUNT, 0)
        self.write()
        calls = [(mine.name(i).decode(), mine.file(i)) for i in range(mine.calls())]
        shutil.rmtree(self.destination)
        return calls

    def faults(self, mode: str, nth: int) -> list[str]:
        """What is wrong after a fault, and after the run that follows it."""
        from checkpoint_folders import content

        (self.out / LEFT).mkdir()
        (self.out / LEFT / "model.safetensors").write_bytes(b"half")
        files = len(os.listdir("/proc/self/fd"))
        run = self.run_apart if mode in ("SIGKILL", "SIGTERM") else self.run
        end, said = run(nth, *MODES[mode][:2])
        there = self.destination.exists()
        wrong = []
        self.ends[mode, end, there] += 1
        if there and content(self.destination) != self.wanted:
            wrong.append(f"a destination that is not whole: {sorted(os.listdir(self.destination))}")
        if mode not in ("SIGKILL", "EIO from then on") and {*os.listdir(self.out)} - {"written", LEFT}:
            wrong.append(f"left behind {os.listdir(self.out)}")
        if end == "OSError" and not said.startswith(("cannot write", f"{self.destination} is written")):
            wrong.append(f"said {said!r}")
        if end == "written" and not there:
            wrong.append(f"not there: {said}")
        if there:
            shutil.rmtree(self.destination)
        self.write()
        if content(self.destination) != self.wanted:
            wrong.append("the next run wrote something else")
        if os.listdir(self.out) != ["written"]:
            wrong.append(f"the next run left {os.listdir(self.out)}")
        shutil.rmtree(self.destination)
        if self._source() != self.before:
            wrong.append("the source changed")
        if len(os.listdir("/proc/self/fd")) != files and mode != "Ctrl-C":  # it may come between open and its result
            wrong.append("a file stayed open")
        for name in os.listdir(self.out):
            shutil.rmtree(self.out / name)
        return [f"{mode} at call {nth}: {text}" for text in wrong]

    def sweep(self) -> dict[str, Any]:
        """Every fault at every call."""
        self.ends: Counter[tuple[str, str, bool]] = Counter()
        calls = self.calls()
        number = len(calls) + 2  # two more remove what a killed run left
        wrong = []
        for mode, (_, _, step) in MODES.items():
            for nth in range(1 if step == 1 else 2, number + 2, step):
                wrong += self.faults(mode, nth)
        return {"calls": calls, "wrong": wrong, "ends": [[*key, n] for key, n in sorted(self.ends.items())]}
