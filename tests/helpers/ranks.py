"""Processes of a gloo group that outlive a test: starting one takes a second, giving it work a millisecond.

    def total(value: float) -> float:  # a function of a module that an import finds, not of a test file
        part = torch.tensor(value * (dist.get_rank() + 1))
        dist.all_reduce(part)
        return part.item()

    ranks.pool(3).run(total, 2.0)  # [12.0, 12.0, 12.0]: what each rank returned

They are forked from the server of `fresh.py`, which has torch and transformers but no group: gloo's threads do not
survive a fork, and an import of both takes three seconds. Each has one thread, for the machine has two cores. Where a
rank raises, `run` raises `RankError` with what every rank said, and the pool starts anew: its group may be out of step.
A test that kills or stops a rank takes a `Pool` of its own.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import fresh

PATIENCE = 120  # seconds that a test waits for its ranks; a hang is a failure, not a stopped suite
TIMEOUT = 900.0  # of the groups' collectives; longer than any test waits, for it runs on while a rank is stopped


class RankError(AssertionError):
    """Some rank raised, died or did not answer: `said` has one text a rank, None for those that returned."""

    def __init__(self, said: list[str | None]) -> None:
        self.said = said
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text))


class Pool:
    """`world` processes of one gloo group.

    Args:
        world: how many.
        timeout: seconds that the group's collectives wait.
    """

    def __init__(self, world: int, timeout: float = TIMEOUT) -> None:
        self.world, self.timeout = world, timeout
        self._start()

    def _start(self) -> None:
        context = fresh.context()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self.processes, self._pipes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            work = (rank, self.world, store, self.timeout, theirs, sys.path)
            process = context.Process(target=_serve, args=work, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *arguments: Any, patience: int = PATIENCE) -> list[Any]:
        """What `function(*arguments)` returns on each rank, in their order."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._answer(rank, patience) for rank in range(self.world)]
        said = [text for text, _ in answers]
        if any(said):
            self.close()
            self._start()
            raise RankError(said)
        return [value for _, value in answers]

    def _answer(self, rank: int, patience: int) -> tuple[str | None, Any]:
        try:
            # A second at a time: one in which this process was stopped counts once, however long it was.
            if not any(self._pipes[rank].poll(1) for _ in range(patience)):
                return f"no answer in {patience} s", None
            return self._pipes[rank].recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self.processes[rank].join(5)
            return f"ended with exit code {self.processes[rank].exitcode}", None

    def close(self) -> None:
        """End its processes, whatever they do."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            pipe.close()
        for process in self.processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_shared: list[Pool] = []
atexit.register(lambda: [shared.close() for shared in _shared])


@functools.cache
def pool(world: int) -> Pool:
    """The pool of that many ranks that tests share; it lives as long as this process."""
    shared = Pool(world)
    _shared.append(shared)
    return shared


def renew() -> None:
    """End the shared pools; who asks for one gets a new one. For tests that let ranks fail: of a group that broke,
    gloo's threads spin on a closed socket as long as the process lives, and take a core from all other tests."""
    for shared in _shared:
        shared.close()
    _shared.clear()
    pool.cache_clear()


def _serve(rank: int, world: int, store: str, timeout: float, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    import dirty_memory
    import torch
    import torch.distributed as dist

    dirty_memory.install()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # whoever gave work is gone
            os._exit(0)
        except Exception:  # what cannot be unpickled here, such as a function of a test file
            pipe.send((traceback.format_exc(), None))
            continue
        torch.manual_seed(0)
        try:
            answer = (None, function(*arguments))
        except Exception:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
