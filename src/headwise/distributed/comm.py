"""Communication between ranks: checked by all ranks first, counted, and ended by an error that names the failed rank.

    comm = Comm.of(group)
    ranks = comm.agree("merge", {"dtype": str(x.dtype)}, {"rows": x.shape[0]})  # the second of every rank
    parts = comm.gather("merge", x, [(own["rows"], n) for own in ranks])        # sizes differ: agreed above

Every operation begins with `agree`: a header of fixed size to each other rank, with a separate tag, so it is received
whatever operation the other rank started. All data is sent from rank to rank, as bytes, with the operation's number as
its tag. So no message reaches a buffer of another size, for which backends abort or, if the message is shorter, give no
error (gloo, torch 2.13), and messages of headwise do not mix with the user's own messages in the same group.

If a rank has ended, its connections are closed; if it hangs, nothing is received within the timeout. A rank that
detects this writes the rank that it waited for to the group's store, and follows the notes of the other ranks to the
rank that wrote none: this is the cause, the same on every rank. After that the group cannot be used, by torch either.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ..shapes.arguments import check_numbers, shown
from .errors import RankError, RankMismatch
from .messages import Pending, ReceiveBuffer, Shape, started

TIMEOUT = 30.0
"""The default number of seconds that a rank waits for another before it raises an error."""
HEADER = 4096  # bytes of the header of an operation
_HEADER_TAG = 7_000_000
_TAGS = 1 << 16  # after this many operations their tags repeat; a tag has room for 30,000 steps
_DATA_TAG = 8_000_000
_LONGEST_TEXT = 240  # the maximum length of a checked value, and of an error message, in a header

eager = torch.compiler.disable(reason="ranks send each other messages here: leave fullgraph=True out")
"""A decorator that makes torch.compile exclude a function from its graphs."""


class Comm:
    """The communication of a process group. There is one object per group; see `of`.

    Attributes:
        rank: the rank of this process in the group.
        world: the number of ranks.
        timeout: how many seconds it waits for another rank.
        sent: bytes that this rank has sent to others, by kind of operation; headers have the kind "agree".
        messages: the number of messages, by kind of operation.
        count: the number of operations so far.
    """

    _known: dict[str, Comm] = {}  # noqa: RUF012 - shared on purpose: one entry per group

    def __init__(self, group: ProcessGroup, timeout: float = TIMEOUT) -> None:
        self._group, self.timeout = weakref.ref(group), timeout  # weak: the user's deletion ends the group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.count = 0
        self._broken: str | None = None

    @classmethod
    @eager
    def of(cls, group: ProcessGroup | DeviceMesh | None = None, timeout: float | None = None) -> Comm:
        """Return the communication of a group, of a mesh of one dimension, or of all processes (None).

        Args:
            group: a process group, or a `DeviceMesh` of one dimension.
            timeout: seconds to wait for a rank, from now on; None keeps the current value, at first 30.

        Raises:
            TypeError: the argument is not a group.
            ValueError: torch.distributed has not been started, or the mesh has more than one dimension.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "headwise.parallel works on the ranks that torch.distributed has started; call "
                "torch.distributed.init_process_group(...) first, in processes that torchrun starts"
            )
        processes = group_of(group)
        comm = cls._known.get(processes.group_name)
        if comm is None or comm._group() is not processes:
            comm = cls._known[processes.group_name] = cls(processes)
        if timeout is not None:
            check_numbers(0.0, timeout=timeout)
            comm.timeout = float(timeout)
        return comm

    @property
    def group(self) -> ProcessGroup:
        """The process group; ValueError if it has been destroyed."""
        group = self._group()
        if group is None:
            raise ValueError("this process group has been destroyed; call Comm.of(group) with another group")
        return group

    # -- agreement -----------------------------------------------------------------------------------------------------

    @eager
    def agree(
        self, operation: str, same: Mapping[str, Any], own: Mapping[str, Any] | None = None, *, error: object = None
    ) -> list[dict[str, Any]]:
        """Return the `own` of every rank, ordered by rank; check that all ranks pass the same `same`, in equal order.

        Args:
            operation: the name of the next operation, for errors.
            same: name -> value that must be equal on all ranks; strings or numbers.
            own: name -> value that may differ between ranks; numbers.
            error: an error of this rank, which cannot take part: it is raised here and sent to the other ranks.

        Raises:
            RankMismatch: ranks differ in `same`, in the next operation, or in the number of operations.
            RankError: a rank sends an error, has ended or hangs.
        """
        self._check_usable(operation)
        self.count += 1
        facts = _texts(same)
        header: dict[str, Any] = {"operation": operation, "count": self.count, "same": facts, "own": dict(own or {})}
        if error is not None:
            header = {"operation": operation, "count": self.count, "error": _message(error)}
        headers = self._headers(operation, header)
        if isinstance(error, BaseException):
            raise error
        for rank, other in enumerate(headers):
            if "error" in other:
                raise RankError(operation, rank, f"raised: {other['error']}")
        for name in ("operation", "count"):
            steps = [f"{other['operation']!r} as its operation {other['count']}" for other in headers]
            _compare(operation, "order", steps, [other[name] for other in headers])
        for name in [*facts, *(headers[0]["same"].keys() - facts.keys())]:
            values = [other["same"].get(name) for other in headers]
            _compare(operation, name, values, values)
        return [other["own"] for other in headers]

    @contextmanager
    def before(self, operation: str) -> Iterator[None]:
        """Return a context that sends an error of this rank to the other ranks, which are about to call `agree`."""
        try:
            yield
        except Exception as error:
            self.agree(operation, {}, error=error)
            raise  # not reached, because `agree` raises the error

    def _headers(self, operation: str, header: dict[str, Any]) -> list[dict[str, Any]]:
        if self.world == 1:
            return [header]
        text = json.dumps(header).encode()
        if len(text) > HEADER:
            raise ValueError(f"{operation}: the values to agree on take {len(text)} bytes, at most {HEADER}")
        buffer = torch.frombuffer(bytearray(text.ljust(HEADER)), dtype=torch.uint8).to(self._header_device)
        others = [rank for rank in range(self.world) if rank != self.rank]
        block = ReceiveBuffer((HEADER,), torch.uint8, buffer.device)
        pending = self._post(
            operation, "agree", dict.fromkeys(others, buffer), dict.fromkeys(others, block), _HEADER_TAG
        )
        heard = pending.wait() | {self.rank: buffer}
        return [json.loads(heard[rank].cpu().numpy().tobytes()) for rank in range(self.world)]

    @property
    def _header_device(self) -> torch.device:
        """The device of headers: the CPU, unless the group's backend sends only from its own device, as NCCL does."""
        kinds = {device.type for device in self.group._device_types}
        return torch.device("cpu" if "cpu" in kinds or not kinds else min(kinds))

    # -- data ----------------------------------------------------------------------------------------------------------

    @eager
    def exchange(
        self, kind: str, sends: Mapping[int, Tensor], receives: Mapping[int, ReceiveBuffer | Tensor], *, step: int = 0
    ) -> Pending:
        """Start to send a tensor to each rank of `sends`, and to receive a block or fill a tensor from other ranks.

        Both sides know the sizes from `agree`. Empty tensors are not sent. The transfer runs while the caller computes.

        Args:
            kind: the kind under which the bytes are counted.
            sends: rank -> tensor to send.
            receives: rank -> the block to receive, or the tensor to fill.
            step: the step within the operation; both sides pass the same number.
        """
        self._check_usable(kind)
        tag = _DATA_TAG + self.count % _TAGS + step * _TAGS
        return self._post(kind, kind, sends, receives, tag)

    @eager
    def gather(self, kind: str, x: Tensor, shapes: Sequence[Shape], *, step: int = 0) -> list[Tensor]:
        """Return the `x` of every rank, ordered by rank; they have these shapes and one dtype."""
        return self.scatter(kind, [x] * self.world, shapes, step=step)

    @eager
    def scatter(self, kind: str, parts: Sequence[Tensor], shapes: Sequence[Shape], *, step: int = 0) -> list[Tensor]:
        """Send part r to rank r (all-to-all); return the parts that all ranks sent to this one, of these shapes."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        receives = {rank: ReceiveBuffer(tuple(shapes[rank]), parts[rank].dtype, parts[rank].device) for rank in others}
        heard = self.exchange(kind, {rank: parts[rank] for rank in others}, receives, step=step).wait()
        return [parts[rank] if rank == self.rank else heard[rank] for rank in range(self.world)]

    @eager
    def reduce_scatter(self, kind: str, parts: Sequence[Tensor], *, step: int = 0) -> Tensor:
        """Return the sum over ranks, in rank order, of this rank's part, of one shape; half dtypes are rounded once."""
        own = parts[self.rank]
        heard = self.scatter(kind, parts, [tuple(own.shape)] * self.world, step=step)
        if self.world == 1:
            return own
        narrow = own.is_floating_point() and own.dtype.itemsize < 4
        total = heard[0].to(torch.float32 if narrow else own.dtype, copy=True)
        for part in heard[1:]:
            total += part
        return total.to(own.dtype)

    @eager
    def all_reduce(self, kind: str, x: Tensor, *, step: int = 0) -> Tensor:
        """Return the sum of all ranks' `x`, of one shape: the same bits on every rank."""
        if self.world == 1:
            return x
        pieces = list(x.reshape(-1).tensor_split(self.world))
        own = self.reduce_scatter(kind, pieces, step=2 * step)
        whole = self.gather(kind, own, [tuple(piece.shape) for piece in pieces], step=2 * step + 1)
        return torch.cat(whole).view(x.shape)

    # -- failure -------------------------------------------------------------------------------------------------------

    def _post(
        self,
        operation: str,
        kind: str,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, ReceiveBuffer | Tensor],
        tag: int,
    ) -> Pending:
        pending = Pending(self, operation)
        ops: list[tuple[int, Any, Tensor]] = []
        for rank, block in receives.items():
            to = (
                torch.empty(block.shape, dtype=block.dtype, device=block.device)
                if isinstance(block, ReceiveBuffer)
                else block
            )
            if to.numel():
                ops.append((rank, dist.irecv, to.view(-1).view(torch.uint8)))
            pending.heard[rank] = to
        for rank, x in sends.items():
            if x.numel():
                wire = _numbers(x).view(torch.uint8)
                ops.append((rank, dist.isend, wire))
                self.sent[kind] += wire.numel()
                self.messages[kind] += 1
        pending.works = started(self.group, ops, tag, lambda rank, error: self.failure(operation, rank, error))
        return pending

    def _check_usable(self, operation: str) -> None:
        if self._broken is not None:
            raise RankError(operation, None, f"this group has failed before ({self._broken}); restart the processes")

    def failure(self, operation: str, peer: int, error: Exception) -> RankError:
        """Return the error of an operation that failed while waiting for `peer`; the group cannot be used after it."""
        late = "timed out" in str(error).lower()
        self._note({"operation": operation, "waits for": peer, "count": self.count, "late": late})
        rank, text = self._cause(peer, late)
        self._broken = f"rank {rank} {text}"
        return RankError(operation, rank, text)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Return a context that reports an error of this rank; ranks that wait for it find it after their timeout."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
            self._note({"raised": text})
            self._broken = f"rank {self.rank} raised {text}"
            raise

    @property
    def grace(self) -> float:
        """The seconds of the timeout that are reserved for reading the notes of other ranks."""
        return min(2.0, 0.2 * self.timeout)

    def _cause(self, peer: int, late: bool) -> tuple[int | None, str]:
        """Return the rank that is the cause and its behaviour: the end of the chain of waiting ranks."""
        seen, until = [self.rank], time.monotonic() + self.grace
        while True:
            note = self._read_note(peer, until)
            if note is not None and "raised" in note:
                return peer, f"raised {note['raised']}"
            if note is None:
                silent = f"sent nothing for {self.timeout:g} s: it hangs, or is busy with other work"
                return peer, silent if late else "has ended: its connection is closed"
            seen.append(peer)
            peer, late = note["waits for"], note["late"]  # the note of the waiting rank records how its peer failed
            if peer in seen:
                ring = ", ".join(f"rank {a} waits for rank {b}" for a, b in zip(seen, [*seen[1:], peer], strict=True))
                return None, f"the ranks wait for each other: {ring}; they call operations in different orders"

    def _key(self, rank: int) -> str:
        return f"headwise/{self.group.group_name}/{rank}"

    def _note(self, note: dict[str, Any]) -> None:
        store = _store()
        try:
            if store is not None:
                store.set(self._key(self.rank), json.dumps(note))
        except RuntimeError:  # the process that has the store has ended
            pass

    def _read_note(self, rank: int, until: float) -> dict[str, Any] | None:
        store = _store()
        try:
            while store is not None:
                if store.check([self._key(rank)]):
                    return json.loads(store.get(self._key(rank)))
                if time.monotonic() > until:
                    return None
                time.sleep(0.02)
        except RuntimeError:
            pass
        return None


def group_of(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the process group of a group, of a mesh of one dimension, or of all processes (None)."""
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of one dimension; got {group.ndim} dimensions, {group.mesh_dim_names}: select one by "
                'mesh["name"]'
            )
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is a torch.distributed process group or a DeviceMesh of one dimension; got {shown(group)}"
        )
    return group


def _store() -> Any:
    """Return the store with which the processes were started; None if there is none."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError, AttributeError):
        return None


def _message(error: object) -> str:
    """Return the message of an error, with its type unless the type has messages made for users."""
    own = isinstance(error, str | TypeError | ValueError) and str(error)
    return (str(error) if own else f"{type(error).__name__}: {error}")[:_LONGEST_TEXT]


def _texts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, (int, float, type(None))) else str(v)[:_LONGEST_TEXT] for k, v in facts.items()}


def _compare(operation: str, name: str, facts: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise RankMismatch for the first rank whose value differs from the most frequent value."""
    if all(value == values[0] for value in values):
        return
    keys = [json.dumps(value) for value in values]
    usual = Counter(keys).most_common(1)[0][0]
    rank = next(r for r, key in enumerate(keys) if key != usual)
    like = keys.index(usual)
    raise RankMismatch(
        operation,
        rank,
        f"does not agree with rank {like} on the {name}: rank {rank} has {facts[rank]}, rank {like} has {facts[like]}; "
        "every rank of the group makes the same calls with the same options",
    )


def _numbers(x: Tensor) -> Tensor:
    """Return the numbers of a tensor as a contiguous 1-D tensor, with a lazy negation resolved.

    A single number gets stride 1: if it was expanded, torch calls it contiguous with any stride.
    """
    return x.detach().resolve_neg().contiguous().as_strided((x.numel(),), (1,))
