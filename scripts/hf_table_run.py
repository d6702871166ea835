"""Rows of the ledger, each measured in a child process of its own: one that crashes or hangs costs its row alone."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
MEMORY = 16 << 30


@dataclass
class Child:
    """A process that measures one architecture and writes its row to a pipe."""

    name: str
    pid: int
    pipe: int
    end: float
    text: bytearray = field(default_factory=bytearray)


def rows(names: Sequence[str], measure: Callable[[str], Row], jobs: int = 1, timeout: float = 120) -> Iterator[Row]:
    """The row of each name, in the order in which they are done."""
    waiting, running = list(reversed(names)), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = start(waiting.pop(), measure, timeout)
                running[child.pipe] = child
            first = min(child.end for child in running.values())
            ready, _, _ = select.select(list(running), [], [], max(0.0, first - time.monotonic()))
            for pipe in ready:
                text = os.read(pipe, 1 << 16)
                running[pipe].text += text
                if not text:
                    yield ended(running.pop(pipe))
            for child in [x for x in running.values() if x.end <= time.monotonic()]:
                os.kill(child.pid, signal.SIGKILL)
                ended(running.pop(child.pipe))
                yield {"name": child.name, "outcome": "broken", "reason": f"no end within {timeout:g} s"}
    finally:
        for child in running.values():
            os.kill(child.pid, signal.SIGKILL)
            ended(child)


def start(name: str, measure: Callable[[str], Row], timeout: float) -> Child:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return Child(name, pid, reads, time.monotonic() + timeout)
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with os.fdopen(writes, "w") as out:
            json.dump(measure(name), out)
        code = 0
    finally:
        os._exit(code)


def ended(child: Child) -> Row:
    """The row that a child wrote; broken where it wrote none."""
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if os.WIFSIGNALED(status) or not child.text:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        return {"name": child.name, "outcome": "broken", "reason": f"its process ended by {how}"}
    row: Row = json.loads(child.text)
    return row
