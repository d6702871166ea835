"""Processes that share one job, started by torchrun or given as a process group; each computes its part.

Imports nothing of headwise except `torchrun`, so every module with work to share may import it.

Attention over ranks has its own communication (`headwise.distributed.comm`), which this module does not use: there all
ranks know all sizes in advance, wait 30 s, and cannot use a group after a failure. Here one process gathers messages of
any length, one at a time, within the group's timeout, and sends an error of one process to all, which can go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import torchrun

T = TypeVar("T")

SLACK = 5.0
"""How many seconds one process may wait longer than another for the same message."""


class LostProcess(ConnectionError):
    """A process of the group ended, or did not answer within the group's timeout."""


_LOST, _CONTENT = b"l", b"c"
_KINDS: dict[bytes, type[Exception]] = {
    _LOST: LostProcess,
    b"t": TypeError,
    b"v": ValueError,
    b"o": OSError,
    b"r": RuntimeError,
}
"""The first byte of a message, and the error type that it means; `_CONTENT` means no error."""


@dataclass(frozen=True)
class Processes:
    """The rank of this process, the number of processes, and their group; a single process by default."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def here(cls) -> Processes:
        """Return the processes of the default group, which is created if torchrun started several processes.

        Raises:
            ValueError: WORLD_SIZE or RANK is not valid, or RANK is not less than WORLD_SIZE.
        """
        if dist.is_available() and not dist.is_initialized() and torchrun.place()[1] > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if dist.is_available() and dist.is_initialized():
            return cls.of(dist.group.WORLD)
        return cls()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Processes:
        """Return the processes of a process group; a single process if it is None.

        Raises:
            TypeError: the argument is not a process group, or this process is not in it.
        """
        if group is None:
            return cls()
        if not isinstance(group, dist.ProcessGroup):
            got = "a group that this process is not in" if isinstance(group, int) else type(group).__name__
            raise TypeError(f"group is a torch.distributed process group that this process is in, or None; got {got}")
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def first(self) -> bool:
        """True if this process writes and prints for all."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a batch."""
        return rows[self.rank :: self.size]

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by the sum over all processes; it stays None if no process has one."""
        some = list(parameters)
        if self.size > 1 and some:
            there = torch.tensor([p.grad is not None for p in some], dtype=torch.int64, device=some[0].device)
            for parameter, count in zip(some, self.add(there).tolist(), strict=True):
                if count:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad, group=self.group)

    def add(self, number: Tensor) -> Tensor:
        """Return the sum of the tensor over all processes; the tensor itself is overwritten."""
        if self.size > 1:
            dist.all_reduce(number, group=self.group)
        return number

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work` after all processes have finished theirs; an error in one is raised in all."""
        done: list[T] = []

        def part() -> bytes:
            done.append(work())
            return b""

        self.exchange(part, lambda parts: b"".join(parts))
        return done[0]

    def exchange(self, work: Callable[[], bytes], join: Callable[[Iterator[bytes]], bytes]) -> bytes:
        """Run `work` in each process, join the results in the first, and return the joined result in every process.

        Processes wait for each other only here. An error of one process, in `work` or in `join`, is raised in all, so
        no process waits for one that has stopped.

        Args:
            work: the work of this process; not called by another process.
            join: called by the first process with the results in rank order, one at a time.

        Raises:
            LostProcess: a process ended, or did not answer within the group's timeout.
            TypeError, ValueError, OSError, RuntimeError: the error of `work` in this process, or in another one, whose
                rank then begins the message.
        """
        if self.size == 1:
            return join(iter([work()]))
        failed: Exception | None = None
        try:
            made = _CONTENT + work()
        except LostProcess:
            raise
        except Exception as error:
            failed, made = error, _as_bytes(error)
        if not self.first:
            self._send(made, 0)
            answer = self._receive(0)
        else:
            lost: set[int] = set()
            answer, failed = self._joined(made, failed, join, lost)
            for rank in {*range(1, self.size)} - lost:
                with contextlib.suppress(LostProcess):  # the other processes must also get the answer
                    self._send(answer, rank)
        if answer[:1] == _CONTENT:
            return answer[1:]
        if failed is not None and answer == _as_bytes(failed):
            raise failed
        raise _KINDS[answer[:1]](answer[1:].decode(errors="surrogatepass")) from failed

    def _joined(
        self, made: bytes, failed: Exception | None, join: Callable[[Iterator[bytes]], bytes], lost: set[int]
    ) -> tuple[bytes, Exception | None]:
        """Return the first process's answer to all processes that are not `lost`: the joined result, or an error."""
        errors: dict[int, bytes] = {} if failed is None else {0: made}

        def contents() -> Iterator[bytes]:
            if failed is None:
                yield made[1:]
            for rank in range(1, self.size):
                try:
                    part = self._receive(rank)
                except LostProcess as error:
                    part = _as_bytes(error)
                    lost.add(rank)
                if part[:1] != _CONTENT:
                    errors[rank] = part
                elif not errors:
                    yield part[1:]

        parts = contents()
        answer = b""
        if failed is None:
            try:
                answer = _CONTENT + join(parts)
            except Exception as error:
                failed, answer = error, _as_bytes(error)
        for _ in parts:  # receive from the remaining processes
            pass
        if not errors:
            return answer, failed
        rank, text = min(errors.items())
        if lost:
            return errors[min(lost)], failed
        alike = len(errors) == self.size and len({*errors.values()}) == 1
        return (text if alike else text[:1] + f"rank {rank}: ".encode() + text[1:]), failed

    # --- bytes from one process to another ----------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        """The device of messages: the CPU, unless the group supports only GPUs."""
        assert self.group is not None
        on_cpu = any(part.split(":")[0] == "cpu" for part in dist.get_backend_config(self.group).split(","))
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def _send(self, content: bytes, rank: int) -> None:
        """Send bytes to a process; their number first, because gloo reports no error for a wrong length."""
        size = torch.tensor([len(content)], dtype=torch.int64, device=self._device)
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        with self._naming(rank):
            dist.send(size, group=self.group, group_dst=rank)
            dist.send(body, group=self.group, group_dst=rank)

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        with self._naming(rank):
            dist.recv(size, group=self.group, group_src=rank)
            body = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            dist.recv(body, group=self.group, group_src=rank)
        return bytes(body.cpu().numpy())

    @contextlib.contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Raise LostProcess if a process cannot be reached.

        While the first process waits for one, the others wait equally long for the first, which names the lost process
        in the store.
        """
        try:
            yield
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            said = f"rank {rank} of {self.size} {'does not answer' if late else 'has ended'}"
            if late:
                with contextlib.suppress(Exception):  # there is no store, it has ended, or it has no entry
                    store = dist.distributed_c10d._get_default_store()
                    key = f"headwise/lost/{dist.get_process_group_ranks(self.group)}"
                    if self.first:
                        store.set(key, said)
                    else:
                        store.wait([key], timedelta(seconds=SLACK))
                        said = store.get(key).decode()
            raise LostProcess(f"{said}; saved results are kept: restart all processes") from error


def _as_bytes(error: Exception) -> bytes:
    """Return an error as a message: its kind and its text."""
    kind = next((kind for kind, one in _KINDS.items() if isinstance(error, one)), b"r")
    plain = any(isinstance(error, one) for one in _KINDS.values()) and str(error)
    return kind + (str(error) if plain else f"{type(error).__name__}: {error}").encode(errors="surrogatepass")


# --- a command that torchrun started several times -------------------------------------------------------------------


@contextlib.contextmanager
def print_once(text: str, patience: float = SLACK) -> Iterator[bool]:
    """Yield whether this process is the first that prints a text; no process continues before all have arrived.

    So a common message is printed once, and no process ends while others are about to end in the same way, because
    torchrun would kill them. It waits at most `patience` seconds. Without torchrun's store every process prints.
    """
    store = _agents_store(patience)
    if store is None:
        yield True
        return
    yield store.add(hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(), 1) == 1
    until = time.monotonic() + patience
    here = store.add("ended", 1)
    while here < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.02)
        here = store.add("ended", 0)


def _agents_store(patience: float) -> dist.Store | None:
    """Return the store that torchrun has for the processes of this start, which outlives them; None without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    run = f"headwise/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience))
        return dist.PrefixStore(run, store)
    except (KeyError, ValueError, RuntimeError):
        return None


def close_group() -> None:
    """Close the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
