"""Runs a checkpoint's writing with a fault at each system call that writes, one process a fault; tells what came of it.

For a fresh process (`fresh.run`), which forks children that have everything imported.
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
from collections.abc import Callable
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

        from headwise.reshape import shards

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

    def _source(self) -> Any:
        paths = sorted(self.source.iterdir())
        return [(p.name, p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in paths]

    def write(self) -> None:
        from checkpoint_folders import copied

        copied(self.source, self.destination, extra={"NOTE.md": b"note"}, check=lambda _: {"REPORT.md": b"report"})

    def child(self, nth: int, what: int, value: int, then: Callable[[], object] = lambda: None) -> tuple[str, str]:
        """How a child with the fault ended, and what it said."""
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            text = ""
            gc.disable()
            try:
                assert self.injector.arm(nth, what, value) == 0
                self.write()
                text = "written " + json.dumps(then())
            except BaseException as error:
                text = f"{type(error).__name__} {error}"
            finally:
                os.write(writer, text.encode()[:60_000])
                os._exit(0)
        os.close(writer)
        with open(reader) as stream:
            said = stream.read()
        status = os.waitpid(process, 0)[1]
        return ("killed" if os.WIFSIGNALED(status) else said.split(" ", 1)[0]), said

    def calls(self) -> list[tuple[str, int]]:
        """What a child writes with, when nothing fails: (system call, descriptor)."""
        mine = self.injector
        end, said = self.child(
            0, COUNT, 0, lambda: [(mine.name(i).decode(), mine.file(i)) for i in range(mine.calls())]
        )
        assert end == "written", said
        shutil.rmtree(self.destination)
        return [tuple(row) for row in json.loads(said.split(" ", 1)[1])]

    def faults(self, mode: str, nth: int) -> list[str]:
        """What is wrong after a fault, and after the run that follows it."""
        from checkpoint_folders import content

        (self.out / LEFT).mkdir()
        (self.out / LEFT / "model.safetensors").write_bytes(b"half")
        end, said = self.child(nth, *MODES[mode][:2])
        there = self.destination.exists()
        wrong = []
        self.ends[mode, end, there] += 1
        if there and content(self.destination) != self.wanted:
            wrong.append(f"a destination that is not whole: {sorted(os.listdir(self.destination))}")
        if mode not in ("SIGKILL", "EIO from then on") and {*os.listdir(self.out)} - {"written", LEFT}:
            wrong.append(f"left behind {os.listdir(self.out)}")
        if end == "OSError" and not (
            said.startswith(("OSError cannot write", f"OSError {self.destination} is written"))
        ):
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
